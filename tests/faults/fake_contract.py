"""Calls of declared ops: checks and allocations."""

from __future__ import annotations

import itertools
import random

import contracts
import pytest
import torch
from contract_calls import integer, op_of, pointer, refused, shapes_op
from contracts import changed, new_name
from fake_driver import tensors
from faults.forked import error_of

from torch_cubin import errors

pytestmark = pytest.mark.usefixtures("declared")


def test_a_call(driver):
    op = op_of(contracts.vec_add())
    x, y = tensors.empty(1000), tensors.empty(1000)
    out = op(x, y)
    assert (out.shape, out.stride(), out.dtype) == ((1000,), (1,), torch.float32)
    assert str(out.device) == "cuda:0"
    (launch,) = driver.launches()
    assert (launch["kernel"], launch["grid"], launch["block"]) == (
        "vec_add",
        [4, 1, 1],
        [256, 1, 1],
    )
    assert launch["stream"] == 0x5000
    assert [pointer(launch, i) for i in range(3)] == [x.data_ptr(), y.data_ptr(), out.data_ptr()]
    assert integer(launch, 3) == 1000


def test_later_calls_make_no_other_driver_calls(driver):
    op = op_of(contracts.vec_add())
    x = tensors.empty(5)
    op(x, x)
    driver.reset()
    op(x, x)
    assert driver.journal() == ["cuStreamIsCapturing", "cuLaunchKernelEx"]


@pytest.mark.fault_case(37)
def test_the_tensors_device_and_stream(driver):
    op = op_of(contracts.vec_add())
    x = tensors.empty(5, device=1)
    assert op(x, x).device.index == 1
    (launch,) = driver.launches()
    assert (launch["device"], launch["stream"]) == (1, 0x5001)


def test_calls_that_violate_the_contract_are_refused(driver):
    op = op_of(contracts.vec_add())
    good = tensors.empty(4, 4)
    refused(op, good, tensors.empty(4, 5), match="*s = (4, 4)")
    refused(op, good, tensors.empty(4), match="shape (4,)")
    refused(
        op, good, tensors.empty(4, 4, dtype=torch.float16), match="expected float32, got float16"
    )
    refused(op, good, tensors.empty(4, 4, device=1), match="expected cuda:0, got cuda:1")
    refused(op, good, torch.zeros(4, 4), match="got cpu")
    refused(op, torch.zeros(4, 4), good, match="got cpu")
    refused(op, tensors.strided((4, 4), (1, 4)), good, match="strides (1, 4)")
    refused(op, tensors.strided((4, 4), (4, 1), offset=1), good, match="4 bytes past one")
    refused(op, tensors.empty(4, 4, dtype=torch.quint8), good, match="got quint8")
    assert driver.launches() == []
    op(good, good)


LAYOUTS = {
    # what layout takes (size, stride)
    "contiguous": [((2, 3), (3, 1)), ((1, 3), (77, 1)), ((2, 0), (5, 5)), ((), ()), ((5,), (1,))],
    "rows": [((2, 3), (8, 1)), ((2, 3), (0, 1)), ((2, 1), (4, 9)), ((), ())],
    "dense": [((2, 3), (1, 2)), ((4, 2, 3), (3, 12, 1)), ((3, 1), (1, 50)), ((2, 3), (3, 1))],
    "strided": [((2, 3), (0, 0)), ((2, 3), (7, 2)), ((2, 3), (3, 1))],
}
NOT = {
    "contiguous": [((2, 3), (1, 2)), ((2, 3), (4, 1)), ((2,), (2,))],
    "rows": [((2, 3), (1, 2)), ((3,), (2,))],
    "dense": [((2, 3), (4, 1)), ((2, 3), (0, 1)), ((2, 3), (1, 1)), ((2, 2), (1, 3))],
    "strided": [],
}


@pytest.mark.fault_case(39)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(driver, layout):
    contract = changed(contracts.vec_add(), "tensors/x/layout", layout)
    contract = changed(contract, "tensors/out/shape", [1])
    contract["tensors"]["y"]["shape"] = None
    contract["kernels"][0]["grid"] = [1, 1, 1]
    op = op_of(contract)
    y = tensors.empty(1)
    for size, stride in LAYOUTS[layout]:
        op(tensors.strided(size, stride), y)
    for size, stride in NOT[layout]:
        refused(op, tensors.strided(size, stride), y, match="argument 'x'")


def test_is_contiguous_and_dense_are_pytorchs(driver):
    """On every small layout, what the op takes is what torch calls so."""
    ops = {}
    for layout in ("contiguous", "dense"):
        contract = changed(contracts.vec_add(), "tensors/x/layout", layout)
        contract["kernels"][0]["grid"] = [1, 1, 1]
        contract["tensors"]["y"]["shape"] = None
        contract["tensors"]["out"]["shape"] = [1]
        ops[layout] = op_of(contract)
    y = tensors.empty(1)
    for size in itertools.product((1, 2, 3), repeat=3):
        for stride in itertools.product((1, 2, 3, 4, 6), repeat=3):
            x = tensors.strided(size, stride)
            meta = torch.empty_strided(size, stride, device="meta")
            dense = torch.ops.aten.is_non_overlapping_and_dense(meta)
            for layout, want in (("contiguous", meta.is_contiguous()), ("dense", dense)):
                try:
                    ops[layout](x, y)
                    got = True
                except RuntimeError:
                    got = False
                assert got == want, (size, stride, layout)


def test_alignment(driver):
    for align, right, wrong in ((4, 1, None), (8, 2, 1), (64, 16, 8)):
        op = op_of(changed(contracts.vec_add(), "tensors/x/align", align))
        y = tensors.empty(3)
        op(tensors.strided((3,), (1,), offset=right), y)
        op(tensors.strided((0,), (1,), offset=1), tensors.empty(0))
        if wrong is not None:
            refused(op, tensors.strided((3,), (1,), offset=wrong), y, match=f"multiple of {align}")


def test_sizes_bind_and_agree(driver):
    op = shapes_op(
        "(Tensor a, Tensor b) -> (Tensor out, Tensor sums)",
        {"a": ["*batch", "m", "k"], "b": ["k", "n"], "out": ["*batch", "m", "n"],
         "sums": [["add", ["number", "m"], ["mul", 2, ["number", "n"]]], 7]},
        ["out", "sums"],
    )  # fmt: skip
    for batch in ((), (5,), (2, 3), (0, 4)):
        out, sums = op(tensors.empty(*batch, 6, 8), tensors.empty(8, 9))
        assert out.shape == (*batch, 6, 9)
        assert out.is_contiguous()
        assert sums.shape == (24, 7)
    refused(op, tensors.empty(6, 8), tensors.empty(7, 9), match="8 (k) in shape (k, n), got 7")
    refused(op, tensors.empty(8), tensors.empty(8, 9), match="at least 2, shape (*batch, m, k)")


def test_a_group_in_the_middle(driver):
    op = shapes_op(
        "(Tensor a, Tensor b) -> Tensor", {"a": ["m", "*s", 4], "b": ["*s"], "out": ["*s", "m"]},
        ["out"],
    )  # fmt: skip
    assert op(tensors.empty(3, 5, 6, 4), tensors.empty(5, 6)).shape == (5, 6, 3)
    assert op(tensors.empty(3, 4), tensors.empty()).shape == (3,)
    refused(op, tensors.empty(3, 5, 5), tensors.empty(5), match="wrong size in dim 2")


def test_sizes_that_are_expressions_or_numbers(driver):
    op = shapes_op(
        "(Tensor w, Tensor x, int n) -> Tensor",
        {"w": [["mul", 3, ["number", "k"]]], "x": ["k", "n"], "out": ["n", "k"]},
        ["out"],
    )
    assert op(tensors.empty(12), tensors.empty(4, 5), 5).shape == (5, 4)
    refused(op, tensors.empty(13), tensors.empty(4, 5), 5, match="12 ((3 * k))")
    refused(op, tensors.empty(12), tensors.empty(4, 5), 6, match="6 (n)")


def test_negative_and_huge_outputs(driver):
    op = shapes_op("(Tensor x, int n) -> Tensor", {"x": None, "out": ["n"]}, ["out"])
    x = tensors.empty(3)
    assert op(x, 0).shape == (0,)
    refused(op, x, -1, match="negative size in dim 0, 'n'")
    refused(op, x, 2**62, match="too large")


def test_like(driver):
    entries = {
        "x": {"dtype": "float32", "shape": ["*s"], "layout": "dense"},
        "out": {"dtype": "float16", "like": "x"},
    }
    op = shapes_op("(Tensor x) -> Tensor", entries, ["out"])
    for size, stride in (((2, 3, 4), (1, 8, 2)), ((2, 3), (3, 1)), ((2, 1), (1, 9)), ((), ())):
        x = tensors.strided(size, stride)
        out = op(x)
        assert (out.shape, out.stride(), out.dtype) == (x.shape, x.stride(), torch.float16)


def test_dtype_variables(driver):
    contract = contracts.vec_add()
    contract["dtypes"] = {"T": ["float16", "bfloat16"]}
    for name in ("x", "y", "out"):
        contract["tensors"][name]["dtype"] = "T"
    contract["kernels"].append(changed(contract["kernels"][0], "block", [64, 1, 1]))
    contract["kernels"][0]["when"] = ["is_dtype", "x", "float16"]
    op = op_of(contract)
    half, brain = tensors.empty(3, dtype=torch.float16), tensors.empty(3, dtype=torch.bfloat16)
    assert op(half, half).dtype is torch.float16
    assert op(brain, brain).dtype is torch.bfloat16
    assert [launch["block"][0] for launch in driver.launches()] == [256, 64]
    refused(op, half, brain, match="expected float16 (T), got bfloat16")
    refused(op, tensors.empty(3), half, match="expected float16, bfloat16, got float32")


def test_every_dtype_can_be_an_output(driver):
    names = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32"]
    names += ["float64", "complex64", "complex128", "uint16", "uint32", "uint64", "float8_e4m3fn"]
    names += ["float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "complex32"]
    for name in names:
        op = shapes_op(
            "(Tensor x) -> Tensor", {"x": None, "out": {"dtype": name, "shape": [3]}}, ["out"]
        )
        assert str(op(tensors.empty(1)).dtype) == f"torch.{name}"


def test_no_kernel_for_the_arguments(driver):
    contract = changed(contracts.vec_add(), "kernels/0/when", ["lt", ["numel", "x"], 10])
    op = op_of(contract)
    op(tensors.empty(9), tensors.empty(9))
    refused(op, tensors.empty(10), tensors.empty(10), match="expected (x.numel < 10)")


def test_optional_tensors(driver):
    contract = contracts.vec_add()
    contract["schema"] = new_name() + "(Tensor x, Tensor? y=None) -> Tensor"
    contract["tensors"]["y"]["shape"] = ["*s"]
    contract["kernels"][0]["args"][3] = ["int32", ["select", ["defined", "y"], ["numel", "y"], -5]]
    op = op_of(contract)
    x = tensors.empty(8)
    op(x)
    op(x, None)
    op(x, x)
    first, second, third = driver.launches()
    assert pointer(first, 1) == pointer(second, 1) == 0
    assert integer(first, 3) == -5
    assert (pointer(third, 1), integer(third, 3)) == (x.data_ptr(), 8)
    refused(op, x, tensors.empty(9), match="argument 'y'")


def test_the_names_of_optional_tensors_are_their_own(driver):
    op = shapes_op(
        "(Tensor x, Tensor? y=None, Tensor? z=None) -> Tensor",
        {"x": ["m"], "y": ["k", "k", ["add", ["number", "k"], ["number", "m"]]], "z": ["k"],
         "out": ["m"]},
        ["out"],
    )  # fmt: skip
    op(tensors.empty(3), tensors.empty(2, 2, 5), tensors.empty(7))
    refused(op, tensors.empty(3), tensors.empty(2, 3, 5), match="2 (k)")
    refused(op, tensors.empty(3), tensors.empty(2, 2, 6), match="5 ((k + m))")


def test_only_optional_tensors(driver):
    op = shapes_op("(Tensor? x) -> Tensor", {"x": ["n"], "out": [3]}, ["out"])
    assert op(tensors.empty(5)).shape == (3,)


def test_no_elements_and_empty_grids(driver):
    op = op_of(contracts.vec_add())
    empty = tensors.empty(0, 4)
    assert op(empty, empty).shape == (0, 4)
    assert driver.launches() == []
    op = op_of(changed(contracts.vec_add(), "kernels/0/grid", [["sub", ["numel", "x"], 4], 1, 1]))
    refused(op, tensors.empty(4), tensors.empty(4), match="empty grid")
    refused(op, tensors.empty(3), tensors.empty(3), match="grid (-1, 1, 1)", tag="launch")
    op = op_of(changed(contracts.vec_add(), "kernels/0/grid", [1, 1, 1]))
    op(empty, empty)
    (launch,) = driver.launches()
    assert [pointer(launch, i) for i in range(3)] == [0, 0, 0]


def test_mutated_tensors(driver):
    contract = contracts.vec_add()
    contract["schema"] = new_name() + "(Tensor x, Tensor(a!) out, Tensor(b!) more) -> ()"
    contract["outputs"] = []
    contract["tensors"] = {name: dict(contracts.TENSOR) for name in ("x", "out", "more")}
    contract["kernels"][0]["args"][1] = ["pointer", "more"]
    op = op_of(contract)
    x, out, more = tensors.empty(8), tensors.empty(8), tensors.empty(8)
    assert op(x, out, more) is None
    assert [tensor._version for tensor in (x, out, more)] == [0, 1, 1]
    with pytest.raises(RuntimeError):
        op(x, tensors.empty(9), more)
    empty = tensors.empty(0)
    op(empty, empty, empty)
    assert len(driver.launches()) == 1
    contract["schema"] = contract["schema"].replace("test_contracts::op", "test_contracts::no")
    contract["kernels"][0]["grid"] = [["sub", ["numel", "x"], ["numel", "x"]], 1, 1]
    op = op_of(contract)
    refused(op, x, out, more, match="empty grid")
    op(empty, empty, empty)


@pytest.mark.fault_case(42)
@pytest.mark.parametrize("layout", ["rows", "strided"])
def test_mutated_tensors_must_not_overlap_themselves(driver, layout):
    entry = {"dtype": "float32", "shape": None, "layout": layout, "align": 4}
    op = shapes_op("(Tensor x, Tensor(a!) y) -> ()", {"x": entry, "y": entry}, [])
    x = tensors.empty(1)
    overlapping = [((8, 4), (2, 1)), ((3, 4), (0, 1)), ((2, 2, 4), (5, 3, 1)), ((2, 8), (7, 1))]
    apart = [((8, 4), (4, 1)), ((8, 4), (9, 1)), ((1, 4), (0, 1)), ((0, 4), (0, 1)), ((), ()),
             ((4, 3, 2), (2, 8, 1)), ((2, 1), (5, 3))]  # fmt: skip
    if layout == "strided":
        overlapping += [((4, 4), (1, 1)), ((2, 3), (0, 0)), ((2**32, 2**31), (2**32, 1))]
        overlapping[-1] = ((4, 2), (1, 3))
        apart += [((4, 8), (1, 4)), ((2, 3), (1, 7))]
    for size, stride in overlapping:
        refused(op, x, tensors.strided(size, stride), match="argument 'y' overlaps itself")
        op(tensors.strided(size, stride), x)  # reading is fine
    for size, stride in apart:
        op(x, tensors.strided(size, stride))


def elements(tensor: torch.Tensor) -> set[int]:
    """Where in its storage a tensor has elements."""
    places = {tensor.storage_offset()}
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = {place + i * stride for place in places for i in range(size)}
    return places


@pytest.mark.fault_case(42)
def test_mutated_tensors_must_not_share_memory(driver):
    """Of slices of one tensor exactly those that do are refused; of other strides all."""
    entry = {"dtype": "float32", "shape": None, "layout": "strided", "align": 4}
    write = shapes_op("(Tensor(a!) y, Tensor x) -> ()", {"x": entry, "y": entry}, [])
    both = {"x": entry, "y": {**entry, "may_overlap": True}}
    may = shapes_op("(Tensor(a!) y, Tensor x) -> ()", both, [])
    generator = random.Random(5)
    memory, base = tensors.empty(6, 8, 10), torch.empty(6, 8, 10, device="meta")

    def piece(size: int) -> slice:
        first = generator.randrange(size) // 2
        last = generator.randrange(first, size)
        return slice(first, last + 1, generator.choice([1, 1, 2, 3]))

    refusals = 0
    for i in range(600):
        y, x = (base[piece(6), piece(8), piece(10)] for _ in range(2))
        if i % 3 == 1:
            y, x = y.permute(2, 0, 1), x.transpose(0, 2)
        elif i % 3 == 2:
            size = [generator.randrange(1, 5) for _ in range(2)]
            stride = sorted(generator.sample(range(1, 60), 2))
            x = base.as_strided(size, stride, generator.randrange(200))
        meet = bool(elements(y) & elements(x))
        given = [tensors.part(memory, tensor) for tensor in (y, x)]
        error = error_of(lambda: write(*given))  # noqa: B023
        what = (y.shape, y.stride(), x.shape, x.stride())
        assert not error or "'y' shares memory with argument 'x'" in error[1], error
        assert error or not meet, what
        if i % 3 < 2:
            assert bool(error) == meet, what
        refusals += bool(error)
        may(*given)
    assert 100 < refusals < 500
    refused(write, memory, memory, match="shares memory with argument 'x'")


@pytest.mark.fault_case(42)
def test_items_of_lists_share_no_memory_with_written_tensors(driver):
    entry = {"dtype": "float32", "shape": None, "layout": "strided", "align": 4}
    op = shapes_op(
        "(Tensor(a!) y, Tensor[] xs, Tensor? z=None) -> ()",
        {"y": entry, "xs": entry, "z": entry},
        [],
    )
    memory, base = tensors.empty(4, 8), torch.empty(4, 8, device="meta")
    rows = [tensors.part(memory, base[i]) for i in range(4)]
    end, begin = (tensors.part(memory, part) for part in (base[0, 3:], base[0, :1]))
    op(rows[0], [rows[1], rows[2]], rows[3])
    refused(op, rows[0], [rows[1], end], match="shares memory with argument 'xs'")
    refused(op, rows[0], [], begin, match="shares memory with argument 'z'")


def test_lazy_views_are_not_written_to(driver):
    """PyTorch's own fallback would write to a copy, and then fail an assertion."""
    entry = {"dtype": "complex64", "shape": None}
    schema = "(Tensor x, Tensor(a!) y) -> ()"
    op = shapes_op(schema, {"x": entry, "y": entry}, [])
    x, y = (tensors.empty(4, dtype=torch.complex64) for _ in range(2))
    for lazy in (torch._neg_view(y), torch._conj(y), torch._conj(torch._neg_view(y))):
        uses = torch._C._storage_Use_Count(y.untyped_storage()._cdata)
        refused(op, x, lazy, match=".resolve_neg().resolve_conj()")
        assert torch._C._storage_Use_Count(y.untyped_storage()._cdata) == uses
    assert driver.launches() == []
    op(x, y)


def test_elements_without_memory(driver):
    op = op_of(contracts.vec_add())
    x = tensors.empty(4)
    nothing = tensors.without_memory(4)
    refused(op, x, nothing, match="argument 'y' has elements but no memory")
    refused(op, nothing, x, match="argument 'x' has elements but no memory")
    assert driver.launches() == []


@pytest.mark.parametrize("entry", ["optional", "list"])
def test_a_dtype_variable_is_one_in_a_call(driver, entry):
    type_ = {"optional": "Tensor? y, Tensor? z", "list": "Tensor[] y, Tensor? z"}[entry]
    contract = contracts.vec_add()
    contract["schema"] = new_name() + f"(Tensor x, {type_}) -> Tensor"
    contract["dtypes"] = {"T": ["float16", "float32"]}
    contract["tensors"] = {
        "x": {"dtype": "int32", "shape": ["n"]},
        **{name: {"dtype": "T", "shape": ["n"]} for name in "yz"},
        "out": {"dtype": "float32", "shape": ["n"]},
    }
    contract["kernels"][0]["args"][:2] = [["pointer", "x"], ["pointer", "z"]]
    op = op_of(contract)
    x = tensors.empty(4, dtype=torch.int32)
    half, full, double = (
        tensors.empty(4, dtype=dtype) for dtype in (torch.float16, torch.float32, torch.float64)
    )

    def given(*some):
        return list(some) if entry == "list" else some[0]

    op(x, given(half), half)
    op(x, given(full), full)
    refused(op, x, given(half), full, match="another dtype than the arguments before it")
    refused(op, x, given(double), None, match="expected float16, float32, got float64")
    op(x, given(full), None)  # nothing stays from the call before
    op(x, [] if entry == "list" else None, half)
    if entry == "list":
        op(x, [half, half], None)
        refused(op, x, [full, half], None, match="item 1 has another dtype")
    contract["tensors"]["out"]["dtype"] = "T"  # bound by what may be absent
    contract["schema"] = contract["schema"].replace("::op_", "::no_")
    with pytest.raises(errors.InputError, match="not bound by any argument"):
        contracts.define(contract)


def test_inference_tensors_are_not_changed_outside(driver):
    contract = contracts.vec_add()
    contract["schema"] = new_name() + "(Tensor x, Tensor(a!) out) -> ()"
    contract["outputs"] = []
    contract["tensors"] = {name: dict(contracts.TENSOR) for name in ("x", "out")}
    contract["kernels"][0]["args"][1] = ["pointer", "x"]
    op = op_of(contract)
    with torch.inference_mode():
        out = tensors.empty(8)
        op(tensors.empty(8), out)
    with pytest.raises(RuntimeError, match="[Ii]nference"):
        op(tensors.empty(8), out)
    assert len(driver.launches()) == 1


def test_no_derivative(driver):
    op = op_of(contracts.vec_add())
    x, y = tensors.empty(3), tensors.empty(3).requires_grad_()
    refused(op, x, y, match="argument 'y' requires grad, and the op has no derivative")
    with torch.no_grad():
        op(x, y)
    with torch.inference_mode():
        op(x, y)
    import torch.autograd.forward_ad as forward_ad

    with forward_ad.dual_level():
        refused(op, x, x, match="forward-mode level")
        with torch.no_grad():  # a tangent goes on under it
            refused(op, x, x, match="forward-mode level")
    op(x, x)
