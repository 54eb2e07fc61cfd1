"""Signed packages: who may load what, and that neither the manifest nor an image can be changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import declared
import pytest
from declared import vec_add
from preloaded import PreloadedPython

import torch_cubin
from torch_cubin import errors
from torch_cubin._declared import signing

pytest.importorskip("cryptography")
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519


@pytest.fixture
def key() -> ed25519.Ed25519PrivateKey:
    return ed25519.Ed25519PrivateKey.generate()


def public(key: ed25519.Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


@pytest.fixture(scope="module")
def python():
    with PreloadedPython(["torch"]) as python:
        yield python


def load_elsewhere(python, path: Path, trusted: object = None, code: str = "", **environment: str):
    """In a process that has no such op yet: its output."""
    program = f"import torch, torch_cubin; {code}\n"
    program += f"print(*torch_cubin.load_package({str(path)!r}, trusted={trusted!r}))"
    return python.run(program, env={**os.environ, **environment})


def refused(path: Path, got: str, trusted: object) -> None:
    with pytest.raises(errors.HashError, match="is not signed by a trusted key") as caught:
        torch_cubin.load_package(path, trusted=trusted)
    assert got in str(caught.value)


def test_a_signed_package_is_loaded_by_its_key(tmp_path: Path, key, python) -> None:
    op = vec_add()
    path = torch_cubin.save_package(tmp_path / "package", [op], key=key)
    assert len(list(path.glob("manifest.*.sig"))) == 1
    for trusted in (
        [public(key)],
        [public(key).upper()],
        [key.public_key()],
        ["00" * 32, public(key)],
    ):
        assert list(torch_cubin.load_package(path, trusted=trusted)) == [op.name]
    assert list(torch_cubin.load_package(path)) == [op.name]  # signatures are not required
    refused(path, "one by key " + public(key), ["00" * 32])
    refused(path, "one by key " + public(key), [])
    done = load_elsewhere(python, path, [public(key)])
    assert done.stdout.strip() == op.name, done.stderr


def test_keys_are_read_from_files(tmp_path: Path, key) -> None:
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    (tmp_path / "public.pem").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    path = torch_cubin.save_package(tmp_path / "package", [vec_add()], key=tmp_path / "key.pem")
    assert torch_cubin.load_package(path, trusted=[tmp_path / "public.pem"])


def test_unsigned_and_changed_packages_are_refused(tmp_path: Path, key) -> None:
    unsigned = torch_cubin.save_package(tmp_path / "unsigned", [vec_add()])
    refused(unsigned, "no signature", [public(key)])
    path = torch_cubin.save_package(tmp_path / "package", [vec_add()], key=key)
    manifest = path / "manifest.json"
    (signature,) = path.glob("manifest.*.sig")
    text = manifest.read_bytes()
    manifest.write_bytes(text + b"\n")  # other bytes, the same JSON
    refused(path, "no signature", [public(key)])
    (path / signing.file_name(text + b"\n")).write_bytes(signature.read_bytes())
    refused(path, "a signature of other bytes", [public(key)])
    manifest.write_bytes(text)
    content = json.loads(signature.read_text())
    attacker = ed25519.Ed25519PrivateKey.generate()
    for change, got in (
        ({"public_key": public(attacker)}, "one by key " + public(attacker)),
        ({"signature": "00" * 64}, "a signature of other bytes"),
        ({"signature": content["signature"][:-2]}, "of another kind"),
        ({"signature": attacker.sign(text).hex()}, "a signature of other bytes"),
        ({"algorithm": "none"}, "of another kind, none"),
    ):
        signature.write_text(json.dumps({**content, **change}))
        refused(path, got, [public(key)])
    signature.write_text("nonsense")
    with pytest.raises(errors.FileError, match="is not JSON"):
        torch_cubin.load_package(path, trusted=[public(key)])


def test_an_image_cannot_be_changed_either(tmp_path: Path, key, python) -> None:
    path = torch_cubin.save_package(tmp_path / "package", [vec_add()], key=key)
    (image,) = path.glob("*.cubin")
    image.write_bytes(image.read_bytes() + b"\0")
    done = load_elsewhere(python, path, [public(key)])
    assert "HashError" in done.stderr
    assert "sha256" in done.stderr


def test_the_environment_requires_signatures_of_every_package(tmp_path: Path, key, python) -> None:
    op = vec_add()
    signed = torch_cubin.save_package(tmp_path / "signed", [op], key=key)
    unsigned = torch_cubin.save_package(tmp_path / "unsigned", [declared.cube()])
    both = f"{'00' * 32},{public(key)}"
    assert load_elsewhere(python, signed, TORCH_CUBIN_TRUSTED=both).stdout.strip() == op.name
    assert "not signed" in load_elsewhere(python, unsigned, TORCH_CUBIN_TRUSTED=both).stderr
    assert "not signed" in load_elsewhere(python, signed, TORCH_CUBIN_TRUSTED="").stderr
    # Both lists count.
    assert (
        "not signed" in load_elsewhere(python, signed, ["00" * 32], TORCH_CUBIN_TRUSTED=both).stderr
    )
    named = load_elsewhere(
        python, signed, TORCH_CUBIN_TRUSTED=both, TORCH_CUBIN_PACKAGES=str(unsigned)
    )
    assert "not signed" in named.stderr
    assert "TORCH_CUBIN_PACKAGES" in named.stderr
    wrong = load_elsewhere(python, signed, TORCH_CUBIN_TRUSTED="12")
    assert "TORCH_CUBIN_TRUSTED has an entry that is no public key" in wrong.stderr
    # The library's own kernels are not a package from elsewhere.
    own = "print(torch.ops.cubin.matmul(torch.ones(1, 1), torch.ones(1, 1)))"
    assert "tensor" in load_elsewhere(python, signed, None, own, TORCH_CUBIN_TRUSTED=both).stdout


def test_saving_again_leaves_one_signature(tmp_path: Path, key) -> None:
    op = vec_add()
    path = torch_cubin.save_package(tmp_path / "package", [op], key=key)
    torch_cubin.save_package(path, [op, declared.cube()], key=key, overwrite=True)
    (signature,) = path.glob("manifest.*.sig")
    assert signature.name == signing.file_name((path / "manifest.json").read_bytes())
    assert torch_cubin.load_package(path, trusted=[public(key)])
    torch_cubin.save_package(path, [op], overwrite=True)
    assert not list(path.glob("manifest.*.sig"))


def test_a_library_contains_the_signature(tmp_path: Path, key, python, monkeypatch) -> None:
    op = vec_add()
    path = torch_cubin.save_package(tmp_path / "package", [op], key=key)
    unit, library = tmp_path / "unit.cpp", tmp_path / "library.so"
    torch_cubin.embed.write_unit(unit, package=path, name="signed")
    subprocess.run(["c++", "-shared", "-fPIC", str(unit), "-o", str(library)], check=True)
    assert load_elsewhere(python, library, [public(key)]).stdout.strip() == op.name
    assert "not signed" in load_elsewhere(python, library, ["00" * 32]).stderr
    # Kernels that are taken out of a library's packages are theirs, too.
    code = f"import torch_cubin; images = torch_cubin.load({str(library)!r}).images; "
    code += "print(*(kernel.name for image in images for kernel in image.kernels))"

    def load(trusted: str) -> tuple[str, str]:
        done = python.run(code, env={**os.environ, "TORCH_CUBIN_TRUSTED": trusted})
        return done.stdout, done.stderr

    assert "vec_add" in load(public(key))[0]
    out, error = load("00" * 32)
    assert out == ""
    assert "not signed" in error
    # An image that was exchanged with its entry in the bundle, but not in the manifest.
    (image,) = path.glob("*.cubin")
    image.write_bytes(image.read_bytes() + bytes(8))
    monkeypatch.setattr(torch_cubin.embed._program, "package_files", lambda folder: {
        file.name: file for file in sorted(path.iterdir())
    })  # fmt: skip
    torch_cubin.embed.write_unit(unit, package=path, name="signed")
    subprocess.run(["c++", "-shared", "-fPIC", str(unit), "-o", str(library)], check=True)
    out, error = load(public(key))
    assert out == ""
    assert "sha256" in error


def test_invalid_keys_are_refused(tmp_path: Path, key) -> None:
    path, op = tmp_path / "package", vec_add()
    (tmp_path / "text.pem").write_text("no key")
    other = ec.generate_private_key(ec.SECP256R1())
    for wrong in (b"bytes", 3, other, key.public_key(), tmp_path / "text.pem"):
        with pytest.raises(errors.InputError, match="is given an object that is no key"):
            torch_cubin.save_package(path, [op], key=wrong)
    with pytest.raises(errors.FileError, match=r"none.pem"):
        torch_cubin.save_package(path, [op], key=tmp_path / "none.pem")
    assert not path.exists()
    torch_cubin.save_package(path, [op], key=key)
    for wrong in (
        "00" * 32,
        3,
        ["00"],
        [b"00"],
        [key],
        [other.public_key()],
        [tmp_path / "text.pem"],
    ):
        with pytest.raises(errors.InputError, match="is given an object that is no key"):
            torch_cubin.load_package(path, trusted=wrong)


def test_without_cryptography(tmp_path: Path, key, monkeypatch) -> None:
    path, op = tmp_path / "package", vec_add()
    torch_cubin.save_package(path, [op], key=key)
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(errors.InputError, match="needs the package cryptography"):
        torch_cubin.save_package(tmp_path / "other", [op], key="key.pem")
    assert torch_cubin.load_package(path, trusted=[public(key)])
