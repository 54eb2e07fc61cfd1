"""Compares the compressed sizes of a wheel's parts with their limits.

python tools/wheel_size.py dist/*.whl
"""

from __future__ import annotations

import sys
import zipfile
from collections import Counter
from pathlib import Path

MB = 1_000_000
TOTAL = 14.3
# In MB: the kernels of each architecture, in archives (csrc/kernels/build/archives.py), and the
# rest (libraries, Python, the manifest), compressed by libdeflate (tools/portability.py). A wheel
# with some architectures only is compared with the limits of its parts.
KERNELS = {"sm_80": 1.3, "sm_86": 1.3, "sm_90a": 5.5, "sm_100a": 1.8, "sm_120a": 1.6}
REST = "the rest"
LIMITS = {**KERNELS, REST: round(TOTAL - sum(KERNELS.values()), 2)}

CUBINS = "torch_cubin/cubins/"
HEADERS = 30 + 46  # bytes of a zip entry's two headers, without its name, which both contain


def part_of(name: str) -> str:
    return name.removeprefix(CUBINS).split("/")[0] if name.startswith(f"{CUBINS}sm_") else REST


def sizes(wheel: Path) -> Counter[str]:
    """Bytes by part."""
    total: Counter[str] = Counter()
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            total[part_of(info.filename)] += info.compress_size + HEADERS + 2 * len(info.filename)
    return total


def too_large(found: dict[str, int]) -> list[str]:
    """A line for each part that exceeds its limit or has none."""
    return [
        f"{part} takes {size / MB:.2f} MB, its limit is {LIMITS.get(part, 0):.2f}"
        for part, size in found.items()
        if not size <= LIMITS.get(part, 0) * MB
    ]


def main(wheels: list[str]) -> int:
    if not wheels:
        print(__doc__, file=sys.stderr)
        return 2
    wrong = []
    for wheel in map(Path, wheels):
        found = sizes(wheel)
        print(f"{wheel.name}: {wheel.stat().st_size / MB:.2f} MB")
        for part, size in found.most_common():
            print(f"  {part:8} {size / MB:6.2f} MB of {LIMITS.get(part, 0):.2f}")
        wrong += [f"{wheel.name}: {line}" for line in too_large(found)]
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
