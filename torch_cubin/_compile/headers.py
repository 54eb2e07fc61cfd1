"""Standard headers for NVRTC, which has none, and the digest of a source's includes."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

_INTEGERS = "".join(
    f"typedef signed {c} int{n}_t;\ntypedef unsigned {c} uint{n}_t;\n"
    for n, c in ((8, "char"), (16, "short"), (32, "int"), (64, "long long"))
)
_CSTDINT = f"""#pragma once
{_INTEGERS}typedef long long intptr_t;
typedef unsigned long long uintptr_t;
#define INT8_MAX 127
#define INT16_MAX 32767
#define INT32_MAX 2147483647
#define INT64_MAX 9223372036854775807LL
#define INT8_MIN (-INT8_MAX - 1)
#define INT16_MIN (-INT16_MAX - 1)
#define INT32_MIN (-INT32_MAX - 1)
#define INT64_MIN (-INT64_MAX - 1)
#define UINT8_MAX 255
#define UINT16_MAX 65535
#define UINT32_MAX 4294967295U
#define UINT64_MAX 18446744073709551615ULL
"""
_STD = "namespace std {{\n{}}}\n"
_CSTDINT_STD = _CSTDINT + _STD.format(
    "".join(f"using ::{s}int{n}_t;\n" for n in (8, 16, 32, 64) for s in ("", "u"))
    + "using ::intptr_t;\nusing ::uintptr_t;\n"
)
_CSTDDEF = "#pragma once\n#ifndef NULL\n#define NULL 0\n#endif\n" + _STD.format(
    "using ::size_t;\nusing nullptr_t = decltype(nullptr);\n"
)
_CLIMITS = """#pragma once
#define CHAR_BIT 8
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295U
#define LONG_MAX 9223372036854775807L
#define LLONG_MAX 9223372036854775807LL
#define LLONG_MIN (-LLONG_MAX - 1)
#define ULLONG_MAX 18446744073709551615ULL
"""
_CFLOAT = """#pragma once
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define DBL_MAX 1.7976931348623158e+308
#define DBL_MIN 2.2250738585072014e-308
#define DBL_EPSILON 2.2204460492503131e-16
"""
# Enough for the headers that kernels usually include; CUDA's cuda/std has more.
OWN = {
    "cstdint": _CSTDINT_STD,
    "stdint.h": _CSTDINT_STD,
    "cstddef": _CSTDDEF,
    "stddef.h": _CSTDDEF,
    "climits": _CLIMITS,
    "limits.h": _CLIMITS,
    "cfloat": _CFLOAT,
    "float.h": _CFLOAT,
    "cmath": "#pragma once\n",  # its functions are built in
    "math.h": "#pragma once\n",
}

# What a compiler takes for an #include, or asks for by __has_include. Comments within a line may
# stand anywhere. What follows and is no name, such as a macro, is the third group.
_GAP = r"(?:[ \t]|/\*[^\n]*?\*/)*"
_INCLUDE = re.compile(
    rf"(?:(?:^|\*/){_GAP}(?:#|%:|\?\?=){_GAP}(?:include|import|embed|(?=/\*))"
    rf"|\b__has_(?:include|embed)(?:{_GAP}\(|(?=_next))){_GAP}"
    r'(?:"([^"\n]+)"|<([^>\n]+)>|([^\n]*))',
    re.M,
)
_MOST_FILES = 2000


def digest(source: str, folders: Sequence[Path], known: Sequence[Path]) -> str | None:
    """A digest of the files that a source includes from `folders`, recursively.

    Of all folders that have one: compilers search some kinds of folders before others. Files in the
    folders `known`, whose version the caller's key has, are not read. None if an include is a
    macro, or there are too many: then a result cannot be cached.
    """
    hashed = hashlib.sha256()
    seen: set[Path] = set()
    waiting: list[tuple[str, Path | None]] = [(source, None)]
    while waiting:
        text, home = waiting.pop()
        for quoted, angled, other in _INCLUDE.findall(re.sub(r"\\\r?\n", "", text)):
            if other.strip():
                return None
            name = quoted or angled
            near = [home] if quoted and home is not None else []
            if Path(name).is_absolute():
                near.append(Path("/"))
            for folder in (*near, *folders):
                path = folder / name
                if not path.is_file():
                    # A header that appears here later would change the program.
                    hashed.update(f"-{path}\0".encode())
                    continue
                # By its folder: the same file in another one has other neighbours.
                placed = path.parent.resolve() / path.name
                if placed not in seen and not any(one in path.parents for one in known):
                    seen.add(placed)
                    if len(seen) > _MOST_FILES:
                        return None
                    content = path.read_bytes()
                    hashed.update(f"+{path}\0{len(content)}\0".encode() + content)
                    waiting.append((content.decode("utf-8", "replace"), path.parent))
    return hashed.hexdigest()


# Options that add folders or files, by their beginnings.
_BRINGING = (
    *("-I", "--include", "-isystem", "--system-include", "-include", "--pre-include"),
    *("-iquote", "-idirafter", "-imacros", "--imacros", "-iprefix", "-iwithprefix", "-isysroot"),
    *("-Xcompiler", "--compiler-options", "-Xpreprocessor", "-Wp,", "-B", "--sysroot"),
    *("--options-file", "-optf", "@", "-pch", "--pch", "-use-pch", "--use-pch"),
)


def brings_files(options: Iterable[str]) -> bool:
    """Whether the options add folders or headers, which digest() does not cover."""
    return any(option.startswith(_BRINGING) for option in options)


def folders_of_options(options: Iterable[str]) -> list[Path] | None:
    """The folders that a C++ compiler's options add; None if they add more than folders."""
    folders: list[Path] = []
    rest = iter(options)
    for option in rest:
        match = re.match("-I|-isystem|-iquote|-idirafter", option)
        if match is not None:
            folders.append(Path(option[match.end() :] or next(rest, "")))
        elif brings_files([option]):
            return None
    return folders


def folders_of_environment() -> list[Path]:
    """The folders in which a C++ compiler also looks for headers."""
    names = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
    given = [os.environ[name].split(os.pathsep) for name in names if os.environ.get(name)]
    # An empty entry is the working folder.
    return [Path(folder) for folders in given for folder in folders] + [Path("/usr/local/include")]
