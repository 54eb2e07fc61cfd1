"""Constants of a contract that can never be launched are refused when the op is defined.

No GPU and no driver: a definition reads the images alone.
"""

from __future__ import annotations

import json

import contracts
import elf_builder
import pytest
from contracts import changed, define, vec_add
from declared import DECLARED, LAUNCH, VEC_ADD, schema

import torch_cubin
from torch_cubin import errors

N = ["numel", "x"]
FLAGS = 0x06000004  # of an ELF header, without the arch
REQUIRED, MAX, CLUSTER = 0x10, 0x05, 0x3D


def image(sm: int, **triples: tuple[int, int, int]) -> bytes:
    """A cubin with vec_add, whose binary demands that block or cluster, or bounds its block."""
    info = b"".join(elf_builder.param(i, 8 * i, 8) for i in range(3)) + elf_builder.param(3, 24, 4)
    info += elf_builder.value(0x19, 28)
    for name, (x, y, z) in triples.items():
        record = {"required": REQUIRED, "bound": MAX, "cluster": CLUSTER}[name]
        info += elf_builder.attribute(
            record, b"".join(size.to_bytes(4, "little") for size in (x, y, z))
        )
    kernel = elf_builder.Kernel("vec_add", info)
    return elf_builder.Cubin(kernels=[kernel], flags=FLAGS | sm << 8).build()


WRONG = [
    ("grid", [0, 1, 1], "1 to 2147483647 blocks in x"),
    ("grid", [N, 0, 1], "1 to 65535 blocks in y, got (x.numel, 0, 1)"),
    ("grid", [-1, 1, 1], "blocks in x"),
    ("grid", [2**31, 1, 1], "blocks in x"),
    ("grid", [1, 65536, 1], "1 to 65535 blocks in y"),
    ("grid", [1, 1, 65536], "1 to 65535 blocks in z"),
    ("block", [0, 1, 1], "1 to 1024 threads in x"),
    ("block", [1025, 1, 1], "1 to 1024 threads in x, got (1025, 1, 1)"),
    ("block", [1, 1, 65], "1 to 64 threads in z"),
    ("block", [64, 32, 1], "at most 1024 threads in all, got (64, 32, 1)"),
    ("block", [64, N, 32], "at most 1024 threads in all"),
    ("cluster", [0, 1, 1], "1 to 16 blocks in x"),
    ("cluster", [17, 1, 1], "1 to 16 blocks in x"),
    ("cluster", [4, 4, 2], "at most 16 blocks in all"),
    ("shared_memory", -1, "0 to 232448 bytes"),
    ("shared_memory", 232449, "0 to 232448 bytes"),
]


@pytest.mark.fault_case(20, 21)
@pytest.mark.parametrize(("field", "value", "says"), WRONG, ids=str)
def test_launches_that_no_gpu_allows_are_refused_in_definitions(
    field: str, value, says: str
) -> None:
    with pytest.raises(errors.InputError) as caught:
        define(changed(vec_add(), f"kernels/0/{field}", value))
    assert f"kernels[0].{field} can never be launched: " in str(caught.value)
    assert says in str(caught.value)


RIGHT = [
    ("grid", [2**31 - 1, 65535, 65535]),
    ("grid", [["mul", 0, N], 1, 1]),  # an empty tensor's grid is known at the call alone
    ("block", [1024, 1, 1]),
    ("block", [4, 4, 64]),
    ("block", [64, N, 16]),
    ("cluster", [1, 1, 1]),
    ("shared_memory", 232448),
    ("shared_memory", N),
]


@pytest.mark.parametrize(("field", "value"), RIGHT, ids=str)
def test_launches_that_some_gpu_allows_are_accepted_in_definitions(field: str, value) -> None:
    define(changed(vec_add(), f"kernels/0/{field}", value))


@pytest.mark.fault_case(22)
@pytest.mark.parametrize(
    ("sm", "most"),
    [((70,), 96), ((80,), 163), ((89,), 163), ((90,), 227), ((100,), 227), ((120,), 99),
     ((80, 90), 227), ((120, 80), 163)],
)  # fmt: skip
def test_shared_memory_by_arch(sm: tuple[int, ...], most: int) -> None:
    contract = vec_add()
    contract["kernels"][0]["images"] = list(range(len(sm)))
    files = [image(one) for one in sm]
    define(changed(contract, "kernels/0/shared_memory", most * 1024), files=files)
    with pytest.raises(errors.InputError, match=f"0 to {most * 1024} bytes"):
        define(changed(contract, "kernels/0/shared_memory", most * 1024 + 1), files=files)


def test_shared_memory_that_a_definition_forgets() -> None:
    """`reverse` has an `extern __shared__` array and no other: its code tells, without a GPU."""
    contract = vec_add()
    contract["kernels"][0].update(
        kernel="reverse", args=[["pointer", "x"], ["pointer", "out"], ["int32", N]]
    )
    with pytest.raises(
        errors.ParamsError, match=r"kernels\[0\].shared_memory is 0, and the kernel"
    ):
        define(contract, files=(LAUNCH,))
    define(changed(contract, "kernels/0/shared_memory", ["mul", 4, N]), files=(LAUNCH,))


PTX = """.version 8.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 dynamic[];
.shared .align 4 .b8 fixed[64];
.func helper() { .reg .u32 r; mov.u32 r, dynamic; ret; }
.visible .entry forgotten(.param .u64 out) { .reg .u32 r; { mov.u32 r, dynamic; } ret; }
.visible .entry beside_its_own(.param .u64 out) {
  .shared .align 4 .b8 inner[64];
  .reg .u32 r; mov.u32 r, dynamic; ret; }
.visible .entry beside_the_file_s(.param .u64 out) {
  .reg .u32 r; mov.u32 r, dynamic; mov.u32 r, fixed; ret; }
.visible .entry without(.param .u64 out) { ret; }
"""


@pytest.mark.parametrize("kernel", ["forgotten", "beside_its_own", "beside_the_file_s", "without"])
def test_shared_memory_that_a_definition_of_ptx_forgets(kernel: str) -> None:
    """As of a cubin: refused where the kernel's body names dynamic shared memory and no other."""

    def define(bytes_: int) -> None:
        torch_cubin.define_op(
            schema("f(Tensor x) -> Tensor"), kernel=(PTX.encode(), kernel), jit=True,
            tensors={"x": "float32[*s]", "out": "float32[*s]"}, args=lambda out: (out,), grid=1,
            block=32, shared_memory=bytes_,
        )  # fmt: skip

    define(64)
    if kernel != "forgotten":
        return define(0)
    with pytest.raises(errors.ParamsError, match=r"kernels\[0\].shared_memory .* is 0, and"):
        define(0)


def test_static_shared_memory_counts() -> None:
    contract = vec_add()
    contract["kernels"][0].update(
        kernel="static_shared", args=[["pointer", "out"]], block=[128, 1, 1]
    )
    define(changed(contract, "kernels/0/shared_memory", 232448 - 1024))
    with pytest.raises(errors.InputError, match="0 to 231424 bytes"):
        define(changed(contract, "kernels/0/shared_memory", 232448 - 1023))


def test_launches_that_the_binary_excludes_are_refused_in_definitions() -> None:
    for facts, field, value, says in (
        ({"required": (64, 2, 1)}, "block", [64, 1, 1], "expected (64, 2, 1) for sm_90"),
        ({"required": (64, 2, 1)}, "block", [N, 1, 1], "got (x.numel, 1, 1)"),
        ({"bound": (64, 2, 1)}, "block", [129, 1, 1], "at most 128 threads (__launch_bounds__)"),
        ({"cluster": (2, 1, 1)}, "cluster", [4, 1, 1], "expected (2, 1, 1) for sm_90"),
    ):
        contract = changed(vec_add(), "kernels/0/grid", [8, 1, 1])
        with pytest.raises(errors.ParamsError) as caught:
            define(changed(contract, f"kernels/0/{field}", value), files=[image(90, **facts)])
        assert says in str(caught.value)
    contract = changed(vec_add(), "kernels/0/grid", [N, 3, 1])
    for files, cluster in (([image(90, cluster=(1, 2, 1))], None), ([image(90)], [1, 2, 1])):
        with pytest.raises(errors.InputError, match="a multiple of 2 blocks in y"):
            define(changed(contract, "kernels/0/cluster", cluster), files=files)


def both(**changes) -> dict:
    contract = vec_add()
    contract["kernels"][0].update({"images": [0, 1], "grid": [8, 1, 1], **changes})
    return contract


def test_images_that_disagree() -> None:
    """What a constant cannot be for all of them; the error names two."""
    files = [image(80, required=(128, 1, 1)), image(90, required=(256, 1, 1))]
    with pytest.raises(errors.ParamsError) as caught:
        define(both(), files=files)
    assert "(128, 1, 1) for sm_80 and (256, 1, 1) for sm_90, got (256, 1, 1)" in str(caught.value)
    with pytest.raises(errors.ParamsError) as caught:
        define(both(block=[128, 1, 1]), files=files)
    assert "(256, 1, 1) for sm_90 and (128, 1, 1) for sm_80, got (128, 1, 1)" in str(caught.value)
    files = [image(90, cluster=(2, 1, 1)), image(100, cluster=(4, 1, 1))]
    with pytest.raises(errors.ParamsError, match="sm_100 and .* for sm_90,"):
        define(both(cluster=[2, 1, 1]), files=files)
    define(both(), files=files)  # each image's own, and the grid is whole clusters of either
    with pytest.raises(errors.InputError, match="a multiple of 4 blocks in x"):
        define(both(grid=[6, 1, 1]), files=files)


def test_an_omitted_block() -> None:
    def op(*images: bytes) -> torch_cubin.Op:
        text = schema("f(Tensor x, Tensor y) -> Tensor")
        kernel = (list(images), "vec_add")
        return torch_cubin.define_op(text, **{**VEC_ADD, "kernel": kernel, "block": None})

    free, small, large = image(80), image(90, required=(64, 1, 1)), image(100, required=(96, 1, 1))
    assert op(free, small).contract["kernels"][0]["block"] == [64, 1, 1]
    with pytest.raises(errors.InputError, match="demands none"):
        op(free)
    with pytest.raises(errors.ParamsError) as caught:
        op(small, large)
    assert "(64, 1, 1) for sm_90 and (96, 1, 1) for sm_100" in str(caught.value)


def test_a_damaged_cluster() -> None:
    """The binary's record may say anything, 0 too: launches of it are refused."""
    contract = changed(vec_add(), "kernels/0/grid", [4, 4, 1])
    define(contract, files=[image(90, cluster=(2, 0, 1))])


def test_define_op() -> None:
    text = schema("f(Tensor x, Tensor y) -> Tensor")
    for changes, says in (
        ({"block": 2048}, "kernels[0].block (kernel 'vec_add') can never be launched"),
        ({"block": lambda: (1, 1, 65)}, f"kernels[0].block ({__file__}:"),
        ({"grid": 0}, "kernels[0].grid (kernel 'vec_add') can never be launched"),
        ({"grid": (1, 1 << 16)}, "1 to 65535 blocks in y"),
        ({"shared_memory": 1 << 20}, "shared_memory (kernel 'vec_add') can never be launched"),
    ):
        with pytest.raises(errors.InputError) as caught:
            torch_cubin.define_op(text, **{**VEC_ADD, **changes})
        assert says in str(caught.value)
    with pytest.raises(errors.ParamsError, match="expected \\(64, 1, 1\\) for sm_90a"):
        torch_cubin.define_op(
            schema("f(Tensor x) -> Tensor"),
            kernel=(DECLARED, "fill_64"),
            tensors={"x": "float32[*s]", "out": "float32[*s]"},
            args=lambda x, out: (out, torch_cubin.int32(x.numel())),
            grid=1,
            block=32,
        )


def test_load_package(tmp_path) -> None:
    contract = changed(vec_add(), "kernels/0/block", [32, 32, 2])
    folder = contracts.write_package(tmp_path / "package", contract, files=[LAUNCH])
    with pytest.raises(errors.InputError, match="at most 1024 threads in all"):
        torch_cubin.load_package(folder)
    assert json.loads((folder / "manifest.json").read_text())["version"] == 1
