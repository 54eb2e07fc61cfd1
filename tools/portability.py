"""What the built library needs of the system it is loaded on, and the platform tag that follows.

    python tools/portability.py [torch_cubin/_C.so]     what it needs
    python tools/portability.py --tag dist              gives the wheels of a folder their tag, as
                                                        small as zlib can make them

The tag manylinux_2_28 promises glibc 2.28 and the libstdc++ of GCC 8 (RHEL 8, Debian 10, Ubuntu
18.10 and newer), the same as PyTorch's own wheels. A wheel gets it if its library needs no more;
PyTorch's libraries are left out of that reckoning, since torch is an install requirement. Otherwise
the wheel keeps the tag of the machine that built it (linux_x86_64), and what stood in the way is
printed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "torch_cubin" / "_C.so"
MANYLINUX = "manylinux_2_28"
# The newest symbol versions of a system with that tag.
LIMITS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}


def readelf(library: Path, *options: str) -> str:
    command = ["readelf", "--wide", *options, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def needed(library: Path) -> list[str]:
    """The libraries that the loader must find (DT_NEEDED)."""
    return re.findall(r"\(NEEDED\)\s+Shared library: \[(.+)\]", readelf(library, "--dynamic"))


def exported(library: Path) -> list[str]:
    """The symbols that other libraries can see."""
    found = []
    for line in readelf(library, "--dyn-syms").splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0].endswith(":") and fields[6] not in ("UND", "Ndx"):
            binding, visibility, name = fields[4], fields[5], fields[7]
            if binding in ("GLOBAL", "WEAK", "UNIQUE") and visibility == "DEFAULT":
                found.append(name)
    return found


def versions(library: Path) -> dict[str, dict[tuple[int, ...], list[str]]]:
    """Per kind (GLIBC, GLIBCXX, ...) and version, the symbols that are needed at that version."""
    found: dict[str, dict[tuple[int, ...], list[str]]] = {}
    pattern = r"\bUND\s+(\S+?)@([A-Z]+)_([\d.]+)\b"
    for name, kind, version in re.findall(pattern, readelf(library, "--dyn-syms")):
        parts = tuple(map(int, version.split(".")))
        found.setdefault(kind, {}).setdefault(parts, []).append(name)
    return found


def too_new(library: Path) -> list[str]:
    """What a system with the tag manylinux_2_28 lacks; empty if the library loads there."""
    return [
        f"{name}@{kind}_{'.'.join(map(str, version))}"
        for kind, by_version in versions(library).items()
        for version, names in by_version.items()
        for name in names
        if kind not in LIMITS or version > LIMITS[kind]
    ]


def summary(library: Path) -> str:
    newest = {kind: max(by_version) for kind, by_version in versions(library).items()}
    return ", ".join(f"{kind} {'.'.join(map(str, newest[kind]))}" for kind in sorted(newest))


def compress_best(wheel: Path) -> None:
    """At zlib's best level in place of its default: 0.3 MB less of a complete wheel, in 5 s more,
    which an installation from source need not wait for."""
    part = wheel.with_name(f"{wheel.name}.part")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(part, "w") as new:
        for info in old.infolist():
            new.writestr(info, old.read(info), zipfile.ZIP_DEFLATED, 9)
    part.replace(wheel)


def megabytes(wheel: Path) -> str:
    return f"{wheel.stat().st_size / 1e6:.2f} MB"


def tag(wheel: Path) -> Path:
    """Renames a wheel by what its library needs."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        library = Path(archive.extract("torch_cubin/_C.so", folder))
        excess, text = too_new(library), summary(library)
        if "torch_cubin/_launch.abi3.so" in archive.namelist():
            excess += too_new(Path(archive.extract("torch_cubin/_launch.abi3.so", folder)))
    if excess or "-linux_" not in wheel.name:
        why = f"; not {MANYLINUX}: {' '.join(excess)}" if excess else ""
        compress_best(wheel)
        print(f"wheel: {wheel} ({megabytes(wheel)}; needs {text}{why})")
        return wheel
    platform = wheel.name.removesuffix(".whl").split("-linux_")[1]
    command = [sys.executable, "-m", "wheel", "tags", "--remove"]
    command += ["--platform-tag", f"{MANYLINUX}_{platform}", str(wheel)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    renamed = wheel.with_name(Path(answer.stdout.split()[-1]).name)
    compress_best(renamed)  # last: `wheel tags` writes the archive anew
    print(f"wheel: {renamed} ({megabytes(renamed)}; needs {text})")
    return renamed


def main() -> int:
    if sys.argv[1:2] == ["--tag"]:
        for wheel in sorted(Path(sys.argv[2]).glob("torch_cubin-*.whl")):
            tag(wheel)
        return 0
    library = Path(sys.argv[1]) if len(sys.argv) > 1 else LIBRARY
    print(f"{library.name} needs {', '.join(needed(library))}")
    print(f"symbol versions: {summary(library)}")
    print(f"newer than {MANYLINUX}: {' '.join(too_new(library)) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
