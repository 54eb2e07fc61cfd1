"""Contracts of declared ops for tests, and the C API that takes them (csrc/c_api_ops.cpp)."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._native import library

DATA = Path(__file__).resolve().parent / "data"
SEVERAL = DATA / "several.sm_90a.cuda130.cubin"
LAUNCH = DATA / "launch.sm_90a.cuda130.cubin"

_library = ctypes.CDLL(str(library.PATH))  # function objects of its own, beside that one
for _name in ("define_ops", "load_package", "ops", "packages_error", "preload_op"):
    getattr(_library, f"torch_cubin_{_name}").restype = ctypes.c_void_p
_library.torch_cubin_free.argtypes = [ctypes.c_void_p]


def _answer(address: int) -> dict[str, Any]:
    answer = json.loads(ctypes.string_at(address))
    _library.torch_cubin_free(address)
    if "error" in answer:
        raise errors.make(answer["error"]["tag"], answer["error"]["message"])
    return answer


def define(*contracts: dict, files: Sequence[Path | bytes] = (SEVERAL,)) -> list[dict]:
    """The answer of torch_cubin_define_ops, an entry an op."""
    return define_text(json.dumps({"version": 1, "ops": list(contracts)}), files)


def define_text(text: str, files: Sequence[Path | bytes] = (SEVERAL,)) -> list[dict]:
    contents = [file if isinstance(file, bytes) else file.read_bytes() for file in files]
    names = [b"bytes" if isinstance(file, bytes) else b"file '%s'" % bytes(file) for file in files]
    count = len(contents)
    return _answer(
        _library.torch_cubin_define_ops(
            text.encode(),
            (ctypes.c_char_p * count)(*contents),
            (ctypes.c_size_t * count)(*map(len, contents)),
            (ctypes.c_char_p * count)(*names),
            ctypes.c_size_t(count),
        )
    )["ops"]


def load_package(folder: Path) -> list[dict]:
    return _answer(_library.torch_cubin_load_package(bytes(folder)))["ops"]


def ops() -> dict[str, dict]:
    """The ops that are declared in this process, by name."""
    return {op["name"]: op for op in _answer(_library.torch_cubin_ops())["ops"]}


def packages_error() -> None:
    _answer(_library.torch_cubin_packages_error())


def preload(name: str, device: int = 0) -> None:
    _answer(_library.torch_cubin_preload_op(name.encode(), device))


_count = 0


def new_name(stem: str = "op") -> str:
    """A name that no op of this process has."""
    global _count
    _count += 1
    return f"test_contracts::{stem}_{_count}"


TENSOR = {"dtype": "float32", "shape": ["*s"]}


def vec_add(name: str | None = None) -> dict:
    """z = x + y by `vec_add(const float*, const float*, float*, int)`, which both files have."""
    return {
        "schema": f"{name or new_name('vec_add')}(Tensor x, Tensor y) -> Tensor",
        "tensors": {name: dict(TENSOR) for name in ("x", "y", "out")},
        "outputs": ["out"],
        "kernels": [
            {
                "images": [0],
                "kernel": "vec_add",
                "args": [
                    *(["pointer", name] for name in ("x", "y", "out")),
                    ["int32", ["numel", "x"]],
                ],
                "grid": [["neg", ["floordiv", ["neg", ["numel", "x"]], 256]], 1, 1],
                "block": [256, 1, 1],
            }
        ],
    }


def changed(contract: dict, path: str, value: Any) -> dict:
    """A copy with `value` at "kernels/0/block"; the last step may be a new key. `...` deletes."""
    copied = copy.deepcopy(contract)
    *steps, last = [int(step) if step.isdigit() else step for step in path.split("/")]
    place = copied
    for step in steps:
        place = place[step]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return copied


def write_package(folder: Path, *contracts: dict, files: Sequence[Path] = (SEVERAL,)) -> Path:
    """A package of those contracts, whose images are copies of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    images = []
    for file in files:
        content = file.read_bytes()
        (folder / file.name).write_bytes(content)
        images.append({"file": file.name, "sha256": hashlib.sha256(content).hexdigest()})
    manifest = {
        "format": "torch_cubin package",
        "version": 1,
        "images": images,
        "ops": list(contracts),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def defined(contract: dict, **more) -> str:
    """The name of the op that this defines."""
    (answer,) = define(contract, **more)
    assert answer["state"] == "defined"
    return answer["name"]


def exists(contract: dict) -> bool:
    """Whether PyTorch knows its op."""
    space, name = contract["schema"].split("(")[0].split("::")
    return hasattr(getattr(torch.ops, space), name.split(".")[0])
