"""The decoders of LZ4, zstd and LZMA: against the formats' own tools, and on damaged data."""

from __future__ import annotations

import json
import lzma
import random
import struct
import subprocess
from pathlib import Path

import containers
import cubin_check
import pytest
import real_cubins

ZSTD = containers.zstd()


def decompress(how: str, stored: bytes, size: int, folder: Path) -> bytes | dict:
    """The bytes, or the error."""
    source, out = folder / "stored", folder / "plain"
    source.write_bytes(stored)
    (line,) = cubin_check.run(("decompress", how, source, size, out))
    return out.read_bytes() if line == "done" else json.loads(line)["error"]


def refused(how: str, stored: bytes, size: int, folder: Path, *words: str) -> None:
    error = decompress(how, stored, size, folder)
    assert isinstance(error, dict), "accepted"
    assert error["tag"] == "image"
    for word in words:
        assert word in error["message"], error


def samples() -> dict[str, bytes]:
    """Data of every kind of entropy, so that every part of the format is used."""
    random.seed(20261121)
    words = [random.randbytes(4) for _ in range(300)]
    cubins = b"".join(path.read_bytes() for path in real_cubins.COMMITTED)
    skewed = bytes(
        random.choices(range(256), weights=[2 ** (8 - i // 8) for i in range(256)], k=70_000)
    )
    return {
        "empty": b"",
        "one": b"x",
        "zeros": bytes(300_000),
        "text": Path(__file__).read_bytes(),
        "cubins": cubins,
        "cubins many times": cubins * 12,
        "random": random.randbytes(200_000),
        "skewed": skewed,
        "two symbols": bytes(random.choices(b"ab", k=50_000)),
        # So few symbols that zstd writes their Huffman weights plainly; many short matches.
        "few low symbols": bytes(random.choices(range(6), weights=[40, 20, 9, 5, 2, 1], k=4000)),
        "short words": b"".join(random.choices(words, k=70_000)),
        "all symbols": bytes(range(256)) * 600,
        "runs": b"".join(
            bytes([random.randrange(256)]) * random.randrange(1, 400) for _ in range(999)
        ),
        "far repeats": cubins + random.randbytes(400_000) + cubins + bytes(200_000) + cubins,
        "small": b"abcabcabcabd" * 3,
    }


FRAMES = [[], ["--no-check", "--no-content-size"], ["--long=24"]]


@pytest.mark.skipif(ZSTD is None, reason="needs the zstd program, found none")
@pytest.mark.parametrize("level", [1, 3, 6, 12, 19])
def test_zstd_agrees_with_the_program(level: int, tmp_path: Path) -> None:
    for name, data in samples().items():
        for options in FRAMES if level == 3 else FRAMES[:1]:
            command = [ZSTD, f"-{level}", "-q", "-c", *options]
            stored = subprocess.run(command, input=data, capture_output=True, check=True).stdout
            found = decompress("zstd", stored, len(data), tmp_path)
            assert found == data, (name, level, options)


def lz4_pack(data: bytes) -> bytes:
    """A plain LZ4 compressor of the test's own: the longest match at the latest place."""
    out, literals, at, seen = bytearray(), bytearray(), 0, {}

    def lengths(value: int) -> bytes:
        return b"\xff" * ((value - 15) // 255) + bytes([(value - 15) % 255]) if value >= 15 else b""

    def emit(match: int, distance: int) -> None:
        token = min(len(literals), 15) << 4 | (min(match - 4, 15) if match else 0)
        out.append(token)
        out.extend(lengths(len(literals)) + literals)
        if match:
            out.extend(struct.pack("<H", distance) + lengths(match - 4))
        literals.clear()

    while at < len(data):
        key = data[at : at + 4]
        start = seen.get(key, -1)
        seen[key] = at
        if len(key) == 4 and start >= 0 and at - start < 65536 and len(data) - at > 12:
            match = 4
            while at + match < len(data) - 5 and data[start + match] == data[at + match]:
                match += 1
            emit(match, at - start)
            at += match
        else:
            literals.append(data[at])
            at += 1
    emit(0, 0)
    return bytes(out)


def test_lz4_gives_back_what_was_packed(tmp_path: Path) -> None:
    for name, data in samples().items():
        packed = lz4_pack(data)
        if name in ("zeros", "cubins", "text"):
            assert len(packed) < len(data)
        assert decompress("lz4", packed, len(data), tmp_path) == data, name


def test_lz4_refuses_damage(tmp_path: Path) -> None:
    data = b"abcdefgh" * 40 + b"the end"
    packed = lz4_pack(data)
    assert decompress("lz4", packed, len(data), tmp_path) == data
    refused("lz4", packed, len(data) - 1, tmp_path, "more than their size")
    refused("lz4", packed, len(data) + 1, tmp_path, "less than their size")
    refused("lz4", b"\x10a\1\0", 500, tmp_path, "less than their size")
    refused("lz4", b"\x10a\2\0", 5, tmp_path, "before their start")
    refused("lz4", b"\x10a\0\0", 5, tmp_path, "before their start")
    refused("lz4", b"\xf0\xff\xff", 5, tmp_path, "within a length")
    refused("lz4", b"\x50abc", 5, tmp_path, "within literals")
    refused("lz4", b"\x10a\1", 5, tmp_path, "within a match")
    refused("lz4", b"\x10a", 1 << 30, tmp_path, "too few for their size")
    for end in range(len(packed)):
        refused("lz4", packed[:end], len(data), tmp_path)


def frame(*blocks: bytes, size: int, descriptor: int = 0xA0) -> bytes:
    """A zstd frame whose header names a size in four bytes."""
    return struct.pack("<IBI", 0xFD2FB528, descriptor, size) + b"".join(blocks)


def block(kind: int, size: int, data: bytes, last: bool = True) -> bytes:
    return struct.pack("<I", size << 3 | kind << 1 | last)[:3] + data


def test_zstd_blocks_by_hand(tmp_path: Path) -> None:
    raw, rle = block(0, 3, b"abc", last=False), block(1, 5, b"x")
    assert decompress("zstd", frame(raw, rle, size=8), 8, tmp_path) == b"abcxxxxx"
    good = frame(raw, rle, size=8)
    refused("zstd", good, 7, tmp_path, "another size")
    refused("zstd", good + b"\0", 8, tmp_path, "different places")
    refused("zstd", frame(raw, size=3), 3, tmp_path, "end early")
    refused("zstd", frame(rle, size=8), 8, tmp_path, "less than their size")
    refused("zstd", frame(rle, size=4), 4, tmp_path, "more than their size")
    refused("zstd", frame(block(3, 1, b"x"), size=1), 1, tmp_path, "unknown type")
    refused("zstd", frame(raw, rle, size=8, descriptor=0xA8), 8, tmp_path, "unknown feature")
    refused("zstd", b"PK\3\4", 8, tmp_path, "do not begin")
    dictionary = struct.pack("<IBBI", 0xFD2FB528, 0xA1, 7, 8) + raw + rle
    refused("zstd", dictionary, 8, tmp_path, "dictionary")
    # An empty compressed block is none: it has neither literals nor sequences.
    refused("zstd", frame(block(2, 0, b""), size=0), 0, tmp_path, "end early")
    # Treeless literals, repeated tables, with nothing to repeat.
    refused("zstd", frame(block(2, 5, b"\x13\x40\0\1\0"), size=1), 1, tmp_path, "not given")
    refused("zstd", frame(block(2, 5, b"\x08a\1\xfc\1"), size=9), 9, tmp_path, "not given")
    for end in range(len(good)):
        refused("zstd", good[:end], 8, tmp_path)


def test_claimed_sizes_are_not_allocated(tmp_path: Path) -> None:
    """A frame that claims a gigabyte and holds a byte; one that really holds a thousandfold."""
    refused("zstd", frame(block(0, 1, b"a"), size=1 << 30), 1 << 30, tmp_path, "less than")
    blocks = b"".join(block(1, 1 << 17, b"z", last=i == 63) for i in range(64))
    assert decompress("zstd", frame(blocks, size=1 << 23), 1 << 23, tmp_path) == b"z" * (1 << 23)
    tiny = b"".join(block(0, 0, b"", last=False) for _ in range(100_000))
    refused("zstd", frame(tiny, block(0, 1, b"a"), size=1), 1, tmp_path, "too many blocks")


def damage_is_survived(kind: str, stored: bytes, size: int, folder: Path) -> None:
    """Every truncation is refused, and flipped bits give an error or other bytes of that size."""
    random.seed(7)
    commands, out = [], folder / "plain"
    for number in range(600):
        damaged = bytearray(stored)
        for _ in range(random.randrange(1, 4)):
            damaged[random.randrange(len(stored))] ^= 1 << random.randrange(8)
        path = folder / str(number)
        path.write_bytes(stored[: number * len(stored) // 600] if number % 2 else damaged)
        commands.append(("decompress", kind, path, size, out))
    lines = cubin_check.run(*commands)
    assert len(lines) == 600
    for number, line in enumerate(lines):
        if number % 2 or line != "done":
            assert json.loads(line)["error"]["tag"] == "image"


@pytest.mark.skipif(ZSTD is None, reason="needs the zstd program, found none")
def test_zstd_survives_damage(tmp_path: Path) -> None:
    data = (real_cubins.DATA / "several.sm_90a.cuda130.cubin").read_bytes()
    command = [ZSTD, "-19", "-q", "-c", "--no-check"]
    stored = subprocess.run(command, input=data, capture_output=True, check=True).stdout
    damage_is_survived("zstd", stored, len(data), tmp_path)


def lzma_pack(data: bytes, **options: int) -> bytes:
    filters = [{"id": lzma.FILTER_LZMA1, "dict_size": 1 << 20, **options}]
    return lzma.compress(data, format=lzma.FORMAT_ALONE, filters=filters)


@pytest.mark.parametrize(
    "options",
    [{}, {"lc": 0, "lp": 3, "pb": 4}, {"lc": 4, "pb": 0}, {"lc": 0, "lp": 4, "preset": 0}],
    ids=str,
)
def test_lzma_agrees_with_the_library(options: dict[str, int], tmp_path: Path) -> None:
    for name, data in samples().items():
        stored = lzma_pack(data, **options)
        assert stored[5:13] == b"\xff" * 8  # no size: an end marker
        assert decompress("lzma", stored, len(data), tmp_path) == data, name


def test_lzma_with_a_size_in_its_header(tmp_path: Path) -> None:
    data = b"abcabcabcd" * 50
    stored = bytearray(lzma_pack(data))
    stored[5:13] = struct.pack("<Q", len(data) - 1)
    refused("lzma", bytes(stored), len(data), tmp_path, "names another size")
    # The end marker stands behind the data, where the size has ended them.
    stored[5:13] = struct.pack("<Q", len(data))
    refused("lzma", bytes(stored), len(data), tmp_path, "bytes behind their end")


def test_lzma_refuses_damage(tmp_path: Path) -> None:
    data = (real_cubins.DATA / "several.sm_90a.cuda130.cubin").read_bytes()
    stored = lzma_pack(data)
    size = len(data)
    refused("lzma", stored, size - 1, tmp_path, "more than their size")
    refused("lzma", stored, size + 1, tmp_path, "less than their size")
    refused("lzma", stored + b"\0", size, tmp_path, "bytes behind their end")
    refused("lzma", b"\xe1" + stored[1:], size, tmp_path, "their header is damaged")
    refused("lzma", b"\x08" + stored[1:], size, tmp_path, "their header is damaged")  # lc = 8
    refused("lzma", stored[:13] + b"\1" + stored[14:], size, tmp_path, "first byte is not zero")
    refused("lzma", stored[:14] + b"\xff" * 9, size, tmp_path, "first number is too large")
    refused("lzma", stored, 1 << 40, tmp_path, "too few for their size")
    damage_is_survived("lzma", stored, size, tmp_path)
