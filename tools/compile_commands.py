"""Writes build/compile_commands.json: the command that compiles each C++ file of csrc/ separately.

    python tools/compile_commands.py

The build compiles a folder as one file (write_units in setup.py). clang-tidy and editors need one
command per file, with the same options. This also finds files that do not include what they use.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "build" / "compile_commands.json"
STANDARD = "-std=c++20"  # the minimum for PyTorch's current headers
# Options that only GCC has, and options that only change strings in the object file.
NOT_CLANGS = ("-fno-gnu-unique", "-Wno-maybe-uninitialized", "-ffile-prefix-map")


def setup_module():
    """setup.py, whose extension() holds the options."""
    spec = importlib.util.spec_from_file_location("torch_cubin_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sources() -> list[Path]:
    files = sorted((ROOT / "csrc").rglob("*.cpp"))
    return [path for path in files if ROOT / "csrc" / "kernels" not in path.parents]


def include_flags(folder: Path) -> tuple[str, str]:
    """Marks other projects' headers as system headers, whose warnings are not reported."""
    ours = (ROOT / "csrc", ROOT / "torch_cubin", ROOT / "build")
    is_ours = any(path == folder or path in folder.parents for path in ours)
    return ("-I" if is_ours else "-isystem", str(folder))


def commands() -> list[dict[str, object]]:
    options = setup_module().extension()
    include = [flag for path in options.include_dirs for flag in include_flags(Path(path))]
    flags = [flag for flag in options.extra_compile_args if not flag.startswith(NOT_CLANGS)]
    words = ["c++", STANDARD, "-fPIC", *include, *flags, "-c"]
    return [
        {"directory": str(ROOT), "file": str(path), "arguments": [*words, str(path)]}
        for path in sources()
    ]


def main() -> None:
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(json.dumps(commands(), indent=1))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
