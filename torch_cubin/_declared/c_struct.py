"""c_struct(): a struct that a kernel takes by value, read from its C++ text.

Clang (c_front_end.py) compiles the text and lays the struct out (c_layout.py); this file refuses a
layout that depends on facts that are not given. The size is compared with the binary's parameter
when an op is defined or a kernel is launched.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_cubin import errors
from torch_cubin._declared import c_builtin, c_front_end
from torch_cubin._declared.c_layout import CStruct, Field, Reader

_MOST_TEXT = 1 << 20


@errors.named_keywords
def c_struct(
    text: str | os.PathLike[str],
    name: str,
    *,
    prefix: int | None = None,
    include: Sequence[str | os.PathLike[str]] = (),
    options: Sequence[str] = (),
    cuda: int | None = None,
) -> CStruct:
    """The layout of a struct, from the C++ text that declares it, usually a whole header.

        PARAMS = torch_cubin.c_struct(Path("params.h"), "Params")
        args=lambda q, out: (PARAMS(q_ptr=q, o_ptr=out, scale=0.5),)

    Clang compiles the text and lays the struct out as nvcc's host compiler does on 64-bit Linux;
    `pip install libclang`, or torch_cubin[c], brings it. PARAMS(...), which is
    torch_cubin.struct(PARAMS, ...), takes its fields by name; those that are not named are zero, or
    what their initialiser says (constructors are not run).

    - `text`: text, or a path (pathlib.Path), whose folder is searched for headers.
    - `name`: a struct, a typedef or a template's instantiation, `ns::Params<128>`; the namespace
      may be omitted if the name is unique in the text.
    - `prefix`: the kernel takes only the first `prefix` bytes, as kernels older than the text do.
    - `include`: folders of headers. Those of g++ are searched if it is installed; declarations of
      CUDA's headers are known without them.
    - `options`: options of clang, such as "-DHEAD_DIM=128" and "-std=c++20".
    - `cuda`: the major version of CUDA that the kernel was compiled with. A CUtensorMap is aligned
      to 128 bytes since 13, to 64 before; required if the layouts differ and no cuda.h is found.

    Raises InputError [input] if libclang is missing, for a text that does not compile, with the
    line, for a struct that is missing or has virtual functions, and for a layout that depends on
    facts that are not given: the version of CUDA, or whether nvcc compiles the text.
    """
    folders = list(include) if isinstance(include, (list, tuple)) else [include]
    if isinstance(text, os.PathLike):
        path = Path(text)
        folders.insert(0, path.parent)
        try:
            text = path.read_text(errors="replace")
        except OSError as error:
            raise errors.fault("file", f"'{path}'", f"cannot be read ({error.strerror})") from error
    _check(text, name, cuda, options)
    said = [option for option in options if re.match(r"-[DU]__CUDACC__\b", option)]
    others = [option for option in options if option not in said]
    reader = c_front_end.Text(text, f"c_struct '{name}'", folders, others)
    found = _decided(reader, name, cuda, said[-1].startswith("-D") if said else None)
    if prefix is None:
        return found
    if type(prefix) is not int or not 0 < prefix <= found.size:
        raise errors.fault("input", f"c_struct '{name}' argument 'prefix'", "is out of range",
                           expected=f"1 to {found.size} bytes", got=repr(prefix))  # fmt: skip
    kept = {n: f for n, f in found.fields.items() if f.end <= prefix}
    return CStruct(name, prefix, found.align, kept)


def _check(text: Any, name: Any, cuda: Any, options: Any) -> None:
    if not isinstance(text, str) or not isinstance(name, str):
        got = f"{type(text).__name__}, {type(name).__name__}"
        raise errors.fault("input", "torch_cubin.c_struct", "has a wrong type", expected="str, str",
                           got=got)  # fmt: skip
    try:
        text.encode(), name.encode()
    except UnicodeEncodeError as error:
        raise errors.fault("input", "torch_cubin.c_struct", f"is given no text ({error.reason})",
                           expected="text that UTF-8 can hold") from None  # fmt: skip
    if len(text) > _MOST_TEXT:
        expected = f"at most {_MOST_TEXT} characters"
        raise errors.fault("input", "torch_cubin.c_struct", "is given too much text",
                           expected=expected, got=str(len(text)))  # fmt: skip
    if cuda is not None and (type(cuda) is not int or not 8 <= cuda < 100):
        raise errors.fault("input", f"c_struct '{name}' argument 'cuda'", "is out of range",
                           expected="a major version, 12 or 13", got=repr(cuda))  # fmt: skip
    if not isinstance(options, (list, tuple)) or not all(isinstance(o, str) for o in options):
        raise errors.fault("input", f"c_struct '{name}' argument 'options'", "has a wrong type",
                           expected="a list of str", got=repr(options)[:80])  # fmt: skip


def _decided(
    reader: c_front_end.Text, name: str, cuda: int | None, is_nvcc: bool | None
) -> CStruct:
    """The layout, if it does not depend on facts that are not given."""

    def layout(
        alignment: int, text: c_front_end.Text = reader
    ) -> tuple[CStruct, c_front_end.Parsed]:
        return Reader(text, name, [f"-D{c_builtin.MAP_ALIGNMENT}={alignment}"]).read()

    alignment = 64 if cuda is not None and cuda < 13 else 128
    try:
        found, parsed = layout(alignment)
    except errors.InputError:
        # With a map aligned to 128, an alignas(64) next to it is invalid C++.
        if cuda is not None or c_builtin.TENSOR_MAP not in reader.text:
            raise
        alignment = 64
        found, parsed = layout(alignment)
        raise _undecided(name, "the version of CUDA", found, "Say cuda=12, or cuda=13.") from None
    if cuda is None and c_builtin.TENSOR_MAP in parsed.added:
        other, _ = layout(64)
        if _places(other) != _places(found):
            advice = "Say the version that the kernel was compiled with, cuda=12 or cuda=13, or"
            advice += " include <cuda.h>, with include=[its folder]."
            raise _undecided(name, "the version of CUDA", other, advice)
    nvcc = reader.as_nvcc(parsed)
    if nvcc is not None and is_nvcc is not False:
        if is_nvcc:
            return layout(alignment, nvcc)[0]
        as_nvcc: CStruct | None = None
        with contextlib.suppress(errors.InputError):
            as_nvcc, _ = layout(alignment, nvcc)
        if as_nvcc is None or _places(as_nvcc) != _places(found):
            advice = "Say options=['-D__CUDACC__'] for the layout as nvcc compiles the text, or"
            advice += " ['-U__CUDACC__']."
            raise _undecided(name, "__CUDACC__", as_nvcc, advice)
    return found


def _places(found: CStruct) -> Any:
    """A layout without the alignment of the whole, which the binary gives for a parameter."""
    fields = [(n, f.offset, f.count, f.step, f.bit, f.bits, repr(f.default),
               f.kind if isinstance(f.kind, str) else _places(f.kind))
              for n, f in found.fields.items()]  # fmt: skip
    return found.size, fields


def _undecided(name: str, what: str, other: CStruct | None, advice: str) -> errors.Error:
    return errors.fault("input", f"c_struct '{name}'", f"has a layout that depends on {what}",
                        expected="one layout", got="two layouts" if other else "one that fails",
                        advice=advice)  # fmt: skip


__all__ = ["CStruct", "Field", "c_struct"]
