"""docs/errors.md: every tag, its causes and what to do, with the message that the library gives.

The test fails where the file differs from what the library says now; tools/error_docs.py writes it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import contracts
import pytest
import torch
from forked import error_of, forked

import torch_cubin
from torch_cubin import errors
from torch_cubin._native import library

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "errors.md"
BUILTIN = ("OSError", "ValueError", "NotImplementedError", "LookupError", "TypeError")

HEAD = """# Errors

Made by `python tools/error_docs.py`, which provokes every error on a stand-in for the CUDA driver.
A test compares this file with what the library says.

Every error is a `torch_cubin.Error` (a RuntimeError) with a `tag`, of the class in
`torch_cubin.errors` that stands below. What comes out of `torch.ops.cubin` and other ops in C++ is
a plain RuntimeError; its text has the same form, and carries the tag:

    torch_cubin [tag]: <object> <what is wrong>: expected X, got Y. <what to do>

A failed load, launch or definition leaves nothing half-done: the same call can be made again. After
`fault` the process has to be started again.
"""


class Case(NamedTuple):
    cause: str
    advice: str
    provoke: Callable[[], object]


class Scene:
    """What the cases share: the driver, a module with kernels, a folder that is the current one."""

    def __init__(self, driver, folder: Path) -> None:
        self.driver, self.folder = driver, folder
        shutil.copy(contracts.SEVERAL, folder / "several.cubin")
        shutil.copy(contracts.DATA / "vec_add.sm_120a.cuda130.cubin", folder / "vec_add.cubin")
        shutil.copy(contracts.DATA / "containers" / "vec_add.ptx", folder / "vec_add.ptx")
        (folder / "cut.cubin").write_bytes(contracts.SEVERAL.read_bytes()[:4000])
        (folder / "x86.o").write_bytes(
            (contracts.DATA / "containers" / "vec_add.object").read_bytes()
        )
        self.x = torch.zeros(64)

    def module(self):
        module = torch_cubin.load("several.cubin")
        self.driver.declare(module)
        return module

    def launch(self, *arguments: object, module=None, **shape: object) -> None:
        kernel = (module or self.module())["vec_add"]
        given = arguments or (self.x, self.x, self.x, 64)
        kernel(*given, **{"grid": 1, "block": 64, **shape})

    def failing(self, function: str, code: int) -> Callable[[], None]:
        def provoke() -> None:
            module = self.module()
            if function == "cuLaunchKernelEx":
                self.launch(module=module)
            self.driver.fail(function, code, times=2)
            try:
                self.launch(module=module)
            finally:
                self.driver.reset()

        return provoke


def other_hash() -> None:
    folder = contracts.write_package(Path("package"), contracts.vec_add("errors::vec_add"))
    image = folder / contracts.SEVERAL.name
    image.write_bytes(image.read_bytes()[:-1] + b"?")
    torch_cubin.load_package(folder)


def other_arch(scene: Scene) -> None:
    module = torch_cubin.load("vec_add.cubin")
    scene.driver.declare(module)
    scene.launch(module=module)


def too_old(scene: Scene) -> None:
    scene.driver.set("version", 11080)
    scene.launch()


def no_device(scene: Scene) -> None:
    del os.environ["FAKE_CUDA_DEVICES"]
    scene.launch()


def after_fork(scene: Scene) -> None:
    scene.launch()
    text = forked(lambda: error_of(scene.launch))
    raise errors.make("fork", text[1])


def unloaded(scene: Scene) -> None:
    module = scene.module()
    kernel = module["vec_add"]
    module.unload()
    kernel(scene.x, scene.x, scene.x, 64, grid=1, block=64)


def another_build(scene: Scene) -> None:
    module = scene.module()  # which its kernels do not outlive
    handle = library.module_kernel(module._handle, "vec_add")["handle"]
    call = (ctypes.c_uint64 * 64)()
    library.raise_error(library.load().torch_cubin_kernel_launch(handle, ctypes.addressof(call)))


def cases(scene: Scene) -> dict[str, list[Case]]:
    x = scene.x
    return {
        "file": [
            Case(
                "A file or folder is missing, unreadable, not of the expected kind, or changed.",
                "Check the path and its rights; build or copy the file again.",
                lambda: torch_cubin.load("missing.cubin"),
            ),
            Case(
                "A package's manifest is missing, malformed, or of another version.",
                "Save the package again with this torch_cubin.",
                lambda: torch_cubin.load_package("."),
            ),
        ],
        "hash": [
            Case(
                "The bytes of an image are not those that its manifest promises.",
                "Copy or build the package again. Nothing of it was loaded.",
                other_hash,
            ),
        ],
        "image": [
            Case(
                "A file is damaged, or cut short.",
                "Build or copy it again.",
                lambda: torch_cubin.load("cut.cubin"),
            ),
            Case(
                "A file is whole, and nothing that the driver can load.",
                "The message says what it is, and how to get a cubin out of it.",
                lambda: torch_cubin.load("vec_add.ptx"),
            ),
        ],
        "arch": [
            Case(
                "No image, or no kernel of the catalog, runs on this GPU.",
                "Build for the architecture that the message names.",
                lambda: other_arch(scene),
            ),
        ],
        "driver": [
            Case(
                "libcuda is missing, too old, a stub, or refused a call for no cause below.",
                "Install an NVIDIA driver for CUDA 12.0 or newer; `python -m torch_cubin doctor`.",
                lambda: too_old(scene),
            ),
        ],
        "no_device": [
            Case(
                "There is no GPU, or none of that number, or CUDA_VISIBLE_DEVICES hides it.",
                "Check `nvidia-smi` and CUDA_VISIBLE_DEVICES.",
                lambda: no_device(scene),
            ),
        ],
        "no_kernel": [
            Case(
                "An image has no kernel, or no variable, of that name.",
                "Take a name of the message's; `python -m torch_cubin inspect FILE` lists all.",
                lambda: scene.module()["vec_ad"],
            ),
        ],
        "params": [
            Case(
                "Arguments do not fit the parameters that the binary lists: too few, too many, of "
                "another size or kind.",
                "Pass what the message lists.",
                lambda: scene.launch(x, x),
            ),
        ],
        "input": [
            Case(
                "An argument of an op has a wrong shape, dtype, device, layout or address.",
                "Pass what the message expects.",
                lambda: torch.ops.cubin.matmul(torch.ones(2, 3), torch.ones(2, 3)),
            ),
            Case(
                "A declaration cannot be: a schema, pattern, expression or name is malformed, or "
                "taken.",
                "Correct the line that the message quotes.",
                lambda: contracts.define(contracts.vec_add("aten::vec_add")),
            ),
        ],
        "launch": [
            Case(
                "Grid, block, cluster or shared memory are out of range for the kernel or the GPU.",
                "Launch with what the message allows.",
                lambda: scene.launch(block=2048),
            ),
        ],
        "capture": [
            Case(
                "A call that a CUDA graph cannot record, such as a first load on an old driver.",
                "Make one call, or preload(), before the capture begins.",
                scene.failing("cuLaunchKernelEx", 900),
            ),
        ],
        "fork": [
            Case(
                "CUDA was used before this process was forked.",
                "Start workers with the 'spawn' method.",
                lambda: after_fork(scene),
            ),
        ],
        "oom": [
            Case(
                "Memory ran out, after PyTorch's cache was emptied and the call made once more.",
                "Free memory. It is a torch.OutOfMemoryError too.",
                scene.failing("cuLibraryLoadData", 2),
            ),
        ],
        "fault": [
            Case(
                "A kernel read or wrote where it may not, trapped, or failed an assertion. The "
                "kernel named was launched last, and need not be the one to blame.",
                "Start the process again: its context cannot be used any more. `compute-sanitizer` "
                "finds the access.",
                scene.failing("cuLaunchKernelEx", 700),
            ),
        ],
        "closed": [
            Case(
                "A module was unloaded, or the context that held it was destroyed.",
                "Load it again; after the end of the context, start the process again.",
                lambda: unloaded(scene),
            ),
        ],
        "internal": [
            Case(
                "A bug of torch_cubin, or parts of two versions of it in one installation.",
                "Install it again; then report the message.",
                lambda: another_build(scene),
            ),
        ],
    }


def names(tag: str) -> str:
    made = errors.CLASSES[tag]
    also = [base.__name__ for base in made.__mro__ if base.__name__ in BUILTIN]
    if issubclass(made, torch.OutOfMemoryError):
        also = ["torch.OutOfMemoryError"]
    return f"`{made.__name__}`" + "".join(f", also `{name}`" for name in also)


def document(driver, folder: Path) -> str:
    parts = [HEAD]
    for tag in errors.CLASSES:
        parts.append(f"\n## {tag}\n\n{names(tag)}\n")
        for number, case in enumerate(cases(Scene(driver, folder))[tag]):
            # In a process of its own: a driver is opened once, and devices stay open.
            kind, text = forked(lambda tag=tag, number=number: said(driver, folder, tag, number))
            text = text.replace(str(folder), "/folder")
            assert f"torch_cubin [{tag}]: " in text, (kind, text)
            prose = [
                textwrap.fill(line, 100, break_long_words=False, break_on_hyphens=False)
                for line in (case.cause, f"**Do:** {case.advice}")
            ]
            parts.append("\n".join(["", *prose, "", "```", text, "```", ""]))
    return "".join(parts)


def said(driver, folder: Path, tag: str, number: int) -> list[str]:
    return error_of(cases(Scene(driver, folder))[tag][number].provoke)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # so that messages hold no path of this machine
    return tmp_path


def test_the_document_says_what_the_library_says(driver, folder) -> None:
    text = document(driver, folder)
    if os.environ.get("TORCH_CUBIN_TEST_WRITE"):
        DOCUMENT.write_text(text)
    assert DOCUMENT.read_text() == text, "run: python tools/error_docs.py"


def test_every_tag_has_causes(driver, folder) -> None:
    assert list(cases(Scene(driver, folder))) == list(errors.CLASSES)
