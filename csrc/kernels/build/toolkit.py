"""Finds the CUDA compiler: nvcc, ptxas and the folder with cuda.h.

Looks at CUDA_HOME and CUDA_PATH, at PATH, at /usr/local/cuda and at the compiler wheels from PyPI
in the running interpreter's site-packages, in this order. Never installs anything:
`install_hint()` says how to. Needs no torch and no GPU.

    python csrc/kernels/build/toolkit.py                 what was found
    python csrc/kernels/build/toolkit.py --requirements  the wheels for `pip install -r`
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping

# All five are pinned: nvcc's own wheel leaves nvvm and crt open, pip then takes a newer release of
# them, and ptxas 13.0 refuses the PTX they make.
REQUIREMENTS = (
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-nvvm==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
)


class BuildError(Exception):
    """A kernel package cannot be built. The message follows the library's template."""

    def __init__(
        self, tag: str, subject: str, problem: str, expected: str = "", got: str = "", do: str = ""
    ):
        facts = [f"expected {expected}"] if expected else []
        facts += [f"got {got}"] if got else []
        text = f"torch_cubin [{tag}]: {subject} {problem}"
        text += f": {', '.join(facts)}." if facts else "."
        super().__init__(f"{text} {do}".rstrip())


@dataclasses.dataclass(frozen=True)
class Toolkit:
    nvcc: pathlib.Path
    ptxas: pathlib.Path
    include: pathlib.Path  # the folder with cuda.h
    release: str  # "13.0.88"


def install_hint() -> str:
    """How to get a compiler, in one sentence."""
    wheels = " ".join(f"'{wheel}'" for wheel in REQUIREMENTS)
    return (
        "Install a CUDA toolkit (13.0 or newer) and set CUDA_HOME, or install the compiler alone: "
        f"{sys.executable} -m pip install {wheels}"
    )


def wheel_root(site_packages: pathlib.Path) -> pathlib.Path:
    return site_packages / "nvidia" / "cu13"


def candidates(
    env: Mapping[str, str], site_packages: list[pathlib.Path], system: pathlib.Path
) -> Iterator[pathlib.Path]:
    """Folders that may hold bin/nvcc, best first."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if env.get(name):
            yield pathlib.Path(env[name])
    on_path = shutil.which("nvcc", path=env.get("PATH", ""))
    if on_path:
        yield pathlib.Path(on_path).resolve().parent.parent
    yield system
    yield from (wheel_root(folder) for folder in site_packages)


def interpreter_site_packages() -> list[pathlib.Path]:
    # A build in isolation (pip wheel) runs in a fresh environment whose sys.path still ends with
    # site-packages folders: take every one of them.
    return [pathlib.Path(entry) for entry in sys.path if entry.endswith("-packages")]


def find_include(root: pathlib.Path) -> pathlib.Path | None:
    for folder in (root / "include", *sorted(root.glob("targets/*/include"))):
        if (folder / "cuda.h").is_file():
            return folder
    return None


def read_release(nvcc: pathlib.Path) -> str:
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    return found.group(1) if found else "unknown"


def find_toolkit(
    env: Mapping[str, str] | None = None,
    site_packages: list[pathlib.Path] | None = None,
    system: pathlib.Path = pathlib.Path("/usr/local/cuda"),
) -> Toolkit:
    """The first complete toolkit; BuildError [file] that lists where it looked."""
    env = os.environ if env is None else env
    site_packages = interpreter_site_packages() if site_packages is None else site_packages
    looked = []
    for root in candidates(env, site_packages, system):
        if root in looked:
            continue
        looked.append(root)
        nvcc, ptxas, include = root / "bin" / "nvcc", root / "bin" / "ptxas", find_include(root)
        if not (os.access(nvcc, os.X_OK) and os.access(ptxas, os.X_OK) and include):
            continue
        try:
            return Toolkit(nvcc, ptxas, include, read_release(nvcc))
        except (OSError, subprocess.SubprocessError):
            continue  # for example an nvcc for another processor: try the next folder
    places = ", ".join(str(root) for root in looked) or "no folder"
    raise BuildError(
        "file",
        "the CUDA compiler",
        "is missing",
        expected="bin/nvcc, bin/ptxas and include/cuda.h in one folder",
        got=f"none in {places}",
        do=install_hint(),
    )


def main() -> int:
    if "--requirements" in sys.argv[1:]:
        print("\n".join(REQUIREMENTS))
        return 0
    try:
        print(find_toolkit())
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
