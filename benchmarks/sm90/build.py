"""Compiles csrc/kernels/matmul/sm90.cu for a list of tiles; needs nvcc 12.9 or later, no GPU.

    python benchmarks/sm90/build.py OUT [--only SUBSTRING] [--bound]

Writes OUT/<name>.cubin and OUT/kernels.json. A wgmma that ptxas serialises, a spill beyond
SPILL_BYTES and an ignored setmaxnreg are failures. --bound: barriers trap after a second.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "csrc" / "kernels"
SPILL_BYTES = 160  # tolerated: a few words outside the loops
LAYOUTS = {"nt": (0, 0), "nn": (0, 1), "tn": (1, 1), "tt": (1, 0)}  # A, B: MN-major?
# tile M, tile N, stages, consumer warpgroups, streams tiles, splits K in pairs
TILES = [
    (256, 192, 3, 2, 1, 0), (256, 160, 3, 2, 0, 0), (256, 128, 4, 2, 0, 0), (192, 192, 4, 3, 0, 0),
    (128, 256, 4, 2, 0, 0),
    (128, 224, 4, 2, 0, 0), (128, 192, 5, 2, 0, 0), (128, 160, 5, 2, 0, 1), (128, 128, 6, 2, 0, 1),
    (128, 96, 7, 2, 0, 1), (128, 80, 7, 2, 0, 1), (128, 64, 8, 2, 0, 1), (64, 128, 8, 1, 0, 0),
    (64, 256, 5, 1, 0, 0), (64, 192, 6, 1, 0, 0), (64, 96, 9, 1, 0, 0), (64, 64, 10, 1, 0, 0),
]  # fmt: skip


def describe(
    kind: str, layout: str, m: int, n: int, stages: int, consumers: int, streams: int, pairs: int
) -> dict | None:
    """Returns None if the tile exceeds shared memory."""
    a_mn, b_mn = LAYOUTS[layout]
    b_rows = (n + 63) // 64 * 64 if b_mn else n
    limit = 232448
    while stages >= 2:
        operands = stages * (m + b_rows) * 128
        bias = consumers * n * (4 if kind == "tf32" else 2)
        control = 16 * stages + 16 + 64 * (8 if stages < 8 else 16) + bias
        panels = min(4, (limit - control - operands) // (4 * consumers) // 2048)
        if panels >= 1:
            break
        stages -= 1
    else:
        return None
    return {
        "name": f"sm90_matmul_{kind}_{layout}_{m}x{n}",
        "type": kind,
        "layout": layout,
        "a_mn": a_mn,
        "b_mn": b_mn,
        "tile": [m, n],
        "stages": stages,
        "consumers": consumers,
        "streams": streams,
        "pairs": pairs,
        "threads": 128 * (1 + consumers),
        "shared": operands + 4 * consumers * panels * 2048 + control,
    }


def compile_one(kernel: dict, out: Path, extra: list[str]) -> str:
    defines = {
        "TC_KERNEL": kernel["name"],
        "TC_DTYPE": {"bf16": "bfloat16", "f16": "float16", "tf32": "float32"}[kernel["type"]],
        "TC_A_MN": kernel["a_mn"],
        "TC_B_MN": kernel["b_mn"],
        "TC_TILE_M": kernel["tile"][0],
        "TC_TILE_N": kernel["tile"][1],
        "TC_TILE_K": 32 if kernel["type"] == "tf32" else 64,
        "TC_STAGES": kernel["stages"],
        "TC_CONSUMERS": kernel["consumers"],
        "TC_STREAMS": kernel["streams"],
        "TC_PAIRS": kernel["pairs"],
        "TC_READS": 0,
        "TC_THREADS": kernel["threads"],
        "TC_DYNAMIC_SHARED": kernel["shared"],
    }
    command = [
        *("nvcc", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-Xptxas", "-v"),
        *(f"-D{name}={value}" for name, value in defines.items()),
        *extra,
        *("-I", str(KERNELS)),
        *("-o", str(out / f"{kernel['name']}.cubin"), str(KERNELS / "matmul" / "sm90.cu")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    spills = sum(int(x) for x in re.findall(r"(\d+) bytes spill", text))
    registers = re.findall(r"Used (\d+) registers", text)
    line = f"{kernel['name']}: {registers} registers, {spills} bytes spilled"
    if done.returncode or re.search(r"C75\d\d|setmaxnreg", text) or spills > SPILL_BYTES:
        raise SystemExit(f"{line}\n{text}")
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--types", default="bf16")
    parser.add_argument("--layouts", default="nt,nn")
    parser.add_argument("--names", default="", help="comma-separated, for example nt_128x256")
    parser.add_argument("--bound", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    extra = ["-DTC_BOUND_NANOSECONDS=1000000000ull"] if arguments.bound else []
    kernels = []
    for kind in arguments.types.split(","):
        for layout in arguments.layouts.split(","):
            for tile in TILES:
                kernel = describe(kind, layout, *tile)
                if kernel is None or (kind == "tf32" and layout not in ("nt", "tt")):
                    continue
                short = kernel["name"].removeprefix(f"sm90_matmul_{kind}_")
                if arguments.names and short not in arguments.names.split(","):
                    continue
                if not arguments.only or short.split("_")[1] in arguments.only:
                    kernels.append(kernel)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for line in pool.map(lambda k: compile_one(k, arguments.out, extra), kernels):
            print(line, flush=True)
    index = arguments.out / "kernels.json"
    built = {kernel["name"] for kernel in kernels}
    if index.exists():  # keep the kernels of earlier runs
        kernels = [x for x in json.loads(index.read_text()) if x["name"] not in built] + kernels
    index.write_text(json.dumps(kernels, indent=1) + "\n")
    print(f"{len(kernels)} kernels in {arguments.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
