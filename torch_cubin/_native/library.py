"""Loads torch_cubin/_C.so and wraps its C functions.

The library does not use Python's C API. torch registers its ops (torch.ops.load_library); ctypes
calls its functions that are not ops, which functions.py declares. Nothing here touches the CUDA
driver, except `device()`.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch_cubin import errors
from torch_cubin._native import functions, process
from torch_cubin._native.functions import ADDRESS, ADDRESSES, TEXT

PATH = Path(__file__).resolve().parents[1] / "_C.so"
# The part of the library that does not need PyTorch, which C++ programs link.
SMALL_PATH = PATH.with_name("lib") / "libtorch_cubin.so"


@functools.cache
def load() -> ctypes.CDLL:
    """Registers the ops and returns the library; ImportError if it is missing or too old."""
    import torch

    from torch_cubin._pytorch import tensor_types

    if not PATH.is_file():
        hidden = process.hidden_package(PATH)
        raise _import_error(
            "is missing",
            expected="the compiled half of torch_cubin",
            got=f"sources that hide the installed '{hidden}'" if hidden else "",
            advice="Run Python from another folder, or build these sources: `make build`."
            if hidden
            else "Build it: `make build` in a checkout, or install the wheel "
            "(`pip install --no-build-isolation .`).",
        )
    other = process.other_library(PATH)
    if other:
        raise _import_error(
            "cannot be loaded beside another copy of itself",
            expected="one torch_cubin in a process",
            got=f"'{other}'",
            advice="Remove one of them from the path.",
        )
    try:
        torch.ops.load_library(str(PATH))
        library = ctypes.CDLL(str(PATH))  # the same file, so the loader returns the same library
    except OSError as error:
        problem = f"cannot be loaded by torch {torch.__version__} ({error})"
        advice = "Build it again with this torch: `make build`."
        raise _import_error(problem, advice=advice) from error
    for name, (result, arguments) in functions.FUNCTIONS.items():
        try:
            function = getattr(library, f"torch_cubin_{name}")
        except AttributeError as error:  # the library was built from older sources
            raise _import_error(
                f"is of another version of torch_cubin ({error})",
                expected=f"the function torch_cubin_{name}",
                advice="Build it again: `make build`.",
            ) from error
        function.argtypes, function.restype = arguments, result
    tensor_types.register(library)
    return library


def make_global() -> None:
    """Lets libraries that are loaded later, as compiled graphs are, find our C functions."""
    load()
    ctypes.CDLL(str(PATH), os.RTLD_NOLOAD | os.RTLD_NOW | os.RTLD_GLOBAL)


def _import_error(problem: str, **parts: str) -> ImportError:
    message = errors.fault("file", f"library '{PATH}'", problem, **parts)
    return ImportError(str(message), path=str(PATH))


def _answer(address: int | None) -> dict[str, Any]:
    """Parses and frees a JSON string of the library; raises the error that it contains, if any."""
    if not address:
        raise errors.fault("internal", "torch_cubin", "could not allocate an answer")
    try:
        # Errors quote user input, which they may cut in the middle of a character.
        answer = json.loads(ctypes.string_at(address).decode("utf-8", "replace"))
    finally:
        load().torch_cubin_free(address)
    if "error" in answer:
        raise errors.make(answer["error"]["tag"], answer["error"]["message"])
    return answer


@functools.cache
def _reader() -> ctypes.CDLL:
    """The library that reads files by the C ABI (abi.h); without PyTorch, the small one."""
    if not process.without_torch():
        library = load()
    else:
        try:
            library = ctypes.CDLL(str(SMALL_PATH))
        except OSError as error:
            raise errors.fault(
                "file", f"library '{SMALL_PATH}'", f"cannot be loaded ({error})",
                advice="Build it: `make build` in a checkout, or install the wheel.",
            ) from error  # fmt: skip
    library.torch_cubin_v1_inspect.argtypes = [TEXT, ctypes.c_uint64, TEXT, ADDRESSES]
    library.torch_cubin_v1_inspect.restype = ADDRESS
    library.torch_cubin_v1_text_free.argtypes = [ADDRESS]
    library.torch_cubin_v1_text_free.restype = None
    library.torch_cubin_v1_error_part.argtypes = [ADDRESS, ctypes.c_uint32]
    library.torch_cubin_v1_error_part.restype = TEXT
    library.torch_cubin_v1_error_free.argtypes = [ADDRESS]
    library.torch_cubin_v1_error_free.restype = None
    return library


def inspect(data: bytes, origin: str) -> dict[str, Any]:
    """The facts of a file's bytes (csrc/cubin/inspect.h). `origin` names it in errors."""
    reader, text = _reader(), ADDRESS()
    error = reader.torch_cubin_v1_inspect(data, len(data), _text(origin), ctypes.byref(text))
    if error:
        tag, message = (reader.torch_cubin_v1_error_part(error, part) for part in (0, 1))
        reader.torch_cubin_v1_error_free(error)
        raise errors.make(tag.decode(), message.decode("utf-8", "replace"))
    try:
        return json.loads(ctypes.string_at(text).decode("utf-8", "replace"))
    finally:
        reader.torch_cubin_v1_text_free(text)


def pytorch_symbols() -> list[dict[str, Any]]:
    """The PyTorch symbols outside its stable ABI that are used (csrc/pytorch/internals.h)."""
    return _answer(load().torch_cubin_pytorch_symbols())["symbols"]


def check_call(call: str) -> dict[str, Any]:
    """The outputs of a declared op's call that is described in JSON (csrc/declared/contract.h)."""
    return _answer(load().torch_cubin_check_call(call.encode()))


def check_described(name: str, call: str) -> None:
    """Raises the error of a call that is described in JSON (csrc/c_api_checks.cpp), if it has
    one."""
    _answer(load().torch_cubin_check_described(name.encode(), call.encode()))


def _text(name: str) -> bytes:
    """A name for errors, encoded for C."""
    return name.encode("utf-8", "backslashreplace").replace(b"\0", b"\\0")


def catalog() -> dict[str, Any]:
    """The built-in kernels: the manifest and more (Catalog::to_json in csrc/package/catalog.h)."""
    return _answer(load().torch_cubin_catalog())


def catalog_cubin(name: str, arch: str) -> bytes:
    """A built-in kernel's cubin, which may lie in an archive; verified by its sha256."""
    library, data, size = load(), ADDRESS(), ctypes.c_size_t()
    _answer(
        library.torch_cubin_catalog_cubin(
            name.encode(), arch.encode(), ctypes.byref(data), ctypes.byref(size)
        )
    )
    try:
        return ctypes.string_at(data, size.value)
    finally:
        library.torch_cubin_free(data)


def device(index: int) -> dict[str, Any]:
    """The driver's facts of a GPU, and the arch chosen for it. Initialises the driver."""
    return _answer(load().torch_cubin_device(index))


def op_calls(*, clear: bool = False) -> list[dict[str, Any]]:
    """The "op", "device", "dtype" and "calls" of each op that ran (csrc/ops/common/op_calls.h)."""
    return _answer(load().torch_cubin_op_calls(clear))["calls"]


def stand_over_aten(key: str) -> None:
    """Registers our kernels for aten's operators and a dispatch key (csrc/c_api_install.cpp); once
    each."""
    _answer(load().torch_cubin_stand_over_aten(_text(key)))


def stand_over_flash(key: str, arguments: int, into: int) -> None:
    """The same for PyTorch's flash attention, whose forwards have so many arguments."""
    _answer(load().torch_cubin_stand_over_flash(_text(key), arguments, into))


def stand_over_sums(key: str) -> None:
    """The same for aten::sum over dims."""
    _answer(load().torch_cubin_stand_over_sums(_text(key)))


def stand_over_norms(key: str) -> None:
    """The same for layer norm and RMS norm, where this PyTorch has what that needs."""
    _answer(load().torch_cubin_stand_over_norms(_text(key)))


def set_process_policy(policy: int) -> None:
    """Sets which calls of aten's products are served in every thread
    (csrc/ops/common/serving.h)."""
    _answer(load().torch_cubin_set_process_policy(policy))


def set_thread_policy(policy: int) -> int:
    """Sets it for this thread; returns its previous policy."""
    return load().torch_cubin_set_thread_policy(policy)


def set_process_batch_invariant(on: bool) -> None:
    """install(): whether calls of threads without a state of their own are batch-invariant."""
    load().torch_cubin_set_process_batch_invariant(on)


def set_process_keeps_k_whole(on: bool) -> None:
    """install(tensor_parallel=N): batch-invariant products add K up in one chain, however many
    columns a rank has."""
    load().torch_cubin_set_process_keeps_k_whole(on)


def forget_thread_object(key: str) -> None:
    """Removes this thread's object (torch_cubin/_pytorch/thread_objects.py), if it has one."""
    load().torch_cubin_forget_thread_object(_text(key))


def thread_object_policy() -> int:
    """The policy of this thread's object; 0 if it has none."""
    return load().torch_cubin_thread_object_policy()


def set_known_speed(table: str) -> None:
    """Sets which calls are known to be fast: JSON, before the first call."""
    _answer(load().torch_cubin_set_known_speed(_text(table)))


def set_calibrate(function: Callable[[int], int]) -> None:
    """Sets the function that measures a GPU, by index, which the known speeds do not name; it
    returns 0 to be asked again. Call it once: the library keeps the function."""
    global _calibrate
    _calibrate = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(function)
    load().torch_cubin_set_calibrate(_calibrate)


_calibrate: Any = None


def set_calibrated_speed(device: int, table: str) -> None:
    _answer(load().torch_cubin_set_calibrated_speed(device, _text(table)))


def set_measuring(state: int) -> None:
    """1, 2: this thread's calls run PyTorch's kernels or ours and are not counted; 0 ends that."""
    load().torch_cubin_set_measuring(state)


def declined_calls(*, clear: bool = False) -> list[dict[str, Any]]:
    """The "op", "reason" and "calls" of the calls left to PyTorch."""
    return _answer(load().torch_cubin_declined_calls(clear))["calls"]


def launches() -> int:
    """The number of kernels that this process has launched."""
    return load().torch_cubin_launches()


def cubin_at(path: str) -> str:
    """The path itself; for a folder of Triton's that of its cubin (csrc/package/triton_notes.h)."""
    return os.fsdecode(_answer(load().torch_cubin_cubin_at(os.fsencode(path)))["cubin"])


def hidden_advice(kernel: int, count: int) -> str:
    """What to do about parameters that a compiler added, for a call with `count` arguments."""
    return _answer(load().torch_cubin_hidden_advice(kernel, count))["advice"]


def open_module(
    sources: Sequence[tuple[bytes, str]], origin: str, jit: bool, paths: Sequence[str] = ()
) -> dict[str, Any]:
    """Opens a module of images (bytes, name for errors); returns its "handle" and their facts.

    `paths`: the file, or folder of Triton's, that each was read from, or "".
    """
    data, sizes, names, count = _sources(sources)
    noted = (ctypes.c_char_p * count)(*map(os.fsencode, paths or [""] * count))
    answer = load().torch_cubin_module_open(
        data, sizes, names, noted, count, _text(origin), bool(jit)
    )
    return _answer(answer)


def images(
    sources: list[tuple[bytes, str]], origin: str, jit: bool = False
) -> list[tuple[bytes, str, dict[str, Any]]]:
    """Each image that open_module() finds in the sources: its bytes, name for errors, and facts."""
    answer = open_module(sources, origin, jit)
    try:
        return [
            (ctypes.string_at(place["address"], place["bytes"]), place["origin"], facts)
            for place, facts in zip(answer["places"], answer["images"], strict=True)
        ]
    finally:
        module_drop(answer["handle"])


def _sources(sources: Sequence[tuple[bytes, str]]) -> tuple[Any, Any, Any, int]:
    """The sources (bytes, name for errors) as arrays for C."""
    count = len(sources)
    data = (ctypes.c_char_p * count)(*(content for content, _ in sources))
    sizes = (ctypes.c_size_t * count)(*(len(content) for content, _ in sources))
    names = (ctypes.c_char_p * count)(*(_text(name) for _, name in sources))
    return data, sizes, names, count


def define_ops(
    contracts: list[dict[str, Any]], sources: list[tuple[bytes, str]]
) -> list[dict[str, Any]]:
    """Defines declared ops, all or none; {"name", "schema", "state"} of each.

    `sources`: (bytes, name for errors) of the images that the contracts refer to by number.
    """
    # Values that JSON lacks are passed as text; C++ refuses them and names the place.
    ops = {"version": 1, "ops": contracts}
    text = json.dumps(ops, allow_nan=False, default=repr).encode()
    return _answer(load().torch_cubin_define_ops(text, *_sources(sources)))["ops"]


def check_schema(schema: str, *, differentiable: bool = False) -> None:
    """Raises InputError [input] for a schema that a (differentiable) declared op cannot have."""
    _answer(load().torch_cubin_check_schema(_text(schema), differentiable))


def load_package(folder: str, trusted: list[str] | None = None) -> list[dict[str, Any]]:
    """Defines a package's ops, all or none; each also with its "contract", "package"
    and "images". `trusted`: public keys, in hex digits, one of which must have signed it."""
    path = os.fsencode(folder)
    if trusted is None:
        return _answer(load().torch_cubin_load_package(path))["ops"]
    return _answer(load().torch_cubin_load_signed_package(path, _text(json.dumps(trusted))))["ops"]


def defined_ops() -> list[dict[str, Any]]:
    """All declared ops of the process, in the form of load_package, without a state."""
    return _answer(load().torch_cubin_ops())["ops"]


def packages_error() -> None:
    """Raises the error of TORCH_CUBIN_PACKAGES from the library's load, if any."""
    _answer(load().torch_cubin_packages_error())


def preload_op(name: str, device: int) -> None:
    _answer(load().torch_cubin_preload_op(name.encode(), device))


def _symbol(name: str) -> bytes:
    """A kernel's or variable's name, encoded; names have no surrogates but those of raw bytes."""
    try:
        return name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return _text(name)


def module_kernel(module: int, name: str) -> dict[str, Any]:
    """Finds a kernel by its symbol or C++ name: {"handle", valid as long as its module; "name", its
    symbol; "params", the facts that its files state of each}."""
    text = _symbol(name)
    return _answer(load().torch_cubin_module_kernel(module, text, len(text)))


def symbols_called(symbols: Iterable[str], name: str) -> list[str]:
    """The symbols that `name` refers to: one rule for kernels and variables everywhere."""
    if any("\ud800" <= character <= "\udfff" for character in name):
        return []  # no UTF-8 text, and so no symbol, has a surrogate
    text = json.dumps({"symbols": list(symbols), "name": name}).encode()
    return _answer(load().torch_cubin_symbols_called(text))["symbols"]


def module_global(module: int, device: int, name: str) -> tuple[int, int]:
    """Address and bytes of a global variable on that device."""
    text = _symbol(name)
    answer = _answer(load().torch_cubin_module_global(module, device, text, len(text)))
    return answer["address"], answer["bytes"]


def module_preload(module: int, device: int) -> None:
    _answer(load().torch_cubin_module_preload(module, device))


def kernel_preload(kernel: int, device: int) -> None:
    _answer(load().torch_cubin_kernel_preload(kernel, device))


def module_unload(module: int, keep: bool) -> bool:
    """Closes a module; False if a captured CUDA graph, or `keep`, leaves it loaded."""
    return _answer(load().torch_cubin_module_unload(module, keep))["unloaded"]


def module_drop(module: int) -> None:
    """Called when the Python object is freed. Loaded code of the module stays in the driver."""
    load().torch_cubin_module_drop(module)


def kernel_launch(kernel: int, call: ctypes.Structure) -> None:
    """Launches with a struct torch_cubin_launch_call (csrc/runtime/launch_call.h)."""
    raise_error(load().torch_cubin_kernel_launch(kernel, ctypes.addressof(call)))


def raise_error(address: int | None) -> None:
    """Raises and frees the error at that address; 0 or None is no error."""
    if address:
        _answer(address)


def encode_tensor_map(fields: dict[str, Any], check_only: bool = False) -> bytes:
    """The 128 bytes of a tensor map; raises InputError [input] if the hardware cannot have it."""
    out = None if check_only else ctypes.create_string_buffer(128)
    text = json.dumps(fields, default=repr).encode()
    _answer(load().torch_cubin_encode_tensor_map(text, out))
    return b"" if out is None else out.raw


def pointer_device(address: int) -> int:
    """The index of the device that owns the memory; -1 if it is not GPU memory."""
    return _answer(load().torch_cubin_pointer_device(address))["device"]


def watch_plans(on: bool) -> None:
    """Starts or ends recording matmul's plans (ops/matmul/plan.h); clears the earlier ones."""
    _answer(load().torch_cubin_watch_plans(bool(on)))


def watched_plans() -> list[dict[str, Any]]:
    """The recorded products, each with all its configs."""
    return _answer(load().torch_cubin_watched_plans())["plans"]


def attention_schemas() -> dict[str, str]:
    """The schemas of the attention family's ops that have options, by the op's name."""
    return _answer(load().torch_cubin_attention_schemas())


def planned(
    products: list[dict[str, Any]],
    configs: bool = False,
    device: int = 0,
    terms: dict[str, float] | None = None,
) -> list[dict[str, Any]]:
    """The kernels that described products would run there (csrc/ops/matmul/plan.h); with `configs`,
    also all others that they could run; `terms`: values of the planner's terms to use instead of
    the device's."""
    text = json.dumps({"products": products, "terms": terms or {}}).encode()
    return _answer(load().torch_cubin_planned(device, text, bool(configs)))["plans"]


def planner_terms(device: int = 0) -> dict[str, float]:
    """What the planner takes for the device's rates and times (csrc/ops/matmul/cost.h)."""
    text = json.dumps({"products": [], "terms": {}}).encode()
    return _answer(load().torch_cubin_planned(device, text, 0))["terms"]


def force_config(name: str) -> None:
    """Forces a config for this thread's products that have it, while plans are recorded: raises
    otherwise. "" resets."""
    _answer(load().torch_cubin_force_config(name.encode()))


def add_tuned_table(table: dict[str, Any]) -> None:
    """Adds a tuned table, of products (csrc/ops/matmul/tuned.h) or of calls of declared ops
    (csrc/declared/tuning.h), to this process."""
    _answer(load().torch_cubin_add_tuned_table(json.dumps(table).encode()))


def watch_op(name: str | None) -> None:
    """Records this thread's calls of a declared op (CallWatch there); None ends it."""
    _answer(load().torch_cubin_watch_op(None if name is None else name.encode()))


def watched_calls() -> list[dict[str, Any]]:
    """The recorded calls of the watched op."""
    return _answer(load().torch_cubin_watched_calls())["calls"]


def force_kernel(number: int) -> None:
    """Forces a kernel for this thread's calls of the watched op; -1: their own choice."""
    _answer(load().torch_cubin_force_kernel(number))


def tuned_file(name: str, device: int) -> dict[str, Any]:
    """The file in which tune() keeps an op's results: "path" (or None), "gpu", "driver", "hash"."""
    return _answer(load().torch_cubin_tuned_file(name.encode(), device))
