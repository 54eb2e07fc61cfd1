"""Reads the kernel tables at the ends of the .cu files of csrc/kernels, expands them, and hashes
sources.

The format is described in ../README.md. A source is in its family's folder or in a folder of that,
beside the folders of other families and `common`. Independent of compilers and cubins.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import re
from typing import Any

from toolkit import BuildError

REQUIRED = ("name", "kind", "dtype", "math", "tile", "block", "cost")
DEFAULTS = {"layout": "any", "alignment": 16, "stages": 1, "dynamic_shared": 0}
# What a loop over dtypes, which "for" gives as their short names, knows of each.
DTYPES = {
    "f16": {"short": "f16", "dtype": "float16", "math": "float16", "bytes": 2},
    "bf16": {"short": "bf16", "dtype": "bfloat16", "math": "bfloat16", "bytes": 2},
    "f32": {"short": "f32", "dtype": "float32", "math": "float32", "bytes": 4},
    "tf32": {"short": "tf32", "dtype": "float32", "math": "tf32", "bytes": 4},
    "f64": {"short": "f64", "dtype": "float64", "math": "float64", "bytes": 8},
}
BUILD_ONLY = ("name", "defines", "archs", "accepted_spill", "for")
TABLE = re.compile(r"^/\* torch_cubin kernels\n(.*?)^\*/", re.DOTALL | re.MULTILINE)
PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*(?:\.\w+)*)\}")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One instantiation: a row of the table, expanded."""

    name: str
    source: pathlib.Path
    virtual_archs: tuple[str, ...]  # "80", "90a"
    defines: dict[str, str]
    archs: tuple[str, ...] | None  # None: all
    accepted_spill: dict[str, int]
    fields: dict[str, Any]  # go to the manifest

    @property
    def threads(self) -> int:
        x, y, z = self.fields["block"]
        return x * y * z

    def macros(self) -> dict[str, str]:
        tile = self.fields["tile"]
        return {
            "TC_KERNEL": self.name,
            "TC_THREADS": str(self.threads),
            "TC_TILE_M": str(tile[0]),
            "TC_TILE_N": str(tile[1]),
            "TC_TILE_K": str(tile[2]),
            "TC_STAGES": str(self.fields["stages"]),
            "TC_DYNAMIC_SHARED": str(self.fields["dynamic_shared"]),
            **self.defines,
        }

    def virtual_arch(self, arch: str) -> str:
        """The PTX target to assemble `arch` ("sm_90a") from."""
        digits, suffix = split_arch(arch)
        if f"{digits}{suffix}" in self.virtual_archs and suffix:
            return f"{digits}{suffix}"
        plain = [int(v) for v in self.virtual_archs if v.isdigit() and int(v) <= digits]
        if not plain:
            raise BuildError(
                "arch",
                f"kernel '{self.name}'",
                f"cannot be built for {arch}",
                expected=f"a virtual_arch of at most {digits}",
                got=", ".join(self.virtual_archs),
                do="Give the table entry 'archs'.",
            )
        return str(max(plain))


def split_arch(arch: str) -> tuple[int, str]:
    """(90, "a") of "sm_90a"."""
    found = re.fullmatch(r"sm_(\d{2,3})([af]?)", arch)
    if not found:
        raise BuildError(
            "arch",
            f"architecture '{arch}'",
            "is not a name of one",
            expected="sm_<number>, with a or f behind it where meant",
            do="Correct --archs or TORCH_CUBIN_ARCHS.",
        )
    return int(found.group(1)), found.group(2)


def root_of(source: pathlib.Path) -> pathlib.Path:
    """The folder of the families: the one with `common`, else that of the source's folder."""
    found = (folder for folder in source.parents if (folder / "common").is_dir())
    return next(found, source.parent.parent)


def name_of(source: pathlib.Path) -> str:
    """ "matmul/mma.cu": the name of a source in csrc/kernels, wherever the checkout lies."""
    return source.relative_to(root_of(source)).as_posix()


def family_of(source: pathlib.Path) -> str:
    return name_of(source).split("/")[0]


def name_prefixes(source: pathlib.Path) -> list[str]:
    """Prefixes that the names of a source's kernels may have: its own name, or the first words of
    it, with or without its folder's name in front, or the folder's name alone; then the family's
    name. For attention/sm90/backward_delta.cu, for example, "sm90_backward_delta_attention" and
    "sm90_attention"."""
    family, *folders = name_of(source).split("/")[:-1]
    words = source.stem.split("_")
    stems = ["_".join(words[:count]) for count in range(len(words), 0, -1)]
    names = [*stems, *("_".join([*folders, stem]) for stem in stems), *folders]
    return [f"{name}_{family}" for name in names]


def params_header(source: pathlib.Path) -> pathlib.Path:
    """The header that declares a kernel's parameters: the source's own if it has one
    (matmul/sm90_params.h for matmul/sm90.cu), else that of the source whose name is a prefix of its
    own (attention/sm90/backward_params.h for attention/sm90/backward_delta.cu), else its family's
    (matmul/matmul_params.h)."""
    words = source.stem.split("_")
    for count in range(len(words), 0, -1):
        header = source.with_name("_".join(words[:count]) + "_params.h")
        if header.is_file():
            return header
    family = family_of(source)
    return root_of(source) / family / f"{family}_params.h"


def params_key(header: pathlib.Path) -> str:
    """What the library calls a header of parameters: "matmul" for matmul/matmul_params.h, else
    "matmul/sm90" for matmul/sm90_params.h."""
    folder, _, name = name_of(header).removesuffix("_params.h").rpartition("/")
    return folder if folder == name else f"{folder}/{name}"


def headers_of_params(root: pathlib.Path) -> list[pathlib.Path]:
    return sorted(root.glob("*/**/*_params.h"))


def fail(source: pathlib.Path, problem: str, **facts: str) -> BuildError:
    return BuildError("file", f"the kernel table of '{name_of(source)}'", problem, **facts)


def substitute(value: Any, variables: dict[str, Any], source: pathlib.Path) -> Any:
    def lookup(path: str) -> Any:
        found: Any = variables
        for part in path.split("."):
            if isinstance(found, list) and part.isdigit() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, dict) and part in found:
                found = found[part]
            else:
                raise fail(source, f"uses an unknown variable '{{{path}}}'", do="Name it in 'for'.")
        return found

    if isinstance(value, str):
        # Expands the innermost placeholder first: "{d.k{v.lanes}}" -> "{d.k128}" -> "1024".
        while found := PLACEHOLDER.search(value):
            if found.span() == (0, len(value)):
                return substitute(lookup(found.group(1)), variables, source)
            value = value.replace(found.group(0), str(lookup(found.group(1))))
        return value
    if isinstance(value, list):
        return [substitute(item, variables, source) for item in value]
    if isinstance(value, dict):
        members = {
            substitute(key, variables, source): substitute(item, variables, source)
            for key, item in value.items()
        }
        return {key: item for key, item in members.items() if item is not None}
    return value


def loop_values(loop: str | list[Any], source: pathlib.Path) -> list[Any]:
    """The values of a variable of "for": a list of them, the short names of dtypes in a string, or
    a table, whose first row names the members that the others give."""
    if isinstance(loop, str):
        if unknown := set(loop.split()) - set(DTYPES):
            raise fail(source, f"loops over unknown dtypes {sorted(unknown)}")
        return [DTYPES[name] for name in loop.split()]
    if not isinstance(loop[0], list):
        return loop
    columns, *rows = loop
    if wrong := [row for row in rows if len(row) != len(columns)]:
        raise fail(source, "has a row of another length", expected=f"{columns}", got=f"{wrong[0]}")
    return [dict(zip(columns, row, strict=True)) for row in rows]


def expand(entry: dict[str, Any], source: pathlib.Path) -> list[dict[str, Any]]:
    """Expands one entry to its rows, in the order of its 'for'."""
    body = {key: value for key, value in entry.items() if key != "for"}
    loops = {name: loop_values(loop, source) for name, loop in entry.get("for", {}).items()}
    rows = []
    for values in itertools.product(*loops.values()):
        rows.append(substitute(body, dict(zip(loops, values, strict=True)), source))
    return rows


def with_defaults(entry: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """An entry with the fields that it omits; of `for` and `defines`, the members."""
    full = {**DEFAULTS, **defaults, **entry}
    for field in ("for", "defines"):
        full[field] = {**defaults.get(field, {}), **entry.get(field, {})}
    if "d" in full["for"]:
        full = {"dtype": "{d.dtype}", "math": "{d.math}", **full}
    return full


def check_row(row: dict[str, Any], source: pathlib.Path) -> None:
    missing = [field for field in REQUIRED if field not in row]
    if missing:
        raise fail(
            source,
            f"omits fields of kernel '{row.get('name', '?')}'",
            expected=", ".join(REQUIRED),
            got=f"no {', '.join(missing)}",
        )
    for field in ("tile", "block"):
        value = row[field]
        if not (isinstance(value, list) and len(value) == 3 and all(type(v) is int for v in value)):
            raise fail(
                source,
                f"has a wrong '{field}' for kernel '{row['name']}'",
                expected="three integers",
                got=json.dumps(value),
            )


def parse_table(text: str, source: pathlib.Path) -> list[Kernel]:
    """The kernels in one source file's table; empty if it has none."""
    blocks = TABLE.findall(text)
    if not blocks:
        return []
    if len(blocks) > 1:
        raise fail(source, "appears twice", expected="one block", got=f"{len(blocks)}")
    try:
        table = json.loads(blocks[0])
    except json.JSONDecodeError as error:
        raise fail(source, "is not JSON", got=f"{error} of the block") from None
    virtual = tuple(str(v) for v in table.get("virtual_arch", [80, 90]))
    only = tuple(f"sm_{v}" for v in virtual) if not any(v.isdigit() for v in virtual) else None
    kernels = []
    for entry in table["kernels"]:
        for row in expand(with_defaults(entry, table.get("defaults", {})), source):
            check_row(row, source)
            fields = {key: value for key, value in row.items() if key not in BUILD_ONLY}
            fields.setdefault("family", family_of(source))
            fields.setdefault("cluster", [1, 1, 1])
            kernels.append(
                Kernel(
                    name=row["name"],
                    source=source,
                    virtual_archs=virtual,
                    defines={key: str(value) for key, value in row.get("defines", {}).items()},
                    archs=tuple(row["archs"]) if row.get("archs") else only,
                    accepted_spill=row.get("accepted_spill", {}),
                    fields=fields,
                )
            )
    return kernels


def read_tables(folder: pathlib.Path) -> list[Kernel]:
    """All kernels of the .cu files in the families' folders in `folder`. Names are unique."""
    kernels: dict[str, Kernel] = {}
    for source in sorted(folder.glob("*/**/*.cu")):
        for kernel in parse_table(source.read_text(), source):
            if kernel.name in kernels:
                other = name_of(kernels[kernel.name].source)
                raise fail(
                    source, f"names kernel '{kernel.name}' again", got=f"it in '{other}' too"
                )
            kernels[kernel.name] = kernel
    return list(kernels.values())


def digest(*parts: str | bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()


def with_includes(source: pathlib.Path) -> dict[str, str]:
    """The texts, by name, of a file and of every header of csrc/kernels that it includes, resolved
    as the compiler does: next to the includer, else from csrc/kernels. Without kernel tables: each
    kernel's row is part of its own key."""
    root = root_of(source.resolve())
    seen: dict[str, str] = {}
    waiting = [source.resolve()]
    while waiting:
        path = waiting.pop()
        name = os.path.relpath(path, root)
        if name in seen:
            continue
        text = TABLE.sub("", path.read_text())
        seen[name] = text
        for included in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE):
            places = ((path.parent / included).resolve(), (root / included).resolve())
            waiting += [place for place in places if place.is_file()][:1]
    return seen


def source_digest(source: pathlib.Path) -> str:
    return digest(*(part for named in sorted(with_includes(source).items()) for part in named))


def params_digest(header: pathlib.Path) -> str:
    """The hash of a header's declarations, without comments and spacing. The library and the
    manifest both contain it, so that a changed struct of the same size is detected."""
    comments = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
    texts = with_includes(header).items()
    return digest(*(" ".join(comments.sub(" ", text).split()) for _, text in sorted(texts)))
