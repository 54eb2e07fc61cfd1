"""parse_cubin against other readers of the same files: binutils' readelf, NVIDIA's cuobjdump.

Only on cubins of our own: cuobjdump is never run on a user's file (SECURITY.md).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import cubin_check
import pytest
import real_cubins

READELF = shutil.which("readelf")
CUOBJDUMP = real_cubins.cuobjdump()


def files() -> list[Path]:
    return [*real_cubins.COMMITTED, *(path for path, _ in real_cubins.compiled().values())]


def output(*command: object) -> str:
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.skipif(READELF is None, reason="needs readelf (binutils), found none")
def test_parse_cubin_agrees_with_readelf() -> None:
    for path in files():
        facts = cubin_check.facts(path)
        text = output(READELF, "-SsW", path)
        # "  34: 0... 512 FUNC    GLOBAL DEFAULT [<other>: 10]    29 vec_add"
        names = re.findall(r" FUNC .*\[<other>: 10\] +\d+ (\S+)", text)
        assert sorted(names) == [kernel["name"] for kernel in facts["kernels"]], path
        shared = dict(re.findall(r"\] \.nv\.shared\.(\S+) +NOBITS +\S+ \S+ (\S+)", text))
        reserved = 1024 if facts["sm"] >= 90 else 0
        for kernel in facts["kernels"]:
            size = int(shared.get(kernel["name"], "0"), 16)
            assert kernel["static_shared"] == max(0, size - reserved), (path, kernel["name"])


PARAM = re.compile(
    r"Ordinal : 0x(\w+)\s+Offset  : 0x(\w+)\s+Size    : 0x(\w+)\s+.*?Space : 0x(\w+)"
)


def cuobjdump_params(path: Path) -> dict[str, list[tuple[int, int, int, int]]]:
    """{kernel: [(index, offset, size, space)]} out of `cuobjdump -elf`."""
    found = {}
    for section in re.split(r"\n(?=\.nv\.info\.)", output(CUOBJDUMP, "-elf", path))[1:]:
        name = section.split()[0].removeprefix(".nv.info.")
        body = re.split(r"\n\.(?!nv\.info\.)", section)[0]
        found[name] = sorted(tuple(int(v, 16) for v in values) for values in PARAM.findall(body))
    return found


@pytest.mark.skipif(
    CUOBJDUMP is None, reason="needs cuobjdump (CUDA toolkit or Triton), found none"
)
def test_parse_cubin_agrees_with_cuobjdump() -> None:
    compared = 0
    for path in files():
        facts = cubin_check.facts(path)
        params = cuobjdump_params(path)
        usage = {
            name: {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}
            for name, line in re.findall(
                r"Function (\S+):\n(.*)", output(CUOBJDUMP, "-res-usage", path)
            )
        }
        for kernel in facts["kernels"]:
            name = kernel["name"]
            assert [
                (p["index"], p["offset"], p["size"], p["kind"] == "pointer")
                for p in kernel["params"]
            ] == [  # a mangled name tells pointers, too
                (i, o, s, space != 0 or kernel["params"][i]["cpp_type"].endswith("*"))
                for i, o, s, space in params[name]
            ], (path, name)
            assert kernel["registers"] == usage[name]["REG"], (path, name)
            compared += 1
    assert compared >= 14
