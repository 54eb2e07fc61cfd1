"""python -m torch_cubin export: writes a compiler's kernels to files for define_op."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from torch_cubin import errors


def triton(options: argparse.Namespace) -> int:
    """Compiles a @triton.jit function for each arch, for torch_cubin.producers.triton.read."""
    from torch_cubin.producers import triton as producer

    path, _, name = options.kernel.rpartition(":")
    function = _found(Path(path), name, options.kernel)
    given = {
        key: getattr(options, key)
        for key in ("num_warps", "num_stages", "num_ctas", "maxnreg")
        if getattr(options, key) is not None
    }
    kernels = producer.compile(function, options.signature, options.arch.split(","), **given)
    folder = producer.write(options.output or Path(name), kernels, overwrite=options.overwrite)
    for kernel in kernels:
        print(
            f"{kernel.name} for {kernel.arch}: {len(kernel.cubin)} bytes, Triton {kernel.version}"
        )
    print(f"in {folder}")
    return 0


def _found(path: Path, name: str, given: str) -> Any:
    label = f"'{given}'"
    if path.suffix != ".py" or not name:
        raise errors.fault("input", label, "names no kernel", expected="FILE.py:NAME")
    if not path.is_file():
        raise errors.fault("file", f"file '{path}'", "is missing")
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise errors.fault("input", label, "names no kernel of the file", got=f"'{name}'")
    return getattr(module, name)
