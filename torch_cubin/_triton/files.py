"""Kernels in folders: those of Triton's cache, and those of write(). Needs no Triton.

Either may come from an untrusted source: sizes are bounded, every field is checked, nothing is
executed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch_cubin import errors
from torch_cubin._triton import accesses, copies
from torch_cubin._triton.kernel import FOLDED, Parameter, TritonKernel, make, with_accesses

LIST = "triton_kernels.json"
FORMAT = "torch_cubin Triton kernels"
_MOST_JSON, _MOST_IR, _MOST_CUBIN = 16 << 20, 64 << 20, 1 << 30
_TYPES = {
    "f16": "fp16", "bf16": "bf16", "f32": "fp32", "f64": "fp64",
    "f8E4M3FN": "fp8e4nv", "f8E5M2": "fp8e5", "f8E4M3FNUZ": "fp8e4b8", "f8E5M2FNUZ": "fp8e5b16",
    **{f"i{bits}": f"i{bits}" for bits in (1, 8, 16, 32, 64)},
}  # fmt: skip


@errors.named_keywords
def read(path: str | os.PathLike[str]) -> list[TritonKernel]:
    """The kernels in a folder, or in a file of a Triton cache folder.

    The folder was written by write() or `python -m torch_cubin export triton`, or is one of
    Triton's cache (`~/.triton/cache/<hash>`). A cache folder does not record the values that the
    compiler folded: constants, None, ints equal to 1. A live CompiledKernel does.

    Raises FileError [file] if it cannot be read, HashError [hash] for a cubin that has changed,
    InputError [input] for damaged metadata.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise errors.fault(
            "input", "torch_cubin.producers.triton.read", "takes a path", expected="a folder",
            got=type(path).__name__,
        )  # fmt: skip
    found = Path(os.fsdecode(path))
    if found.is_dir():
        if (found / LIST).is_file():
            return list(_read_list(found))
        names = [p for p in sorted(found.glob("*.json")) if _is_metadata(p)]
        if not names:
            raise errors.fault(
                "file", f"folder '{found}'", "holds no Triton kernel",
                expected=f"{LIST}, or NAME.json beside NAME.cubin",
            )  # fmt: skip
        return [_read_cached(name) for name in names]
    if found.suffix in (".cubin", ".ttir", ".json") and found.with_suffix(".json").is_file():
        return [_read_cached(found.with_suffix(".json"))]
    raise errors.fault(
        "file", f"'{found}'", "is no folder of Triton kernels",
        expected=f"a folder with {LIST}, or of Triton's cache",
    )  # fmt: skip


@errors.named_keywords
def write(
    folder: str | os.PathLike[str], kernels: Iterable[TritonKernel], *, overwrite: bool = False
) -> Path:
    """Writes kernels with all of their metadata, for read() and define_op without Triton.

    Raises InputError [input] if the folder holds such kernels already, unless `overwrite`;
    FileError [file] if it cannot be written.
    """
    from torch_cubin._native.files import write_file

    path = Path(os.fspath(folder))
    entries, files = [], {}
    for kernel in kernels:
        digest = hashlib.sha256(kernel.cubin).hexdigest()
        name = f"{re.sub(r'[^A-Za-z0-9_]', '_', kernel.name)[:60]}.{kernel.arch}.{digest[:8]}.cubin"
        files[name] = kernel.cubin
        entries.append({"cubin": name, "sha256": digest, "producer": kernel.record()})
    text = json.dumps({"format": FORMAT, "version": 1, "kernels": entries}, indent=1)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if (path / LIST).exists() and not overwrite:
            raise errors.fault(
                "input", f"folder '{path}'", "holds Triton kernels already",
                expected="an empty folder, or overwrite=True",
            )  # fmt: skip
        for name, data in files.items():
            write_file(path / name, data)
        write_file(path / LIST, text.encode() + b"\n")
    except OSError as error:
        if isinstance(error, errors.Error):
            raise
        reason = error.strerror or str(error)
        raise errors.fault("file", f"folder '{path}'", f"cannot be written ({reason})") from error
    return path


def _bytes(path: Path, most: int) -> bytes:
    from torch_cubin._inspection.files import read_file

    try:
        size = path.stat().st_size
    except OSError as error:
        raise errors.fault(
            "file", f"file '{path}'", f"cannot be read ({error.strerror})"
        ) from error
    if size > most:
        raise errors.fault(
            "file",
            f"file '{path}'",
            "is too large",
            expected=f"at most {most} bytes",
            got=str(size),
        )
    return read_file(str(path), is_device_code=False)


def read_json(path: str | os.PathLike[str]) -> Any:
    try:
        return json.loads(_bytes(Path(path), _MOST_JSON))
    except (ValueError, RecursionError) as error:
        raise errors.fault("input", f"file '{path}'", f"is no JSON ({str(error)[:80]})") from None


def _is_metadata(path: Path) -> bool:
    """Whether a JSON file describes a cubin; others are lists of a group and an autotuner's
    results."""
    return path.with_suffix(".cubin").is_file()


def _read_list(folder: Path) -> Iterator[TritonKernel]:
    listed = read_json(folder / LIST)
    origin = f"file '{folder / LIST}'"
    right = isinstance(listed, dict) and listed.get("format") == FORMAT
    if not right or listed.get("version") != 1 or not isinstance(listed.get("kernels"), list):
        raise errors.fault("input", origin, "is of another format", expected=f"{FORMAT}, version 1")
    for index, entry in enumerate(listed["kernels"]):
        label = f"{origin} kernels[{index}]"
        name = entry.get("cubin") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.cubin", name):
            raise errors.fault("input", label, "names no cubin beside it", got=f"{name!r:.80}")
        data = _bytes(folder / name, _MOST_CUBIN)
        digest = hashlib.sha256(data).hexdigest()
        if digest != entry.get("sha256"):
            raise errors.fault(
                "hash", f"file '{folder / name}'", "is not the one that was written",
                expected=f"sha256 {entry.get('sha256')!r:.80}", got=digest,
            )  # fmt: skip
        yield of_record(entry.get("producer"), data, label)


def of_record(record: Any, cubin: bytes, label: str) -> TritonKernel:
    """Rebuilds a kernel from its record in a manifest (TritonKernel.record) and its binary."""
    is_whole = isinstance(record, dict) and record.get("name") == "triton"
    if not is_whole or not all(
        isinstance(record.get(key), kind)
        for key, kind in (("parameters", list), ("metadata", dict))
    ):
        raise errors.fault("input", label, "is no record of a Triton kernel")
    parameters = [Parameter.from_json(entry, label) for entry in record["parameters"]]
    source_hash = record.get("source_hash")
    return make(
        cubin, record["metadata"], parameters, label,
        source_hash=source_hash if isinstance(source_hash, str) else "",
        knows_folded=record.get("knows_folded") is not False,
    )  # fmt: skip


def _read_cached(path: Path) -> TritonKernel:
    """A kernel of Triton's cache, from NAME.json, NAME.cubin and NAME.ttir."""
    metadata = read_json(path)
    origin = f"file '{path.with_suffix('.cubin')}'"
    if not isinstance(metadata, dict) or "num_warps" not in metadata:
        raise errors.fault(
            "input",
            f"file '{path}'",
            "does not describe a Triton kernel",
            expected="num_warps, ...",
        )
    target = metadata.get("target")
    backend = target.get("backend") if isinstance(target, dict) else None
    if backend != "cuda":
        raise errors.fault(
            "input", origin, "is for another backend", expected="cuda", got=f"{backend!r:.40}"
        )
    cubin = _bytes(path.with_suffix(".cubin"), _MOST_CUBIN)
    ir = path.with_suffix(".ttir")
    if not ir.is_file():
        raise errors.fault(
            "file", f"file '{ir}'", "is missing",
            expected="the IR beside the cubin, which tells the parameters' types",
            advice="TRITON_STORE_BINARY_ONLY omits it: give the live kernel instead.",
        )  # fmt: skip
    lowered = path.with_suffix(".ttgir")
    if lowered.is_file():
        copies.check(_bytes(lowered, _MOST_IR).decode("utf-8", "replace"), origin)
    text = _bytes(ir, _MOST_IR).decode("utf-8", "replace")
    parameters = with_accesses(parameters_of_ir(text, f"file '{ir}'"), text)
    kernel = make(cubin, metadata, parameters, origin, knows_folded=False)
    # Where the IR before the compiler's own arithmetic is at hand (from Triton 3.4 on), it names
    # every constant that the kernel uses, and none that follow from them.
    source = path.with_suffix(".source")
    steps = accesses.program_steps(text)
    if source.is_file():
        text = _bytes(source, _MOST_IR).decode("utf-8", "replace")
    return dataclasses.replace(kernel, numbers=accesses.numbers(text), steps=tuple(steps))


_FUNCTION = re.compile(r"tt\.func public @(?:\"[^\"]*\"|[\w.$-]+)\(")
_PARAMETER = re.compile(r"%([\w.$-]+): (.+)", re.DOTALL)


def parameters_of_ir(text: str, label: str) -> list[Parameter]:
    """The parameters of the only public function. Folded ones are not in the IR."""
    found = _FUNCTION.search(text)
    if found is None:
        raise errors.fault(
            "input", label, "has no public function", expected="tt.func public @NAME("
        )
    out: list[Parameter] = []
    skip: list[str] = []  # the sizes and strides that follow a descriptor
    for part in _arguments(text, found.end(), label):
        match = _PARAMETER.fullmatch(part.strip())
        if match is None:
            raise errors.fault("input", label, "has a parameter without a type", got=part[:80])
        name, rest = match.groups()
        parameter = _parameter(name, rest, label)
        if skip:
            if parameter.type != skip.pop(0):
                raise errors.fault("input", label, "has a descriptor without its sizes and strides")
            continue
        if parameter.type.startswith("tensordesc"):
            dims = parameter.type.count(",") + 1
            skip = ["i32"] * dims + ["i64"] * dims
        out.append(parameter)
    if skip:
        raise errors.fault("input", label, "has a descriptor without its sizes and strides")
    return out


def _arguments(text: str, start: int, label: str) -> list[str]:
    """Splits at commas, up to the closing parenthesis."""
    parts, depth, begin, quoted = [], 0, start, False
    for at in range(start, min(len(text), start + (1 << 20))):
        c = text[at]
        if c == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif c in "(<{[":
            depth += 1
        elif c in ")>}]" and not (c == ")" and depth == 0):
            depth -= 1
        elif c in ",)" and depth == 0:
            if text[begin:at].strip():
                parts.append(text[begin:at])
            if c == ")":
                return parts
            begin = at + 1
    raise errors.fault("input", label, "has a function whose parameters do not end")


_POINTER = re.compile(r"!tt\.ptr<(\w+)(?:, \d+)?>")
_DESCRIPTOR = re.compile(r"!tt\.tensordesc<(?:tensor<)?((?:\d+x)+)(\w+)(?:, [^>]*)?>>?")
_MULTIPLE = re.compile(r"tt\.divisibility = (\d{1,6}) : i\d+")


def _parameter(name: str, rest: str, label: str) -> Parameter:
    rest = re.sub(r"\bloc\(.*", "", rest, flags=re.DOTALL).strip()
    type_, brace, attributes = rest.partition("{")
    type_ = type_.strip()
    multiple = 1
    if brace:
        for attribute in filter(
            None, (part.strip() for part in attributes.rstrip("} ").split(","))
        ):
            found = _MULTIPLE.fullmatch(attribute)
            if found is None:
                raise errors.fault(
                    "input", f"{label} parameter '{name}'",
                    "was compiled under a condition that torch_cubin does not know",
                    expected="tt.divisibility", got=attribute[:80],
                )  # fmt: skip
            multiple = int(found[1])
    pointer, described = _POINTER.fullmatch(type_), _DESCRIPTOR.fullmatch(type_)
    element = pointer[1] if pointer else described[2] if described else type_
    if element not in _TYPES:
        raise errors.fault(
            "input", f"{label} parameter '{name}'", "has an unknown type", got=type_[:80]
        )
    known = _TYPES[element]
    if described:
        known = f"tensordesc<{known}[{described[1].rstrip('x').replace('x', ',')}]>"
    name = "" if re.fullmatch(r"arg\d+", name) else name
    return Parameter(
        name, "*" + known if pointer else known, multiple_of=multiple,
        is_signless=element.startswith("i"),
    )  # fmt: skip


__all__ = ["FOLDED", "of_record", "parameters_of_ir", "read", "write"]
