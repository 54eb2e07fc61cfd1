"""torch_cubin.errors: tags to classes, and texts by the template."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import cubin_check
import pytest
import torch

import torch_cubin
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
def test_make(tag: str) -> None:
    message = f"torch_cubin [{tag}]: thing is wrong: expected 1, got 2. Do it."
    made = errors.make(tag, message)
    assert (type(made), made.tag, str(made)) == (errors.CLASSES[tag], tag, message)
    assert isinstance(made, errors.Error)
    assert isinstance(made, RuntimeError)
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


def test_names_of_files_are_escaped_for_the_terminal(tmp_path: Path) -> None:
    """Line ends and escape sequences of a name stand escaped, in C++'s messages and in Python's."""
    name = "a\n\x1b[31mb\x9b\udcff"
    for function in (torch_cubin.load, torch_cubin.inspect, torch_cubin.load_package):
        with pytest.raises(errors.Error) as caught:
            function(tmp_path / name)
        text = str(caught.value)
        assert text.isprintable(), ascii(text)
    (tmp_path / name).write_bytes(b"no cubin")
    with pytest.raises(errors.Error) as caught:
        torch_cubin.load(tmp_path / name)
    assert str(caught.value).isprintable(), ascii(str(caught.value))
    fault = errors.fault("file", f"file '{name}'", "is odd", got="two\nlines\x1b")
    assert str(fault) == (
        "torch_cubin [file]: file 'a\\n\\x1b[31mb\\x9b\\udcff' is odd: got two\nlines\\x1b."
    )


X = torch.ones(2, 4)
WRONG_TYPES = {
    "newton_schulz": lambda: torch_cubin.newton_schulz([X, X]),
    "moe": lambda: torch_cubin.moe(X, [[0], [0]], X[:, :1], X[None], X[None]),
    "row_parallel_linear": lambda: torch_cubin.row_parallel_linear(X, [X], parts=1),
    "float8": lambda: torch_cubin.float8([torch.nn.Linear(4, 4)]),
}


@pytest.mark.parametrize("function", WRONG_TYPES)
def test_a_list_for_a_tensor_or_a_module_is_an_error_that_names_it(function: str) -> None:
    with pytest.raises(errors.InputError, match=rf"{function} argument '\w+' has a wrong type"):
        WRONG_TYPES[function]()
