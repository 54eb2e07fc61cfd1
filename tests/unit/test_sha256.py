"""sha256_hex against hashlib, across every boundary of its padding."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import cubin_check


def test_sha256_matches_hashlib(tmp_path: Path) -> None:
    generator = random.Random(1)
    sizes = [*range(200), 447, 448, 511, 512, 513, 4095, 4096, 4097, 100_003]
    commands, wanted = [], []
    for size in sizes:
        data = generator.randbytes(size)
        path = tmp_path / str(size)
        path.write_bytes(data)
        commands.append(("sha256", path))
        wanted.append(hashlib.sha256(data).hexdigest())
    assert cubin_check.run(*commands) == wanted


def test_sha256_of_published_examples(tmp_path: Path) -> None:
    """FIPS 180-4's own examples: "abc", the two-block message, and a million times "a"."""
    examples = {
        b"abc": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq": (
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"
        ),
        b"a" * 1_000_000: "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0",
    }
    path = tmp_path / "message"
    for message, digest in examples.items():
        path.write_bytes(message)
        assert cubin_check.run(("sha256", path)) == [digest]
