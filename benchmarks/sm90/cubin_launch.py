"""The part of the CUDA driver API that the benchmarks of this folder use, through ctypes.

The driver's structs are written by hand: machines that run benchmarks may lack cuda.h.
"""

from __future__ import annotations

import ctypes

import torch

cuda = ctypes.CDLL("libcuda.so.1")
_DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}


def check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{what}: {code} {text.value!r}")


TensorMap = ctypes.c_uint64 * 16  # the `words` of a map in the kernels' parameters


def encode(tensor: torch.Tensor, box: tuple[int, int], promotion: int = 2) -> ctypes.Array:
    """Tensor map of a 2-d tensor with contiguous rows; `box` is (columns, rows), swizzle 128 B."""
    storage = (ctypes.c_char * 192)()
    address = (ctypes.addressof(storage) + 63) // 64 * 64
    rows, columns = tensor.shape
    size = tensor.element_size()
    code = cuda.cuTensorMapEncodeTiled(
        ctypes.c_void_p(address),
        _DTYPES[tensor.dtype],
        2,
        ctypes.c_void_p(tensor.data_ptr()),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(tensor.stride(0) * size),
        (ctypes.c_uint32 * 2)(*box),
        (ctypes.c_uint32 * 2)(1, 1),
        0,
        3,
        promotion,
        0,
    )
    check(code, f"cuTensorMapEncodeTiled {tuple(tensor.shape)} {tensor.stride()} box {box}")
    return TensorMap.from_buffer_copy((ctypes.c_char * 128).from_address(address))


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16)]


class LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint32),
    ]


class Cubin:
    def __init__(self, path: str) -> None:
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        with open(path, "rb") as file:
            self.image = file.read()
        self.module = ctypes.c_void_p()
        check(cuda.cuModuleLoadData(ctypes.byref(self.module), self.image), path)

    def __getitem__(self, name: str) -> Function:
        function = ctypes.c_void_p()
        code = cuda.cuModuleGetFunction(ctypes.byref(function), self.module, name.encode())
        check(code, name)
        return Function(name, function)


class Function:
    def __init__(self, name: str, function: ctypes.c_void_p) -> None:
        self.name = name
        self.function = function

    def allow_shared(self, size: int) -> None:
        check(cuda.cuFuncSetAttribute(self.function, 8, size), f"{self.name} shared {size}")
        check(cuda.cuFuncSetAttribute(self.function, 9, 100), f"{self.name} carve-out")

    def prepare(self, params, grid: int, block: int, shared=0, cluster=1, dependent=True):
        """Returns a function without arguments that launches on the current stream."""
        attributes = (Attribute * 2)()
        count = 0
        if dependent:
            attributes[count].id = 6
            attributes[count].value[0] = 1
            count += 1
        if cluster > 1:
            attributes[count].id = 4
            attributes[count].value[0:3] = [cluster, 1, 1]
            count += 1
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        config = LaunchConfig()
        config.grid[:] = [grid, 1, 1]
        config.block[:] = [block, 1, 1]
        config.shared = shared
        config.attributes = attributes
        config.count = count
        launch, name = cuda.cuLaunchKernelEx, self.name
        pointer, function = ctypes.byref(config), self.function

        def run(keep=(params, attributes, config)) -> None:
            config.stream = torch.cuda.current_stream().cuda_stream
            check(launch(pointer, function, arguments, None), f"launch {name}")

        return run
