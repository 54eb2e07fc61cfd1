"""Packages: what load_package checks before it registers anything; TORCH_CUBIN_PACKAGES."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path

import contracts
import pytest
from contracts import SEVERAL, changed, load_package, vec_add, write_package
from preloaded import PreloadedPython

from torch_cubin import errors

ROOT = Path(__file__).resolve().parents[2]


def edit(folder: Path, path: str, value) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(changed(manifest, path, value)))


def test_a_package(tmp_path: Path) -> None:
    contract = vec_add()
    folder = write_package(tmp_path / "package", contract)
    (answer,) = load_package(folder)
    assert answer["state"] == "defined"
    assert answer["contract"] == contract
    assert answer["package"] == str(folder.resolve())
    assert contracts.ops()[answer["name"]]["package"] == str(folder.resolve())
    assert load_package(folder)[0]["state"] == "same"
    # From another folder, and by a link: the same content.
    other = write_package(tmp_path / "copy", contract)
    (tmp_path / "link").symlink_to(other)
    assert load_package(tmp_path / "link")[0]["state"] == "same"
    assert contracts.define(contract)[0]["state"] == "same"


def test_a_package_cannot_replace_an_op_that_exists(tmp_path: Path) -> None:
    contract = vec_add()
    contracts.define(contract)
    folder = write_package(tmp_path, vec_add(), changed(contract, "kernels/0/block", [32, 1, 1]))
    with pytest.raises(errors.InputError, match="exists with other content"):
        load_package(folder)
    ops = contracts.ops()
    assert ops[contract["schema"].split("(")[0]]["contract"] == contract


WRONG = [
    ("format", "other", "file", "torch_cubin package"),
    ("format", ..., "input", "'format'"),
    ("version", 2, "file", "expected 1, got 2"),
    ("version", 1.0, "file", "expected 1, got 1.0"),
    ("version", ..., "input", "'version'"),
    ("nope", 1, "input", "'nope'"),
    ("images", ..., "input", "'images'"),
    ("images", {}, "input", "a list"),
    ("ops", ..., "input", "'ops'"),
    ("ops/0/nope", 1, "input", "'nope'"),
    ("ops/0/kernels/0/images", [1], "input", "list of 1 image,"),
    ("images/0", "file", "input", "an object"),
    ("images/0/nope", 1, "input", "'nope'"),
    ("images/0/sha256", "0" * 64, "hash", "sha256 " + "0" * 64),
    ("images/0/sha256", "0" * 63, "input", "64 lower-case"),
    ("images/0/sha256", "A" * 64, "input", "64 lower-case"),
    ("images/0/sha256", 5, "input", "a string"),
    ("images/0/file", "", "file", "outside"),
    ("images/0/file", "/etc/passwd", "file", "outside"),
    ("images/0/file", "../x.cubin", "file", "outside"),
    ("images/0/file", "a/../../x.cubin", "file", "outside"),
    ("images/0/file", "..", "file", "outside"),
    ("images/0/file", "a\0b", "file", "outside"),
    ("images/0/file", "missing.cubin", "file", "missing.cubin"),
    ("images/0/file", ".", "file", "/.'"),
    ("images/0/file", "link.cubin", "file", "link out of its package"),
]


@pytest.mark.parametrize(("path", "value", "tag", "says"), WRONG)
def test_wrong_manifests_are_refused(tmp_path: Path, path, value, tag: str, says: str) -> None:
    contract = vec_add()
    folder = write_package(tmp_path / "package", contract)
    (folder / "link.cubin").symlink_to(SEVERAL)
    edit(folder, path, value)
    with pytest.raises(errors.Error) as caught:
        load_package(folder)
    assert caught.value.tag == tag, caught.value
    assert says in str(caught.value)
    assert contract["schema"].split("(")[0] not in contracts.ops()


def test_one_op_twice_in_a_package(tmp_path: Path) -> None:
    contract = vec_add()
    folder = write_package(tmp_path / "same", contract, contract)
    assert [answer["state"] for answer in load_package(folder)] == ["defined", "same"]
    assert [answer["state"] for answer in load_package(folder)] == ["same", "same"]
    contract = vec_add()
    other = changed(contract, "kernels/0/block", [32, 1, 1])
    with pytest.raises(errors.InputError, match="twice at once"):
        load_package(write_package(tmp_path / "other", contract, other))
    assert contract["schema"].split("(")[0] not in contracts.ops()


def test_links_within_a_package_are_fine(tmp_path: Path) -> None:
    folder = write_package(tmp_path / "package", vec_add())
    (folder / "link.cubin").symlink_to(SEVERAL.name)
    edit(folder, "images/0/file", "./link.cubin")
    assert load_package(folder)[0]["state"] == "defined"


def test_an_image_with_other_bytes_than_its_hash_is_refused(tmp_path: Path) -> None:
    folder = write_package(tmp_path, vec_add())
    content = bytearray((folder / SEVERAL.name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / SEVERAL.name).write_bytes(content)
    with pytest.raises(errors.HashError):
        load_package(folder)


def test_malformed_packages_are_refused(tmp_path: Path) -> None:
    for content in ("", "{", "[]", '"x"', "[" * 10_000):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(errors.Error) as caught:
            load_package(tmp_path)
        assert caught.value.tag in ("file", "input")
        assert str(tmp_path) in str(caught.value)
    (tmp_path / "manifest.json").unlink()
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(errors.FileError):
            load_package(path)


def child(python: PreloadedPython, code: str, packages: str) -> str:
    environment = {**os.environ, "TORCH_CUBIN_PACKAGES": packages}
    return python.output(textwrap.dedent(code), env=environment)


def test_packages_of_the_environment(tmp_path: Path, torch_python) -> None:
    """Their ops are there when the library is loaded, with no Python of this package."""
    one = write_package(tmp_path / "one", vec_add("env_one::add"))
    two = write_package(tmp_path / "two", vec_add("env_two::add"))
    code = f"""
        import torch
        torch.ops.load_library({str(ROOT / "torch_cubin" / "_C.so")!r})
        print(torch.ops.env_one.add.default._schema, torch.ops.env_two.add.default._schema)
    """
    assert child(torch_python, code, f"{one}::{two}:") == (
        "env_one::add(Tensor x, Tensor y) -> Tensor env_two::add(Tensor x, Tensor y) -> Tensor\n"
    )


def test_a_failure_in_the_environment_is_kept(tmp_path: Path, torch_python) -> None:
    """Loading goes on; the first call of a declared op reports the failure, once."""
    good = write_package(tmp_path / "good", vec_add("env_good::add"))
    bad = write_package(tmp_path / "bad", changed(vec_add("env_bad::add"), "outputs", []))
    code = f"""
        import ctypes, torch
        path = {str(ROOT / "torch_cubin" / "_C.so")!r}
        torch.ops.load_library(path)
        torch.ops.env_good.add.default._schema
        assert not hasattr(torch.ops.env_bad, "add")
        library = ctypes.CDLL(path)
        library.torch_cubin_packages_error.restype = ctypes.c_char_p
        print(library.torch_cubin_packages_error().decode())
        print(library.torch_cubin_packages_error().decode())
    """
    lines = child(torch_python, code, f"/nowhere:{bad}:{good}").splitlines()
    for line in lines:
        error = json.loads(line)["error"]
        assert error["tag"] == "file"
        assert "/nowhere" in error["message"]
        assert "TORCH_CUBIN_PACKAGES" in error["message"]
    assert len(lines) == 2
    code = code.replace("assert not", "print('-') #")
    assert child(torch_python, code, f"{good}").splitlines()[-1] == "{}"
