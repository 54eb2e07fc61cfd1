"""Audits the built library with torch-abi-audit: it may use PyTorch's stable ABI only, nothing
newer than the oldest supported torch (TORCH_MIN in setup.py), and no Python C API.

    python tools/abi_audit.py [torch_cubin/_C.so]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "torch_cubin" / "_C.so"


def torch_min() -> tuple[int, ...]:
    text = (ROOT / "setup.py").read_text()
    return tuple(map(int, re.search(r"^TORCH_MIN = \((\d+), (\d+)\)", text, re.M).groups()))


def audit(library: Path) -> dict:
    """The report of torch-abi-audit on one library."""
    program = "import sys; from torch_abi_audit.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, str(library), "--json"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    report = json.loads(answer.stdout)
    (found,) = [*report["extensions"], *report["bundled_libs"]]
    return found


def problems(found: dict) -> list[str]:
    torch, limit = found["torch"], torch_min()
    minimum = torch["min_torch_version"]
    result = []
    if found["error"]:
        result.append(f"could not be read: {found['error']}")
    if not torch["uses_torch"] or not torch["stable"]:
        result.append(f"is not on the stable ABI: {torch['unstable_symbols']}")
    if torch["unknown_shim_symbols"]:
        result.append(f"uses shims of no known torch: {torch['unknown_shim_symbols']}")
    if minimum is None or tuple(map(int, minimum.split(".")[:2])) > limit:
        wanted = ".".join(map(str, limit))
        by = torch["version_defining_symbols"]
        result.append(f"needs torch {minimum}, but setup.py promises {wanted}: {by}")
    if found["cpython"]["intent"] or found["cpython"]["violations"]:
        result.append(f"uses Python's C API: {found['cpython']}")
    return result


def main() -> int:
    library = Path(sys.argv[1]) if len(sys.argv) > 1 else LIBRARY
    found = audit(library)
    for problem in problems(found):
        print(f"abi audit: {library.name} {problem}", file=sys.stderr)
    if problems(found):
        return 1
    torch = found["torch"]
    print(
        f"abi audit: {library.name}: stable ABI, {torch['stable_shim_count']} shims, "
        f"torch >= {torch['min_torch_version']}, no Python C API"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
