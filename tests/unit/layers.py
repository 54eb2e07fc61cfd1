"""The layer rules (ARCHITECTURE: each folder of csrc/ uses only those below it), as a checker.

`violations(path, text, context)` reads one source, whose path is relative to csrc/; `check_tree`
reads them all. Comments do not count, string literals do.
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "csrc" / "kernels" / "build"))

import kernel_table  # noqa: E402  (needs the path above)

# Lowest first. A folder of a layer may have folders of its own (ops/matmul). A file may include
# headers of its own layer and of those below.
LAYERS = ("cubin", "driver", "runtime", "package", "abi", "pytorch", "declared", "ops")
# The same within a family whose folders have an order. Those of one rank are independent.
FAMILY_FOLDERS = {
    "attention": (("problem",), ("plan", "compose"), ("portable", "sm90"), ("api",)),
}
# These know no torch: C++ programs without it can link them.
WITHOUT_TORCH = ("cubin", "driver", "runtime", "package", "abi")
TOP = len(LAYERS)  # csrc/ops_<family>.cpp, csrc/c_api*.cpp
HOST_SUFFIXES = (".cpp", ".h")
DEVICE_SUFFIXES = (".cu", ".cuh")


@dataclasses.dataclass(frozen=True)
class Context:
    """What a rule needs to know of the whole tree."""

    ops: frozenset[str]  # "matmul": no layer below csrc/ops may know them
    kernel_sources: frozenset[str]  # "mma_matmul": reached through the catalog only
    kernel_macros: frozenset[str]  # "TC_TILE_M": what the build or a kernel table defines


def context_of(root: Path) -> Context:
    """Read from csrc/ops_<family>.cpp and csrc/kernels, so that neither list can fall behind."""
    schemas = "".join(path.read_text() for path in sorted(root.glob("ops_*.cpp")))
    defined = r'm\.def\(\s*"(\w+)\(|schema\("(\w+)"\)|define_\w+\(\s*m, "(\w+)"'
    names = re.findall(defined, schemas)
    ops = {name.lstrip("_") for found in names for name in found if name}
    ops |= {f"{found[2]}_autograd" for found in names if found[2]}
    sources = sorted((root / "kernels").glob("*/**/*.cu"))
    kernels = {prefix for path in sources for prefix in kernel_table.name_prefixes(path)}
    macros = {"TC_KERNEL", "TC_THREADS", "TC_STAGES", "TC_DYNAMIC_SHARED"}
    macros |= {"TC_TILE_M", "TC_TILE_N", "TC_TILE_K"}
    for path in sources:
        macros |= set(re.findall(r'"(TC_\w+)"', path.read_text()))
    return Context(frozenset(ops), frozenset(kernels), frozenset(macros))


_TOKEN = re.compile(
    r"//[^\n]*|/\*.*?\*/"  # comments
    r'|R"(?P<tag>[^\s()\\]{0,16})\(.*?\)(?P=tag)"'  # raw strings
    r'|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)+\'',
    re.DOTALL,
)


def without_comments(text: str) -> str:
    def keep(match: re.Match[str]) -> str:
        token = match.group()
        return "\n" * token.count("\n") + " " if token.startswith(("//", "/*")) else token

    return _TOKEN.sub(keep, text)


def without_strings(code: str) -> str:
    """The code with every literal emptied, includes left as they are."""
    lines = []
    for line in code.split("\n"):
        lines.append(line if line.lstrip().startswith("#include") else _TOKEN.sub('""', line))
    return "\n".join(lines)


def strings(code: str) -> list[str]:
    """The string literals, includes omitted."""
    code = re.sub(r"^\s*#\s*include.*$", "", code, flags=re.M)
    return [match.group() for match in _TOKEN.finditer(code)]


def includes(code: str) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', code, flags=re.M)


def layer_of(path: str) -> int | None:
    """The rank of a source by its path; None for device code."""
    folder, _, rest = path.partition("/")
    if not rest:
        return TOP
    return LAYERS.index(folder) if folder in LAYERS else None


def family_rank(path: str) -> tuple[str, int] | None:
    """The family's name and the rank of the folder in it; None where its folders have no order."""
    layer, *folders = path.split("/")[:3]
    if layer != "ops" or len(folders) < 2:
        return None
    ranks = FAMILY_FOLDERS.get(folders[0], ())
    found = [rank for rank, names in enumerate(ranks) if folders[1] in names]
    return (folders[0], found[0]) if found else None


_TORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")
_CUDA_HEADER = re.compile(r"^(cuda|cudart|nvrtc|nvJitLink|cublas|cudnn)\w*\.h$|^cuda/")
_PYTHON = re.compile(r"^(Python\.h|pybind11/|torch/extension\.h|torch/csrc/autograd/python)")
_DRIVER_NAME = re.compile(r"\b(?:cu[A-Z]\w*|CU[a-z]\w*|CU_\w+|CUDA_[A-Z]\w*)\b")
_RUNTIME_API = re.compile(r"\bcuda[A-Z]\w*\b")
_LOADER = re.compile(r"\b(?:dlopen|dlmopen|dlsym|dlvsym|dladdr|dl_iterate_phdr)\b")
_LIBCUDA = re.compile(r"\blibcuda\b")
_PARSING = re.compile(r"\b(?:fopen|fread|open|openat|ifstream|mmap|nlohmann|parse_cubin|Elf)\b")
_CONTROL = re.compile(r"\b(?:if|for|while|switch|return)\b")
_REGISTRATION = re.compile(r"^ops_(?P<family>\w+)\.cpp$")
_SHARED_HEADER = re.compile(r"^kernels/(?:\w+/)+\w+_params\.h$")


def violations(path: str, text: str, context: Context) -> list[str]:
    """What one source (path relative to csrc/) does that its layer may not, a line each."""
    code = without_comments(text)
    found = _device_violations if path.startswith("kernels/") else _host_violations
    return [f"{path}: {problem}" for problem in found(path, code, context)]


def _device_violations(path: str, code: str, context: Context) -> list[str]:
    problems = []
    if not path.endswith(".cu") and "#pragma once" in code:
        # A header that read them could serve one configuration a file only, but for a part of
        # sources that is included in the namespace of each of their kernels.
        macros = context.kernel_macros & set(re.findall(r"\bTC_\w+", without_strings(code)))
        problems += [f"reads the macro {name}: only a .cu does" for name in sorted(macros)]
    own = path.removeprefix("kernels/").rpartition("/")[0]  # "attention/sm90"
    for header in includes(code):
        if header.startswith("../"):  # headers that the host includes, too, have no other path up
            header = posixpath.normpath(f"{own}/{header}")
        folder, _, _ = header.rpartition("/")
        if _TORCH.match(header) or header == "cuda.h":
            problems.append(f"includes '{header}': device code stands alone")
        elif folder and folder.split("/")[0] not in ("common", own.split("/")[0]):
            problems.append(f"includes '{header}': a family uses its own folder and common")
        elif folder and folder == own:
            problems.append(f"includes '{header}': a header of its own folder needs no folder")
    return problems


def _host_violations(path: str, code: str, context: Context) -> list[str]:
    rank = layer_of(path)
    if rank is None:
        return ["lies in a folder that is no layer (ARCHITECTURE, section 1)"]
    layer = "top" if rank == TOP else LAYERS[rank]
    problems = []
    bare = without_strings(code)
    registers = _REGISTRATION.match(path)

    for header in includes(code):
        folder = header.split("/")[0]
        if folder in LAYERS and LAYERS.index(folder) > rank:
            problems.append(f"includes '{header}' of a layer above")
        own, other = family_rank(path), family_rank(header)
        apart = path.split("/")[:3] != header.split("/")[:3]
        if own and other and apart and own[0] == other[0] and other[1] >= own[1]:
            problems.append(f"includes '{header}': a family's folder uses those below it")
        if folder == "kernels" and not (layer == "ops" and _SHARED_HEADER.match(header)):
            problems.append(
                f"includes '{header}': only csrc/ops, and only the _params.h of kernels"
            )
        if layer in WITHOUT_TORCH and _TORCH.match(header):
            problems.append(f"includes '{header}': csrc/{layer} knows no torch")
        if layer == "ops" and folder == "declared":
            problems.append(f"includes '{header}': built-in ops are no declared ops")
        if header == "torch/csrc/stable/ops.h" and path != "ops/common/stable_ops.h":
            problems.append(f"includes '{header}': ops/common/stable_ops.h gives its errors tags")
        if layer == "cubin" and "/" in header and folder not in ("cubin", "nlohmann"):
            problems.append(f"includes '{header}': csrc/cubin stands alone")
        if layer != "driver" and (_CUDA_HEADER.match(header) or header == "dlfcn.h"):
            problems.append(f"includes '{header}': only csrc/driver may")
        if layer in ("ops", "top") and folder == "driver":
            problems.append(f"includes '{header}': the driver is reached through csrc/runtime")
        if layer == "runtime" and folder in ("nlohmann", "fstream"):
            problems.append(f"includes '{header}': csrc/runtime parses no files")
        if registers and header.startswith("ops/") and f"ops/{registers['family']}/" not in header:
            problems.append(f"includes '{header}': it registers the ops of its own family")
        if _PYTHON.match(header) and not path.startswith("python_"):  # the extension module's
            problems.append(f"includes '{header}': the library uses no Python C API")

    problems += _naming_violations(path, layer, bare)

    for literal in strings(code):
        if layer != "driver" and _LIBCUDA.search(literal):
            problems.append(f"names libcuda in {literal}: only csrc/driver may")
        if any(re.search(rf"\b{re.escape(name)}", literal) for name in context.kernel_sources):
            problems.append(f"names a kernel in {literal}: kernels are reached by the catalog")
    if layer in ("package", "declared"):
        for name in sorted(context.ops):
            if re.search(rf"(?<![a-z]){re.escape(name)}(?![a-z])", code):
                problems.append(f"knows the op '{name}' by name")
    return problems


def _naming_violations(path: str, layer: str, bare: str) -> list[str]:
    """Identifiers that the layer may not use; `bare` has neither comments nor literals."""
    problems = []
    registers = _REGISTRATION.match(path)
    if "STABLE_TORCH_LIBRARY" in bare and not registers:
        problems.append("has a STABLE_TORCH_LIBRARY block: schemas live in csrc/ops_<family>.cpp")
    if registers:
        problems += [f"holds logic ('{word}')" for word in set(_CONTROL.findall(bare))]
    if layer in ("cubin", "ops", "top"):
        names = sorted(set(_DRIVER_NAME.findall(bare)))
        problems += [f"names the driver ({name})" for name in names]
        if re.search(r"\bdriver\s*\(\s*\)", bare):
            problems.append("calls driver()")
    problems += [
        f"uses the CUDA runtime ({name})" for name in sorted(set(_RUNTIME_API.findall(bare)))
    ]
    if layer != "driver":
        problems += [
            f"uses the dynamic loader ({name})" for name in sorted(set(_LOADER.findall(bare)))
        ]
    if layer == "runtime":
        problems += [f"parses files ({name})" for name in sorted(set(_PARSING.findall(bare)))]
    return problems


def check_tree(root: Path) -> list[str]:
    """The violations of every source under csrc/."""
    context = context_of(root)
    problems = []
    for path in sorted(root.rglob("*")):
        if path.suffix in HOST_SUFFIXES + DEVICE_SUFFIXES:
            relative = path.relative_to(root).as_posix()
            problems += violations(relative, path.read_text(), context)
    return problems
