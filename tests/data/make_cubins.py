"""Remakes the committed files of this folder, so that the readers' tests run without nvcc.

    python tests/data/make_cubins.py PTXAS_11_8 PTXAS_12_4 PTXAS_12_9
    python tests/data/make_cubins.py containers

The arguments are the `ptxas` of older toolkits, which write layouts that nvcc 13 (taken from PATH)
no longer does. They come with the PyPI packages nvidia-cuda-nvcc-cu11==11.8.89,
nvidia-cuda-nvcc-cu12==12.4.131 and nvidia-cuda-nvcc-cu12==12.9.86. The second line makes only
containers/, out of the cubins that are there: fatbins in each compression, an object with a fatbin
in it, a relocatable cubin, PTX. It needs nvcc and fatbinary of CUDA 13.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

DATA = Path(__file__).resolve().parent

VEC_ADD = """extern "C" __global__ void vec_add(const float* x, const float* y, float* z, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) z[i] = x[i] + y[i];
}
"""


def run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True)


def assemble(ptxas: str, ptx: Path, arch: str, isa: str, out: Path) -> None:
    """ptxas of an older toolkit over PTX whose version and target are rewritten to suit it."""
    text = re.sub(r"\.version \S+", f".version {isa}", ptx.read_text())
    text = re.sub(r"\.target \S+", f".target {arch}", text)
    rewritten = out.with_suffix(".ptx")
    rewritten.write_text(text)
    run(ptxas, f"-arch={arch}", rewritten, "-o", out)


def make_containers() -> None:
    """Small ones of each kind. Objects have another suffix, since git ignores *.o."""
    out = DATA / "containers"
    out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        source = Path(name, "vec_add.cu")
        source.write_text(VEC_ADD)
        run("nvcc", "-ptx", "-arch=compute_80", source, "-o", out / "vec_add.ptx")
        images = [
            f"--image3=kind=elf,sm={sm},file={DATA / file}.cubin"
            for sm, file in (
                ("80", "vec_add.sm_80.cuda118"),
                ("90a", "vec_add.sm_90a.cuda124"),
                ("120a", "vec_add.sm_120a.cuda130"),
            )
        ]
        images.append(f"--image3=kind=ptx,sm=80,file={out / 'vec_add.ptx'}")
        for packing, mode in (("raw", "none"), ("lz4", "speed"), ("zstd", "size")):
            options = ["-64", "--compress-all", f"--compress-mode={mode}"]
            if packing == "zstd":
                options += ["--ident=vec_add.cu", "--cmdline=-O3 -v", "-g"]
            run("fatbinary", f"--create={out / f'vec_add.{packing}.fatbin'}", *options, *images)
        lto = ("-gencode", "arch=compute_90,code=lto_90")
        run(
            "nvcc",
            "-dc",
            "-fatbin",
            "-arch=sm_90a",
            source,
            "-o",
            out / "vec_add.relocatable.fatbin",
        )
        run("nvcc", "-dc", "-fatbin", *lto, source, "-o", out / "vec_add.lto.fatbin")
        run("nvcc", "-dc", "-cubin", "-arch=sm_90a", source, "-o", out / "vec_add.relocatable")
        archs = ("-gencode", "arch=compute_80,code=[sm_80,compute_80]", "-Xfatbin", "-compress-all")
        run("nvcc", "-c", *archs, source, "-o", out / "vec_add.object")
        run("strip", "--strip-unneeded", out / "vec_add.object")


def main() -> int:
    if sys.argv[1:] == ["containers"]:
        make_containers()
        for path in sorted(DATA.glob("containers/*")):
            print(f"{path.stat().st_size:7} {path.name}")
        return 0
    if len(sys.argv) != 4:
        print(__doc__)
        return 2
    ptxas_118, ptxas_124, ptxas_129 = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "vec_add.cu"
        source.write_text(VEC_ADD)
        ptx = folder / "vec_add_source.ptx"
        run("nvcc", "-ptx", "-arch=compute_80", source, "-o", ptx)
        made = {
            "vec_add.sm_80.cuda118": (ptxas_118, ptx, "sm_80", "7.8"),
            "vec_add.sm_90a.cuda124": (ptxas_124, ptx, "sm_90a", "8.4"),
            "pointers.sm_90.cuda124": (ptxas_124, DATA / "pointers.ptx", "sm_90", "8.4"),
            "pointers.sm_100f.cuda129": (ptxas_129, DATA / "pointers.ptx", "sm_100f", "8.8"),
        }
        for stem, (ptxas, text, arch, isa) in made.items():
            out = folder / f"{stem}.cubin"
            assemble(ptxas, text, arch, isa, out)
            (DATA / out.name).write_bytes(out.read_bytes())
        for stem, text in (
            ("vec_add.sm_120a", source),
            ("several.sm_90a", DATA / "several.cu"),
            ("launch.sm_90a", DATA / "launch.cu"),
            ("declared.sm_90a", DATA / "declared.cu"),
        ):
            arch = stem.split(".")[1]
            run("nvcc", "-cubin", f"-arch={arch}", text, "-o", DATA / f"{stem}.cuda130.cubin")
        for stem, define in (("faults", "FAULTS"), ("large_table", "LARGE_TABLE")):
            out = DATA / "faults" / f"{stem}.sm_90a.cuda130.cubin"
            run(
                "nvcc",
                "-cubin",
                "-arch=sm_90a",
                f"-D{define}",
                out.with_name("faults.cu"),
                "-o",
                out,
            )
    make_containers()
    for path in sorted(DATA.glob("*.cubin")):
        print(f"{path.stat().st_size:7} {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
