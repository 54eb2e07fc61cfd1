"""Compiles sm90_matmul.cu for a list of configurations; needs nvcc 12.9 or later, no GPU.

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

HERE = Path(__file__).resolve().parent
SPILL_BYTES = 128  # a few words outside of the loops
LAYOUTS = {"nt": (0, 0), "nn": (0, 1), "tn": (1, 1), "tt": (1, 0)}  # A, B: MN-major?
# tile M, tile N, stages (most that fit), consumer warpgroups
TILES = [
    (256, 192, 3, 2), (128, 256, 4, 2), (256, 128, 4, 2), (128, 192, 4, 2), (128, 128, 6, 2),
    (128, 224, 4, 2), (128, 160, 5, 2), (256, 160, 3, 2), (128, 64, 8, 2), (64, 128, 8, 1),
    (128, 80, 7, 2), (128, 96, 6, 2), (64, 64, 12, 1),
]  # fmt: skip


def describe(kind: str, layout: str, m: int, n: int, stages: int, consumers: int) -> dict:
    a_mn, b_mn = LAYOUTS[layout]
    b_rows = (n + 63) // 64 * 64 if b_mn else n
    operands, control = stages * (m + b_rows) * 128, 16 * 16 + 16 + 16 * 48
    panels = min(4, max(2, (232448 - control - operands) // (4 * consumers) // 2048))
    shared = operands + 4 * consumers * panels * 2048 + control
    return {
        "name": f"sm90_matmul_{kind}_{layout}_{m}x{n}",
        "type": kind,
        "layout": layout,
        "a_mn": a_mn,
        "b_mn": b_mn,
        "tile": [m, n],
        "stages": stages,
        "consumers": consumers,
        "threads": 128 * (1 + consumers),
        "shared": shared,
    }


def compile_one(kernel: dict, out: Path, extra: list[str]) -> str:
    defines = {
        "TC_KERNEL": kernel["name"],
        "TC_TYPE": kernel["type"],
        "TC_A_MN": kernel["a_mn"],
        "TC_B_MN": kernel["b_mn"],
        "TC_TILE_M": kernel["tile"][0],
        "TC_TILE_N": kernel["tile"][1],
        "TC_STAGES": kernel["stages"],
        "TC_CONSUMERS": kernel["consumers"],
        "TC_THREADS": kernel["threads"],
        "TC_DYNAMIC_SHARED": kernel["shared"],
    }
    command = [
        *("nvcc", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-Xptxas", "-v"),
        *(f"-D{name}={value}" for name, value in defines.items()),
        *extra,
        *("-o", str(out / f"{kernel['name']}.cubin"), str(HERE / "sm90_matmul.cu")),
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
            for m, n, stages, consumers in TILES:
                kernel = describe(kind, layout, m, n, stages, consumers)
                while kernel["shared"] > 232448:  # MN-major tiles of whole 64 columns need more
                    stages -= 1
                    kernel = describe(kind, layout, m, n, stages, consumers)
                if kind == "tf32" and layout != "nt":
                    continue
                if arguments.names and f"{layout}_{m}x{n}" not in arguments.names.split(","):
                    continue
                if not arguments.only or f"{m}x{n}" in arguments.only:
                    kernels.append(kernel)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for line in pool.map(lambda k: compile_one(k, arguments.out, extra), kernels):
            print(line, flush=True)
    index = arguments.out / "kernels.json"
    built = {kernel["name"] for kernel in kernels}
    if index.exists():  # those of earlier runs stay
        kernels = [x for x in json.loads(index.read_text()) if x["name"] not in built] + kernels
    index.write_text(json.dumps(kernels, indent=1) + "\n")
    print(f"{len(kernels)} kernels in {arguments.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
