"""C++ support: paths of headers and libraries, setuptools extensions, and C++ functions that are
compiled at run time.

    ops = torch_cubin.cpp.load_inline(
        "mine",
        '''
        #include <torch_cubin/torch.h>
        using namespace torch_cubin;
        TORCH_CUBIN_EMBED(my_cubin);
        Tensor add_one(Tensor x) {
          static auto kernel = embedded(my_cubin)["add_one"];
          Tensor y = torch_cubin::empty_like(x);
          kernel(grid(cdiv(x.numel(), 256)), block(256), x, y, int(x.numel()));
          return y;
        }
        ''',
        embed={"my_cubin": "add_one.cubin"},
        functions=["add_one"],
    )
    y = ops.add_one(x)                      # ops.add_one is an op of torch.ops

It needs a C++ compiler, but neither nvcc nor CUDA. docs/cpp.md is the guide.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_cubin import embed as _embed
from torch_cubin import errors
from torch_cubin._compile import cache, headers, links

FilePath = str | os.PathLike[str]
Images = Any  # a FilePath, bytes, bytearray, memoryview or Module, or an Iterable of these
_ROOT = Path(__file__).resolve().parent
# The oldest PyTorch that the headers support; setup.py's TORCH_MIN.
_TORCH_TARGET = "0x020b000000000000"
# Libraries of this process, by namespace. A second one with the same ops, from a cache that was
# moved, would end it.
_loaded: dict[str, Path] = {}
_SCHEMA = re.compile(r"\s*([A-Za-z_]\w*)\s*(\(.*\)\s*->.+)?", re.S)


def include_path() -> str:
    """The folder for -I: `#include <torch_cubin/cubin.h>`."""
    return str(_ROOT / "include")


def library_path() -> str:
    """The folder for -L: libtorch_cubin.so and libtorch_cubin.a."""
    return str(_ROOT / "lib")


def cmake_path() -> str:
    """torch_cubin_DIR for CMake's find_package(torch_cubin)."""
    return str(_ROOT / "cmake")


def _torch_folder() -> Path:
    import torch

    return Path(torch.__file__).resolve().parent


def compile_flags(torch: bool = True) -> list[str]:
    """Flags of a C++ compiler for torch_cubin/torch.h; without `torch`, for torch_cubin/cubin.h."""
    flags = [f"-I{include_path()}"]
    if not torch:
        return ["-std=c++17", *flags]
    folder = _torch_folder() / "include"
    flags += [f"-isystem{folder}", f"-isystem{folder / 'torch' / 'csrc' / 'api' / 'include'}"]
    library = str(_ROOT / "_C.so").replace('"', '\\"')
    flags += [f"-DTORCH_TARGET_VERSION={_TORCH_TARGET}", f'-DTORCH_CUBIN_OPS_LIBRARY="{library}"']
    return ["-std=c++20", *flags]


def link_flags(torch: bool = True, shared: bool = False) -> list[str]:
    """Flags of a linker, after the objects; static by default, so that the result runs anywhere."""
    if shared:
        flags = [f"-L{library_path()}", "-ltorch_cubin", f"-Wl,-rpath,{library_path()}"]
    else:
        flags = [str(_ROOT / "lib" / "libtorch_cubin.a")]
    if torch:
        flags += [f"-L{_torch_folder() / 'lib'}", "-ltorch_cpu", "-lc10"]
    return [*flags, "-ldl", "-pthread"]


def __getattr__(name: str) -> Any:
    if name == "Extension":  # defined on first use: setuptools may be missing
        globals()[name] = _extension_class()
        return globals()[name]
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def _extension_class() -> type:
    import setuptools

    class Extension(setuptools.Extension):
        """A setuptools extension in C++ with embedded device code: `mine/_ops.abi3.so`.

            Extension("mine._ops", ["ops.cpp"], embed={"my_cubin": ["x.sm_80.cubin", "x.cubin"]})

        Load it with torch.ops.load_library. `embed` gives each name of TORCH_CUBIN_EMBED its files,
        one per architecture, or a torch_cubin.Module; without `torch` the sources use only cubin.h.
        Raises the errors of embed.write_unit.
        """

        def __init__(
            self,
            name: str,
            sources: Iterable[FilePath],
            *,
            embed: Mapping[str, _embed.Files] | None = None,
            torch: bool = True,
            **keywords: Any,
        ) -> None:
            units, depends = [], list(keywords.pop("depends", ()))
            for symbol, files in (embed or {}).items():
                listed = _embed.listed(files)
                unit = Path("build", "torch_cubin", f"{name}.{symbol}.cpp")
                _embed.write_unit(unit, listed, name=symbol)
                units.append(str(unit))
                depends += [os.fspath(file) for file in listed if not _embed.is_module(file)]
            compile_arguments = [*compile_flags(torch), "-fvisibility=hidden"]
            compile_arguments += keywords.pop("extra_compile_args", [])
            link_arguments = [*link_flags(torch), *keywords.pop("extra_link_args", [])]
            keywords.setdefault("py_limited_api", True)  # determines the file's name
            keywords.setdefault("language", "c++")
            super().__init__(
                name,
                [*(os.fspath(source) for source in sources), *units],
                depends=depends,
                extra_compile_args=compile_arguments,
                extra_link_args=link_arguments,
                **keywords,
            )

    Extension.__module__, Extension.__qualname__ = __name__, "Extension"
    return Extension


@functools.cache
def _own_folder() -> Path:
    """The folder for extensions that only this process uses; deleted when it ends."""
    folder = tempfile.mkdtemp(prefix="torch_cubin_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def cache_path() -> Path:
    """The cache of load_inline: TORCH_CUBIN_CACHE, else ~/.cache/torch_cubin; a folder of this
    process if the variable is "0"."""
    folder = cache.folder()
    return _own_folder() if folder is None else folder.resolve()


@errors.named_keywords
def load_inline(
    name: str,
    source: str,
    *,
    embed: Mapping[str, Images] | None = None,
    functions: Iterable[str] = (),
    extra_compile_args: Iterable[str] = (),
    extra_link_args: Iterable[str] = (),
    verbose: bool = False,
) -> types.SimpleNamespace:
    """Compiles C++ that includes torch_cubin/torch.h and returns its functions as ops of PyTorch.

    embed: for each name of TORCH_CUBIN_EMBED its images, as paths or bytes, one per architecture,
        or a torch_cubin.Module, e.g. from compile().
    functions: names of functions in `source`, whose schemas follow from their C++ types: Tensor,
        int64_t (not int), double (not float), bool, std::string, torch.dtype as ScalarType,
        torch::stable::Device, std::optional, std::vector and std::tuple of these, void. Or whole
        schemas ("scale_(Tensor(a!) x, float by) -> ()", whose float is C++'s double), which give
        names and defaults of arguments and mark mutated ones. They are registered for CUDA.

    The compiled library is cached (cache_path()) under the hash of its inputs: sources and headers
    of your own, images, flags, objects and libraries that these name or find, the compiler, the
    versions of PyTorch and of torch_cubin. It is compiled in each call if an include is a macro, or
    flags include files ("-include"). The ops are in torch.ops.NAME_HASH; add derivatives and fakes
    with torch.library, by the op's name `ops.NAME._qualified_op_name`.

    Raises InputError [input] for bad arguments, for a function whose types are unsupported or
    differ from its schema, and for source that does not compile, with the compiler's text;
    FileError [file] without a compiler.
    """
    import torch

    if not name.isidentifier() or not name.isascii() or len(name) > 200:  # a file's name, too
        raise errors.fault(
            "input", f"the name '{name:.200}'", "cannot be a namespace",
            expected="an identifier of at most 200 letters",
        )  # fmt: skip
    functions, extra_compile_args, extra_link_args = (  # they may be iterators
        [each] if isinstance(each, str) else [*map(str, each)]
        for each in (functions, extra_compile_args, extra_link_args)
    )
    declared = [_declared(function) for function in functions]
    twice = {function for function, count in Counter(n for n, _ in declared).items() if count > 1}
    if twice:
        raise errors.fault(
            "input", f"the function '{min(twice)}'", "is given twice", expected="a name once"
        )
    images = {symbol: _images(symbol, given) for symbol, given in (embed or {}).items()}
    compiler = _compiler()
    flags = ["-O2", "-fPIC", "-shared", "-fvisibility=hidden", *compile_flags()]
    flags += ["-Wl,--as-needed", *extra_compile_args]
    link_options = [*link_flags(), *extra_link_args]
    digest = hashlib.sha256()
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    included = _headers(source, [*compiler[1:], *extra_compile_args])
    parts = [name, source, repr(declared), repr(flags + link_options), version, torch.__version__]
    parts.append(included or secrets.token_hex())
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    for own in (*sorted((_ROOT / "include" / "torch_cubin").iterdir()), _library()):
        digest.update(hashlib.sha256(own.read_bytes()).digest())
    for linked in links.identities([*extra_compile_args, *extra_link_args]):
        digest.update(linked)
    for symbol, files in images.items():
        for content in files:
            digest.update(f"{symbol}:{len(content)}:".encode() + content)
    key = digest.hexdigest()[:16]
    namespace = f"{name}_{key}"
    if namespace not in _loaded:
        folder = _folder_of(namespace, f"{name}.so", included is not None)
        library = folder / f"{name}.so"
        build = functools.partial(
            _build, folder, library, source, namespace, declared, images, compiler, flags,
            link_options, verbose,
        )  # fmt: skip
        _load(namespace, library, build, ", ".join(images))
    library = _loaded[namespace]
    with contextlib.suppress(OSError):
        os.utime(library)  # the time of last use, which determines evictions
    cache.evict()
    _check_schemas(library, declared)
    made = {function: getattr(getattr(torch.ops, namespace), function) for function, _ in declared}
    return types.SimpleNamespace(**made)


def _load(namespace: str, library: Path, build: Callable[[], None], images: str) -> None:
    """Builds the library unless it is there, and loads it."""
    import torch

    for is_last in (False, False, True):
        if not library.is_file():
            build()
        try:
            torch.ops.load_library(str(library))
            break
        except OSError as error:
            missing = re.search(r"torch_cubin_embedded_(\w+)", str(error))
            if missing:
                raise errors.fault(
                    "input", f"the source of '{namespace}'", "embeds an image that is not given",
                    expected=f"embed={{'{missing[1]}': ...}}", got=images or "no embed=",
                ) from error  # fmt: skip
            # If another process has evicted it meanwhile, it is built again.
            if is_last or library.is_file():
                raise
    _loaded[namespace] = library


def _folder_of(namespace: str, library: str, is_cached: bool) -> Path:
    """In the cache, or, where that cannot be written, a folder that only this process uses."""
    if is_cached:
        folder = cache_path() / namespace
        with contextlib.suppress(OSError):
            if (folder / library).is_file():
                return folder
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    return _own_folder() / namespace


def _headers(source: str, options: Sequence[str]) -> str | None:
    """The digest of the headers that a source includes, but for the compiler's, PyTorch's and
    torch_cubin's; None if nothing can say which."""
    folders = headers.folders_of_options(options)
    if folders is None:
        return None
    return headers.digest(source, [*folders, *headers.folders_of_environment()], ())


def _declared(function: str) -> tuple[str, str]:
    """The function's name, and its schema, or ""."""
    match = _SCHEMA.fullmatch(function)
    if match is None:
        raise errors.fault(
            "input",
            f"the function '{function}'",
            "is neither a name nor a schema",
            expected="'f' or 'f(Tensor x) -> Tensor'",
        )
    if not match[2]:
        return match[1], ""
    from torch_cubin._pytorch import operators

    schema = match[0].strip()
    # PyTorch's error would end the process: it is thrown while the library is loaded.
    said = operators.refusal_of_schema(schema)
    if said:
        raise errors.fault("input", f"the schema {schema!r:.200}", "does not parse", got=said)
    return match[1], schema


# A function in the compiled library: returns the schemas of the C++ types, one per line.
_SCHEMAS = "torch_cubin_schemas"


def _check_schemas(library: Path, declared: list[tuple[str, str]]) -> None:
    """Compares the given schemas with the functions' C++ types.

    NOTE: PyTorch does not check this: an int64_t would read the bits of a float's double.
    """
    given = [schema for _, schema in declared if schema]
    if not given:
        return
    from torch_cubin._pytorch import operators

    function = getattr(ctypes.CDLL(str(library)), _SCHEMAS)
    function.restype = ctypes.c_char_p
    for schema, compiled in zip(given, function().decode().splitlines(), strict=True):
        wanted, found = map(operators.types_of_schema, (schema, compiled))
        if wanted != found:
            raise errors.fault(
                "input", f"the schema '{schema}'", "is not that of the C++ function",
                expected=compiled, got=schema,
                advice="A schema's int is C++'s int64_t, its float is double.",
            )  # fmt: skip


def _images(symbol: str, given: Images) -> list[bytes]:
    if isinstance(given, (str, os.PathLike, bytes, bytearray, memoryview)):
        given = [given]
    contents = []
    for image in [given] if _embed.is_module(given) else given:
        if _embed.is_module(image):
            contents += image._image_files("").values()
            continue
        if isinstance(image, (bytes, bytearray, memoryview)):
            contents.append(bytes(image))
            continue
        try:
            contents.append(Path(image).read_bytes())
        except OSError as error:
            raise errors.fault(
                "file", f"file '{image}'", "cannot be read", got=error.strerror or str(error)
            ) from error
    if not contents or not all(contents):
        raise errors.fault(
            "input", f"embed['{symbol}']", "holds no image", expected="a path or bytes, or several"
        )
    return contents


def _library() -> Path:
    library = _ROOT / "lib" / "libtorch_cubin.a"
    if library.is_file():
        return library
    raise errors.fault(
        "file", f"file '{library}'", "is missing", advice="Build or install torch_cubin again."
    )


def _compiler() -> list[str]:
    named = os.environ.get("CXX", "")
    try:
        chosen = shlex.split(named) or ["c++"]
    except ValueError as error:
        raise errors.fault(
            "input", "the environment's CXX", f"is no command ({error})", got=repr(named)[:80]
        ) from None
    if shutil.which(chosen[0]) is None and not named:
        chosen = ["g++"]
    if shutil.which(chosen[0]) is None:
        raise errors.fault(
            "file",
            "a C++ compiler",
            "is missing",
            expected=f"{chosen[0]} on the PATH",
            advice="Install g++ or clang++, or name it in CXX.",
        )
    return chosen


def _registration(namespace: str, declared: list[tuple[str, str]]) -> str:
    """The C++ that follows the source and registers its functions as ops."""
    # One line per function: the compiler's error about its types names that line.
    of_types = {
        name: f'\n#line 1 "function {name}"\n::torch_cubin::detail::schema_of("{name}", &{name})\n'
        for name, _ in declared
    }
    names = "".join(f' + {of_types[name]} + "\\n"' for name, schema in declared if schema)
    defs = "".join(
        f"  m.def({json.dumps(schema)});\n" if schema else f"  m.def(({of_types[name]}).c_str());\n"
        for name, schema in declared
    )
    impls = "".join(f'  m.impl("{name}", TORCH_BOX(&{name}));\n' for name, _ in declared)
    return (
        f'\nextern "C" __attribute__((visibility("default"))) const char* {_SCHEMAS}() {{\n'
        f"  static const std::string names = std::string(){names};\n"
        "  return names.c_str();\n}\n"
        f"STABLE_TORCH_LIBRARY({namespace}, m) {{\n{defs}}}\n"
        f"STABLE_TORCH_LIBRARY_IMPL({namespace}, CUDA, m) {{\n{impls}}}\n"
    )


def _wrong_type(namespace: str, text: str) -> errors.Error | None:
    """The error if the compiler failed the static_assert of torch.h's SchemaType, else None."""
    allowed = re.search(r"torch_cubin: an op takes and returns (.*? of these)", text)
    kind = re.search(r"SchemaType<([^'\n;]+?) ?>['; ]", text)
    function = re.search(r"function (\w+):1\b", text)
    if not (allowed and kind and function):
        return None
    return errors.fault(
        "input", f"the function '{function[1]}' of '{namespace}'",
        "takes or returns what no op does", expected=allowed[1], got=kind[1],
        advice="PyTorch's integers are int64_t, its floating-point numbers double.",
    )  # fmt: skip


def _build(
    folder: Path,
    library: Path,
    source: str,
    namespace: str,
    declared: list[tuple[str, str]],
    images: dict[str, list[bytes]],
    compiler: list[str],
    flags: list[str],
    links: list[str],
    verbose: bool,
) -> None:
    """Compiles into `library`, which appears only when it is complete; a second process waits."""
    with cache.locked_folder(folder):
        if library.is_file():
            return
        main = folder / "main.cpp"
        registered = _registration(namespace, declared) if declared else ""
        main.write_text(f'#line 1 "{namespace}"\n{source}{registered}')
        units = [main]
        for symbol, contents in images.items():
            paths = []
            for index, content in enumerate(contents):
                path = folder / f"{symbol}.{index}.image"
                path.write_bytes(content)
                paths.append(path)
            units.append(folder / f"{symbol}.cpp")
            _embed.write_unit(units[-1], paths, name=symbol)
        unfinished = folder / f".{library.name}.{os.getpid()}"
        command = [*compiler, *flags, *map(str, units), "-o", str(unfinished), *links]
        if verbose:
            print(shlex.join(command), file=sys.stderr, flush=True)
        environment = {**os.environ, "LC_ALL": "C"}  # _wrong_type() parses the compiler's messages
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if verbose and done.stderr:
            print(done.stderr, file=sys.stderr)
        if done.returncode != 0:
            raise _wrong_type(namespace, done.stderr) or errors.fault(
                "input",
                f"the source of '{namespace}'",
                "does not compile",
                advice=f"{compiler[0]} says:\n{done.stderr[-8000:]}",
            )
        unfinished.replace(library)


__all__ = [  # noqa: F822 (__getattr__ defines Extension)
    "Extension",
    "cache_path",
    "cmake_path",
    "compile_flags",
    "include_path",
    "library_path",
    "link_flags",
    "load_inline",
]
