"""Standard headers for NVRTC, which has none, and the digest of a source's includes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
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

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>|(.*))$', re.M)
_MOST_FILES = 2000


def digest(source: str, folders: Sequence[Path], of_cuda: Sequence[Path]) -> str | None:
    """A digest of the files that a source includes from `folders`, recursively.

    CUDA's own headers, in `of_cuda`, are identified by the compiler's version and not read. None
    if an include is a macro, or there are too many: then a result cannot be cached.
    """
    hashed = hashlib.sha256()
    seen: set[Path] = set()
    waiting: list[tuple[str, Path | None]] = [(source, None)]
    while waiting:
        text, home = waiting.pop()
        for quoted, angled, other in _INCLUDE.findall(text):
            if other.strip():
                return None
            name = quoted or angled
            near = [home] if quoted and home is not None else []
            for folder in (*near, *folders):
                path = folder / name
                if not path.is_file():
                    # A header that appears here later would change the program.
                    hashed.update(f"-{path}\0".encode())
                    continue
                resolved = path.resolve()
                if resolved not in seen and not any(cuda in path.parents for cuda in of_cuda):
                    seen.add(resolved)
                    if len(seen) > _MOST_FILES:
                        return None
                    content = path.read_bytes()
                    hashed.update(f"+{path}\0{len(content)}\0".encode() + content)
                    waiting.append((content.decode("utf-8", "replace"), path.parent))
                break
    return hashed.hexdigest()
