"""torch_cubin.errors: tags to classes, and C++ texts to exceptions."""

from __future__ import annotations

import json
import pickle
import re

import cubin_check
import pytest
import torch

from torch_cubin import errors

TAGS = [
    *("file", "hash", "image", "arch", "driver", "no_device", "no_kernel", "params", "input"),
    *("launch", "capture", "fork", "oom", "fault", "closed", "internal"),
]


def test_every_public_tag_has_a_class() -> None:
    """The list of ARCHITECTURE 3.12, which csrc/cubin/error.h repeats."""
    assert list(errors.CLASSES) == TAGS
    header = (cubin_check.ROOT / "csrc" / "cubin" / "error.h").read_text()
    listed = re.search(r"The tags are public contract.*?: (.*?)\.\n", header, re.DOTALL)
    assert listed is not None
    assert listed.group(1).replace("//", "").split() == TAGS


@pytest.mark.parametrize("tag", TAGS)
def test_make_and_translate(tag: str) -> None:
    message = f"torch_cubin [{tag}]: thing is wrong: expected 1, got 2. Do it."
    made = errors.make(tag, message)
    assert (type(made), made.tag, str(made)) == (errors.CLASSES[tag], tag, message)
    assert isinstance(made, errors.Error)
    assert isinstance(made, RuntimeError)
    assert type(errors.translate(RuntimeError(message))) is type(made)
    assert errors.translate(made) is made
    again = pickle.loads(pickle.dumps(made))
    assert (type(again), str(again)) == (type(made), message)


@pytest.mark.parametrize(
    ("tag", "builtin"),
    [
        ("file", OSError),
        ("image", ValueError),
        ("hash", ValueError),
        ("arch", NotImplementedError),
        ("no_kernel", LookupError),
        ("params", TypeError),
        ("input", ValueError),
        ("input", TypeError),
        ("launch", ValueError),
        ("oom", torch.OutOfMemoryError),
    ],
)
def test_classes_are_what_python_expects(tag: str, builtin: type) -> None:
    assert issubclass(errors.CLASSES[tag], builtin)


def test_translate_drops_the_backtrace_only() -> None:
    text = "torch_cubin [input]: self is wrong: expected a\nb. Do."
    for trace in ("\nException raised from f at x.cpp:3", "\nC++ CapturedTraceback:\n#4 f"):
        translated = errors.translate(RuntimeError(text + trace))
        assert isinstance(translated, errors.InputError)
        assert str(translated) == text


def test_translate_of_a_failed_allocation_keeps_its_start() -> None:
    text = "CUDA out of memory. torch_cubin [oom]: an output of 8 bytes does not fit."
    translated = errors.translate(RuntimeError(text))
    assert isinstance(translated, torch.OutOfMemoryError)
    assert str(translated).startswith("CUDA out of memory.")


def test_translate_leaves_others_alone() -> None:
    assert errors.translate(RuntimeError("CUDA error: invalid argument")) is None
    assert errors.translate(RuntimeError("torch_cubin [nonsense]: x")) is None
    assert errors.translate(ValueError("torch_cubin [input]: x")) is None
    assert errors.translate(KeyboardInterrupt()) is None


def test_make_of_an_unknown_tag_is_internal() -> None:
    assert type(errors.make("later", "torch_cubin [later]: x")) is errors.InternalError


def test_fault_builds_the_template_as_cpp_does() -> None:
    cases = [
        ("image", "cubin 'k'", "is truncated", "9 bytes", "5 bytes", "Copy it."),
        ("arch", "cubin 'k'", "is wrong", "", "", ""),
        ("input", "self", "has a wrong dtype", "float32", "", ""),
        ("params", "kernel 'k'", "has too few", "", "3", "Pass 4."),
    ]
    lines = cubin_check.run(*[("message", *case) for case in cases])
    for (tag, what, problem, expected, got, advice), line in zip(cases, lines, strict=True):
        made = errors.fault(tag, what, problem, expected=expected, got=got, advice=advice)
        assert {"tag": made.tag, "message": str(made)} == json.loads(line)["error"]
