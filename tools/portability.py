"""The system requirements of the built library, and the wheel's platform tag that follows.

    python tools/portability.py [torch_cubin/_C.so]     prints the requirements
    python tools/portability.py --tag dist              tags the wheels in a folder and recompresses
                                                        them with libdeflate

The tag manylinux_2_28 promises glibc 2.28 and the libstdc++ of GCC 8 (RHEL 8, Debian 10, Ubuntu
18.10 and newer), the same as PyTorch's own wheels. A wheel gets this tag if its library needs no
more; PyTorch's libraries do not count, since torch is an install requirement. Otherwise the wheel
keeps the tag of the build machine (linux_x86_64), and the reason is printed.
"""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "torch_cubin" / "_C.so"
MANYLINUX = "manylinux_2_28"
# The newest symbol versions that manylinux_2_28 guarantees.
LIMITS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}

ZIP_VERSION = 20  # version 2.0 of the zip format supports deflate and folders
ZIP_UTF8 = 0x800  # flag: the name is UTF-8
ZIP_MAX_ENTRIES = 0xFFFE  # without zip64, which 0xFFFF marks


def readelf(library: Path, *options: str) -> str:
    command = ["readelf", "--wide", *options, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def needed(library: Path) -> list[str]:
    """The libraries in DT_NEEDED."""
    return re.findall(r"\(NEEDED\)\s+Shared library: \[(.+)\]", readelf(library, "--dynamic"))


def exported(library: Path) -> list[str]:
    """The exported dynamic symbols."""
    found = []
    for line in readelf(library, "--dyn-syms").splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0].endswith(":") and fields[6] not in ("UND", "Ndx"):
            binding, visibility, name = fields[4], fields[5], fields[7]
            if binding in ("GLOBAL", "WEAK", "UNIQUE") and visibility == "DEFAULT":
                found.append(name)
    return found


def versions(library: Path) -> dict[str, dict[tuple[int, ...], list[str]]]:
    """The required symbols, by kind (GLIBC, GLIBCXX, ...) and version."""
    found: dict[str, dict[tuple[int, ...], list[str]]] = {}
    pattern = r"\bUND\s+(\S+?)@([A-Z]+)_([\d.]+)\b"
    for name, kind, version in re.findall(pattern, readelf(library, "--dyn-syms")):
        parts = tuple(map(int, version.split(".")))
        found.setdefault(kind, {}).setdefault(parts, []).append(name)
    return found


def too_new(library: Path) -> list[str]:
    """The requirements that a manylinux_2_28 system does not meet; empty if the library loads."""
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


def best_deflate() -> Callable[[bytes], bytes]:
    """The function that compresses to a deflate stream: libdeflate's, else zlib's with a note."""
    try:
        import deflate
    except ImportError as error:
        print(
            f"wheel: compressed by zlib's level 9, to some 2% more than by libdeflate ({error}): "
            "`make environment` installs the package `deflate`"
        )
        # Cuts off zlib's header and checksum, which a zip archive does not contain.
        return lambda data: zlib.compress(data, 9)[2:-4]
    return lambda data: deflate.deflate_compress(data, 12)


def write_archive(path: Path, old: zipfile.ZipFile, compress: Callable[[bytes], bytes]) -> None:
    """Writes the entries of a zip archive to a new one, compressed by `compress`.

    zipfile compresses by zlib alone, so the records are written here, as PKWARE's APPNOTE.TXT
    describes them (4.3). Order, names, times and attributes stay; an entry that `compress` does not
    shrink is stored. Extra fields and comments, which wheels do not have, are ignored. Raises
    SystemExit without writing anything if the archive might need zip64.
    """
    entries, central = old.infolist(), b""
    count, size = len(entries), sum(info.file_size for info in entries)
    if count > ZIP_MAX_ENTRIES or size > zipfile.ZIP64_LIMIT:
        raise SystemExit(
            f"wheel: {old.filename} is too large: expected at most {ZIP_MAX_ENTRIES} entries and "
            f"{zipfile.ZIP64_LIMIT} bytes, unpacked, got {count} and {size}"
        )
    with path.open("wb") as file:
        for info in entries:
            data = old.read(info)
            packed, method = compress(data), zipfile.ZIP_DEFLATED
            if len(packed) >= len(data):
                packed, method = data, zipfile.ZIP_STORED
            name = info.filename.encode()
            flags = ZIP_UTF8 if info.flag_bits & ZIP_UTF8 or not info.filename.isascii() else 0
            year, month, day, hour, minute, second = info.date_time
            # The 26 bytes that an entry's local and central headers share.
            common = struct.pack(
                "<5H3L2H",
                *(ZIP_VERSION, flags, method),
                *(hour << 11 | minute << 5 | second // 2, (year - 1980) << 9 | month << 5 | day),
                *(zlib.crc32(data), len(packed), len(data), len(name), 0),
            )
            made_by = struct.pack("<2B", info.create_version, info.create_system)
            attributes = (info.internal_attr, info.external_attr)
            central += b"PK\1\2" + made_by + common
            central += struct.pack("<3H2L", 0, 0, *attributes, file.tell()) + name
            file.write(b"PK\3\4" + common + name)
            file.write(packed)
        end = struct.pack("<4H2LH", 0, 0, count, count, len(central), file.tell(), 0)
        file.write(central + b"PK\5\6" + end)


def compress_best(wheel: Path) -> None:
    """Recompresses a wheel with libdeflate's level 12; the result is ordinary deflate.

    A wheel of sm_90a's kernels (12 MB unpacked, a third of them in archives that deflate leaves as
    they are) shrinks by 1.8% compared with pip's (zlib level 6) and by 1.6% compared with zlib
    level 9. It takes 2 s, so an installation from source does not do it (deflate 0.9.0,
    2026-11-28).
    """
    part = wheel.with_name(f"{wheel.name}.part")
    with zipfile.ZipFile(wheel) as old:
        write_archive(part, old, best_deflate())
    # zlib decompresses every entry once before the original wheel is replaced.
    with zipfile.ZipFile(part) as new:
        broken = new.testzip()
    if broken is not None:
        raise SystemExit(f"wheel: {part} is broken: {broken} decompresses to other bytes")
    part.replace(wheel)


def megabytes(wheel: Path) -> str:
    return f"{wheel.stat().st_size / 1e6:.2f} MB"


def tag(wheel: Path) -> Path:
    """Renames a wheel to the platform tag that its library allows."""
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
    compress_best(renamed)  # last, because `wheel tags` rewrites the archive
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
