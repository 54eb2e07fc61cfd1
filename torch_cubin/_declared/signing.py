"""Ed25519 signatures of packages: keys, and the file beside the manifest. C++ checks them
(csrc/package/signature.cpp)."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch_cubin import errors


def file_name(manifest: bytes) -> str:
    """The signature file's name for a manifest with these bytes."""
    return f"manifest.{hashlib.sha256(manifest).hexdigest()}.sig"


def signature(key: Any, manifest: bytes) -> bytes:
    """The signature file's content. `key`: from private_key()."""
    content = {
        "algorithm": "ed25519",
        "public_key": key.public_key().public_bytes_raw().hex(),
        "signature": key.sign(manifest).hex(),
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def private_key(key: Any) -> Any:
    """An Ed25519PrivateKey of the package cryptography, from one or from a PEM's file."""
    ed25519, serialization = _cryptography()
    if isinstance(key, (str, os.PathLike)):
        try:
            data = Path(key).read_bytes()
        except OSError as error:
            reason = f"cannot be read ({error.strerror})"
            raise errors.fault("file", f"the key's file '{key}'", reason) from error
        try:
            key = serialization.load_pem_private_key(data, None)
        except (ValueError, TypeError) as error:
            raise _no_key("save_package(key=)", "an unencrypted PEM", str(error)) from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise _no_key("save_package(key=)", "an Ed25519 private key", type(key).__name__)
    return key


def public_keys(keys: Iterable[Any]) -> list[str]:
    """The keys as 64 hex digits each."""
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Iterable):
        raise _no_key("load_package(trusted=)", "a list of public keys", type(keys).__name__)
    return [_public_key(key) for key in keys]


def _public_key(key: Any) -> str:
    if isinstance(key, str) and re.fullmatch(r"[0-9a-fA-F]{64}", key):
        return key
    ed25519, serialization = _cryptography()
    if isinstance(key, (str, os.PathLike)):
        try:
            data = Path(key).read_bytes()
        except OSError as error:
            got = f"'{key}' ({error.strerror})"
            expected = "64 hex digits, or the file of a PEM"
            raise _no_key("load_package(trusted=)", expected, got) from error
        try:
            key = serialization.load_pem_public_key(data)
        except (ValueError, TypeError) as error:
            raise _no_key("load_package(trusted=)", "a PEM of a public key", str(error)) from error
    if isinstance(key, ed25519.Ed25519PublicKey):
        return key.public_bytes_raw().hex()
    raise _no_key("load_package(trusted=)", "an Ed25519 public key", type(key).__name__)


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise errors.fault(
            "input",
            "a package's signature",
            "needs the package cryptography",
            got="none",
            advice="Install it (40 or newer), or give public keys as 64 hex digits.",
        ) from error
    return ed25519, serialization


def _no_key(what: str, expected: str, got: str) -> errors.Error:
    return errors.fault(
        "input", what, "is given an object that is no key", expected=expected, got=got
    )
