"""What arrives at the driver for every kind of argument."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import struct
import weakref

import numpy
import pytest
import torch

import torch_cubin


def launched(driver) -> dict:
    (launch,) = driver.launches()
    return launch


def address(tensor: torch.Tensor) -> str:
    return tensor.data_ptr().to_bytes(8, "little").hex()


def test_three_tensors_and_an_int(driver, vec_add):
    x, y, z = (torch.zeros(64) for _ in range(3))
    vec_add(x, y, z, 64, grid=1, block=64)
    launch = launched(driver)
    assert launch == {
        "kernel": "vec_add",
        "grid": [1, 1, 1],
        "block": [64, 1, 1],
        "shared": 0,
        "stream": 0x5000,
        "device": 0,
        "attributes": {},
        "params": [address(x), address(y), address(z), "40000000"],
    }


def test_keywords_in_any_order_and_combination(driver, vec_add):
    # The extension remembers the last call's keywords: no call may be read by another one's.
    x = torch.zeros(4)
    values = {"grid": (2, 3), "block": 32, "shared_memory": 64, "stream": None}
    for count in (2, 3, 4):
        for names in itertools.permutations(values, count):
            if not {"grid", "block"} <= set(names):
                continue
            keywords = {name: values[name] for name in names}
            with pytest.raises(TypeError, match="other"):
                vec_add(x, x, x, 4, **{**dict.fromkeys(reversed(names), 1), "other": 1})
            for _ in range(2):
                driver.reset()
                vec_add(x, x, x, 4, **keywords)
                launch = launched(driver)
                assert (launch["grid"], launch["block"]) == ([2, 3, 1], [32, 1, 1])
                assert launch["shared"] == (64 if "shared_memory" in names else 0)


def test_keywords_whose_names_run_code(driver, vec_add):
    x = torch.zeros(4)

    class Name(str):
        def __del__(self):
            vec_add(x, x, x, 4, block=32, grid=2, shared_memory=0)

    vec_add(x, x, x, 4, **{Name("grid"): 2, "block": 32})
    for _ in range(3):
        driver.reset()
        vec_add(x, x, x, 4, grid=5, block=64)
        shapes = {(launch["grid"][0], launch["block"][0]) for launch in driver.launches()}
        assert (5, 64) in shapes
        assert shapes <= {(5, 64), (2, 32)}
    name = Name("grid")
    vec_add(x, x, x, 4, **{name: 2, "block": 32})
    gone = weakref.ref(name)
    del name
    assert gone() is None, "the kernel keeps a name that is not its own"


def test_every_launch_keyword(driver, vec_add):
    x = torch.zeros(4)
    vec_add(
        *(x, x, x, 4),
        grid=(4, 2, 3),
        block=[32, 4],
        shared_memory=100,
        cluster=(2, 1, 1),
        cooperative=True,
        programmatic_dependent_launch=True,
        priority=-3,
        stream=0x77,
    )
    launch = launched(driver)
    assert launch["grid"] == [4, 2, 3]
    assert launch["block"] == [32, 4, 1]
    assert launch["shared"] == 100
    assert launch["stream"] == 0x77
    # cuda.h: cooperative 2, cluster 4, programmatic stream serialization 6, priority 8
    assert launch["attributes"] == {"2": [1], "4": [2, 1, 1], "6": [1], "8": [-3]}


def test_a_stream_that_pytorch_did_not_make_has_no_dependent_launch(driver, vec_add):
    """Twice each, since a launch after the first takes a shorter path."""
    x = torch.zeros(4)
    for external in (True, True, False, False):
        with driver.external_streams() if external else contextlib.nullcontext():
            vec_add(x, x, x, 4, grid=1, block=1, programmatic_dependent_launch=True)
    attributes = [launch["attributes"] for launch in driver.launches()]
    assert attributes == [{}, {}, {"6": [1]}, {"6": [1]}]


def test_a_compiled_cluster_is_not_passed_at_launch(driver, several):
    several["cluster"](torch.zeros(1), grid=4, block=1)
    several["cluster"](torch.zeros(1), grid=4, block=1, cluster=2)
    assert [launch["attributes"] for launch in driver.launches()] == [{}, {}]


@pytest.mark.parametrize("value", [0, 1, -1, 2**31 - 1, -(2**31), 2**32 - 1])
def test_ints_of_four_bytes(driver, vec_add, value):
    vec_add(torch.zeros(1), None, None, value, grid=1, block=1)
    assert launched(driver)["params"][3] == (value % 2**32).to_bytes(4, "little").hex()


@pytest.mark.parametrize("value", [0, 2**63 - 1, -(2**63), 2**64 - 1, 2**63])
def test_ints_of_eight_bytes(driver, vec_add, value):
    x = torch.zeros(1)
    vec_add(value, x, None, 0, grid=1, block=1)
    assert launched(driver)["params"][0] == (value % 2**64).to_bytes(8, "little").hex()


SMALL = [  # bool flag, char c, short h, double d, Empty e, float* out
    ((True, -128, -32768, 0.1, b"\0"), ("01", "80", "0080", struct.pack("<d", 0.1).hex(), "00")),
    ((False, 255, 65535, math.inf, b"\7"), ("00", "ff", "ffff", "000000000000f07f", "07")),
    (
        (torch_cubin.int8(-3), torch_cubin.uint8(200), torch_cubin.float16(1.5)),
        ("fd", "c8", "003e"),
    ),
    (
        (1, torch_cubin.uint8(0), torch_cubin.bfloat16(1.5), torch_cubin.float64(2)),
        ("01", "00", "c03f", "0000000000000040"),
    ),
    (
        (numpy.bool_(True), numpy.int8(-1), numpy.float16(1.5), numpy.float64(2)),
        ("01", "ff", "003e", "0000000000000040"),
    ),
    (
        (ctypes.c_bool(True), ctypes.c_byte(-1), ctypes.c_short(-2), ctypes.c_double(2)),
        ("01", "ff", "feff", "0000000000000040"),
    ),
    ((True, True, True, 7), ("01", "01", "0100", "0700000000000000")),
]


@pytest.mark.parametrize(("given", "expected"), SMALL)
def test_small_parameters(driver, several, given, expected):
    out = torch.zeros(1)
    given = given + (False, 0, 0, 0.0, b"\0")[len(given) :]
    several["small"](*given, out, grid=1, block=1)
    params = launched(driver)["params"]
    assert params[: len(expected)] == list(expected)
    assert params[5] == address(out)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.1, 3.4028234e38, math.inf, -math.inf, math.nan])
def test_floats_of_four_bytes(driver, vec_add, value):
    x = torch.zeros(1)
    vec_add(x, x, x, value, grid=1, block=1)
    vec_add(x, x, x, torch_cubin.float32(value), grid=1, block=1)
    for launch in driver.launches():
        assert launch["params"][3] == struct.pack("<f", value).hex()


def test_bfloat16_rounds_as_torch_does():
    generator = torch.Generator().manual_seed(1)
    values = (torch.randn(2000, generator=generator) * 10).double().tolist()
    values += [1.0 + 2**-8, 1.0 + 2**-8 + 2**-9, 1.0 + 3 * 2**-8, -0.0, 1e-40, math.inf, -math.inf]
    wanted = torch.tensor(values, dtype=torch.float64).to(torch.bfloat16).view(torch.int16).tolist()
    found = [int.from_bytes(torch_cubin.bfloat16(v).data, "little", signed=True) for v in values]
    assert found == wanted
    assert math.isnan(
        torch.frombuffer(bytearray(torch_cubin.bfloat16(math.nan).data), dtype=torch.bfloat16)
    )


class Three(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_int), ("c", ctypes.c_int)]


THREE = numpy.array([(1, 2, 3)], dtype=[("a", "i4"), ("b", "i4"), ("c", "i4")])


@pytest.mark.parametrize(
    "three", [Three(1, 2, 3), THREE[0], struct.pack("<3i", 1, 2, 3), bytearray(THREE.tobytes())]
)
def test_structs_by_value(driver, several, three):
    descriptor = bytes(range(128))
    several["structs"](5, three, descriptor, torch.zeros(1), grid=1, block=1)
    params = launched(driver)["params"]
    assert params[0] == "05000000"
    assert params[1] == "010000000200000003000000"
    assert params[2] == descriptor.hex()


PARAMS = """
struct Params {
  struct { const float* x; long stride; } in[2];
  float* out = nullptr;
  CUtensorMap* none;
  int n = 7;
  unsigned mode : 3, rest : 29;
  __half scale;
  unsigned long bits;
  union { double d; int i; };
  char unused[48];
};
"""


def test_a_struct_of_tensors_and_numbers(driver, several):
    params = torch_cubin.c_struct(PARAMS, "Params")
    assert params.size == 128
    x, y = torch.zeros(4), torch.zeros(8)
    three = torch_cubin.struct(Three, a=1, b=2, c=3)
    made = params(**{"in": [{"x": x, "stride": -2}, {}], "out": torch_cubin.strided(y[::2]),
                     "mode": 5, "scale": 0.5, "bits": 2**64 - 1, "i": -3})  # fmt: skip
    for _ in range(2):
        several["structs"](5, three, made, x, grid=1, block=1)
    first, second = (launch["params"] for launch in driver.launches())
    assert first == second
    assert first[1] == "010000000200000003000000"
    data = bytes.fromhex(first[2])
    assert data[:80] == struct.pack(
        "<QqQqQQiIe6xQi4x", x.data_ptr(), -2, 0, 0, y.data_ptr(), 0, 7, 5, 0.5, 2**64 - 1, -3
    )
    assert data[80:] == bytes(48)


def test_a_tensor_map_in_a_struct(driver, several):
    tensor = torch.zeros(32, 64, dtype=torch.bfloat16)
    map = torch_cubin.TensorMap(tensor, (8, 64), swizzle="128B")
    params = torch_cubin.c_struct("struct P { CUtensorMap m; };", "P")
    several["structs"](5, bytes(12), params(m=map), tensor, grid=1, block=1)
    several["structs"](5, bytes(12), map, tensor, grid=1, block=1)
    first, second = (launch["params"][2] for launch in driver.launches())
    assert first == second != bytes(128).hex()


def test_a_wrong_struct_is_not_launched(driver, several):
    small = torch_cubin.c_struct("struct P { int a; float* x; };", "P")
    params = torch_cubin.c_struct(PARAMS, "Params")
    three = torch_cubin.struct(Three, a=1, b=2, c=3)
    x = torch.zeros(4)
    on_meta = torch.zeros(4, device="meta")
    for second, third, error, says in (
        (three, small(x=x), torch_cubin.errors.ParamsError, "expected 128 bytes.*'P'"),
        (small(a=1), params(), torch_cubin.errors.ParamsError, "expected 12 bytes"),
        (three, params(out=on_meta), torch_cubin.errors.InputError, "field 'out' of argument 2"),
        (three, params(out=torch.zeros(4, 4).t()), torch_cubin.errors.InputError, "contiguous"),
        (three, params(n=2**31), torch_cubin.errors.ParamsError, "does not hold this value"),
    ):
        with pytest.raises(error, match=says):
            several["structs"](5, second, third, x, grid=1, block=1)
    with pytest.raises(torch_cubin.errors.InputError, match="expected pointer"):
        params(out=1.0)
    assert not driver.launches()


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({}, 0),
        ({"address": 8}, 1),
        ({"dims": (64, 0)}, 1),
        ({"strides": (136,)}, 1),
        ({"strides": (1 << 40,)}, 1),
        ({"box": (72, 8)}, 1),  # wider than the swizzle
        ({"box": (60, 8)}, 1),
        ({"box": (64, 257)}, 1),
        ({"steps": (1, 9)}, 1),
    ],
)
def test_the_stand_in_refuses_tensor_maps_as_a_driver_does(wrong: dict, code: int) -> None:
    """Each test of a launch would else pass with a map that fails on a GPU."""
    given = {"address": 0, "dims": (64, 32), "strides": (128,), "box": (64, 8), "steps": (1, 1)}
    given |= wrong
    memory = (ctypes.c_char * 256)()
    map_ = ctypes.addressof(memory) + 63 & ~63
    wide = [(ctypes.c_uint64 * 2)(*given[name]) for name in ("dims", "strides")]
    narrow = [(ctypes.c_uint32 * 2)(*given[name]) for name in ("box", "steps")]
    found = ctypes.c_void_p()
    find = ctypes.CDLL("libcuda.so.1").cuGetProcAddress_v2
    assert (
        find(b"cuTensorMapEncodeTiled", ctypes.byref(found), 12000, ctypes.c_uint64(0), None) == 0
    )
    encode = ctypes.CFUNCTYPE(ctypes.c_int)(found.value)
    bfloat16, rank, swizzle_128_bytes = 9, 2, 3
    address = ctypes.c_void_p((1 << 20) + given["address"])
    last = 0, swizzle_128_bytes, 0, 0  # interleave, swizzle, promotion, fill
    assert encode(ctypes.c_void_p(map_), bfloat16, rank, address, *wide, *narrow, *last) == code


def test_a_tensor_map_goes_by_value(driver, several):
    tensor = torch.zeros(6, 40, 64, dtype=torch.bfloat16)
    map = torch_cubin.TensorMap(
        tensor[:, :32], (1, 8, 64), swizzle="128B", oob_fill="nan", element_strides=(1, 2, 1)
    )
    out = torch.zeros(1)
    for _ in range(2):
        several["structs"](5, bytes(12), map, out, grid=1, block=1)
    assert driver.calls("cuTensorMapEncodeTiled") == 1
    first, second = (bytes.fromhex(launch["params"][2]) for launch in driver.launches())
    assert first == second
    words = struct.unpack("<16Q", first)
    assert words[0] == tensor.data_ptr()
    assert words[1] == 9 | 3 << 8 | 0 << 16 | 3 << 24 | 2 << 32 | 1 << 40
    assert words[2:5] == (64, 32, 6)
    assert words[7:9] == (64 * 2, 40 * 64 * 2)
    assert struct.unpack("<3H", first[88:94]) == (64, 8, 1)
    assert struct.unpack("<3H", first[104:110]) == (1, 2, 1)


@pytest.mark.parametrize("in_struct", [False, True])
def test_a_tensor_map_of_memory_that_its_tensor_no_longer_has(
    driver, several, in_struct: bool
) -> None:
    """Kernels would read what the allocator has given to another tensor since."""
    params = torch_cubin.c_struct("struct P { CUtensorMap m; };", "P")
    out = torch.zeros(1)
    changes = {
        "other memory": lambda x: setattr(x, "data", torch.ones(8, 64)),
        "other strides": lambda x: setattr(x, "data", x.data.as_strided((8, 64), (128, 1))),
        "other sizes": lambda x: x.resize_(4, 64),
    }
    for change in changes.values():
        tensor = torch.zeros(16, 64)[:8]
        map = torch_cubin.TensorMap(tensor, (8, 64), swizzle=None)
        argument = params(m=map) if in_struct else map
        several["structs"](5, bytes(12), argument, out, grid=1, block=1)
        driver.reset()
        change(tensor)
        with pytest.raises(torch_cubin.errors.InputError, match="changed since it was made"):
            several["structs"](5, bytes(12), argument, out, grid=1, block=1)
        assert driver.launches() == []


def test_strided_tensors_give_their_address(driver, vec_add):
    x = torch.zeros(8, 8)
    odd = x[1:, 3]
    vec_add(torch_cubin.strided(odd), torch_cubin.strided(x.t()), x, 4, grid=1, block=1)
    assert launched(driver)["params"][:2] == [address(odd), address(x)]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0),
        torch.zeros(3, 0, 5),
        torch.zeros(()),
        torch.zeros(1, 5).as_strided((1, 5), (77, 1)),
        torch.nn.Parameter(torch.zeros(3)),
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3, dtype=torch.float8_e4m3fn),
        torch.zeros(3, dtype=torch.bool),
        torch.zeros(5)[2:],
        torch.zeros(3, requires_grad=True),
    ],
    ids=[
        "empty",
        "empty_3d",
        "0d",
        "size_1",
        "parameter",
        "complex",
        "fp8",
        "bool",
        "offset",
        "grad",
    ],
)
def test_tensors_of_every_kind(driver, vec_add, tensor):
    y = torch.zeros(1)
    vec_add(tensor, y, y, 1, grid=1, block=1)
    assert launched(driver)["params"][0] == address(tensor)


class Array:
    """What CuPy and Numba arrays show."""

    def __init__(self, shape, strides=None, device=1):
        self.__cuda_array_interface__ = {
            "data": ((device + 1 << 40) + 64, False),
            "shape": shape,
            "strides": strides,
            "typestr": "<f4",
            "version": 3,
        }


def test_arrays_of_other_libraries(driver, vec_add):
    arrays = [Array((4, 3)), Array((4, 3), (12, 4)), torch_cubin.strided(Array((4, 3), (4, 16)))]
    vec_add(*arrays, 4, grid=1, block=1)
    launch = launched(driver)
    assert launch["params"][:3] == [(2 * 2**40 + 64).to_bytes(8, "little").hex()] * 3
    assert launch["device"] == 1
    assert launch["stream"] == 0x5001


class Stream:
    cuda_stream = 0x99
    device_index = 1


class Core:
    def __cuda_stream__(self):
        return (0, 0x98)


@pytest.mark.parametrize(("stream", "handle"), [(Stream(), 0x99), (Core(), 0x98), (0, 0), (7, 7)])
def test_streams(driver, vec_add, stream, handle):
    array = Array((4,))
    vec_add(array, array, array, 4, grid=1, block=1, stream=stream)
    assert launched(driver)["stream"] == handle


def test_a_kernel_without_tensors_goes_to_the_current_device(driver, vec_add, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    vec_add(None, None, None, 4, grid=1, block=1)
    assert launched(driver)["device"] == 1
    assert launched(driver)["stream"] == 0x5001


def test_a_kernel_without_parameters(driver, several, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    several["no_params"](grid=2, block=32)
    assert launched(driver)["params"] == []
