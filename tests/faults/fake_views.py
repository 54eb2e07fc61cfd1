"""What define_op says of parts of tensors, sizes that bind names by sums, and SymInt?."""

from __future__ import annotations

import pytest
import torch
from contract_calls import declare, integer, pointer, refused
from contracts import SEVERAL, new_name
from fake_driver import tensors

import torch_cubin
from torch_cubin import errors

pytestmark = pytest.mark.usefixtures("declared")


def define(schema: str, patterns: dict, args, **more):
    return torch_cubin.define_op(
        new_name() + schema, kernel=f"{SEVERAL}:vec_add", tensors=patterns, args=args,
        **{"grid": 1, "block": 32, **more},
    )  # fmt: skip


def test_parts_of_tensors(driver):
    """Packed qkv of (batch, seqlen, 3, heads, head_dim): the kernel takes three pointers."""
    op = define(
        "(Tensor qkv, SymInt first) -> Tensor",
        {"qkv": "float32[b, s, 3, h, d]", "out": "float32[b, s, h, d]"},
        lambda qkv, out, first: (
            qkv.select(2, 1), qkv.narrow(1, first, 2).select(2, 2),
            out.select(0, 1).select(0, 1),
            qkv.narrow(1, first, 2).select(2, 2).shape[1] * 100
            + qkv.select(2, 0).shape[3] * 10 + qkv.select(2, 0).dim(),
        ),
    )  # fmt: skip
    qkv = tensors.empty(2, 3, 3, 4, 8)
    out = op(qkv, 1)
    (launch,) = driver.launches()
    begin = qkv.data_ptr()
    assert pointer(launch, 0) == begin + 4 * 32
    assert pointer(launch, 1) == begin + 4 * (96 + 64)
    assert pointer(launch, 2) == out.data_ptr() + 4 * (96 + 32)
    assert integer(launch, 3) == 200 + 80 + 4
    refused(op, qkv, 2, match="takes a part that its tensor does not have: expected places of a "
            "dim of 3, got 2 from 2 on")  # fmt: skip
    refused(op, qkv, -1, match="does not have: expected places of a dim of 3, got 2 from -1 on")


def test_a_part_of_an_absent_tensor_is_null(driver):
    op = define(
        "(Tensor(a!) x, Tensor? y) -> ()", {"x": "float32[n]", "y": "float32[m] strided"},
        lambda x, y: (x, y.select(0, 3), None, 0),
    )  # fmt: skip
    op(tensors.empty(4), None)
    op(tensors.empty(4), y := tensors.strided((4,), (5,)))
    assert [pointer(launch, 1) for launch in driver.launches()] == [0, y.data_ptr() + 60]
    for size in (0, 3):
        refused(op, tensors.empty(4), tensors.empty(size), match=f"places of a dim of {size}, got")
    op = define("(Tensor(a!) x, Tensor y) -> ()", {"x": "float32[n]", "y": "float32[m, k]"},
                lambda x, y: (x, y.select(1, 2), None, 0))  # fmt: skip
    driver.reset()
    declare(driver)
    op(tensors.empty(4), tensors.empty(0, 3))
    assert pointer(driver.launches()[0], 1) == 0


# By call: of a (4, 8) tensor, and of one with a stride of 0 in its first dim.
PARTS = {
    "a column": (lambda x, i, n: x.select(1, i), [(0, 0), (7, 0)], [(8, 0), (-1, 0), (2**62, 0)]),
    "rows": (
        lambda x, i, n: x.narrow(0, i, n), [(0, 4), (3, 1)],
        [(0, 5), (3, 4), (0, 100), (2, -5), (-1, 2), (5, 0), (2**62, 2**62), (1, 2**63 - 1)],
    ),
    "rows of rows": (lambda x, i, n: x.narrow(0, 1, 2).narrow(0, i, n), [(1, 1)], [(1, 2), (2, 1)]),
    "a row of rows": (lambda x, i, n: x.narrow(0, 1, n).select(0, i), [(1, 2)], [(2, 2), (0, 4)]),
    "a column of a row": (lambda x, i, n: x.select(0, n).select(0, i), [(7, 3)], [(8, 3), (0, 4)]),
}  # fmt: skip


@pytest.mark.parametrize("case", PARTS)
@pytest.mark.parametrize("strides", [(8, 1), (0, 1)])
def test_a_part_must_lie_within_its_dim(case: str, strides: tuple, driver):
    """Where the first element lies in the tensor's memory is not enough: column 9 of 8 is row 1."""
    part, right, wrong = PARTS[case]
    op = define("(Tensor x, SymInt i, SymInt n) -> Tensor",
                {"x": "float32[h, w] strided", "out": "float32[h]"},
                lambda x, out, i, n: (part(x, i, n), x, out, 0))  # fmt: skip
    x = tensors.strided((4, 8), strides)
    torch_x = torch.empty_strided((4, 8), strides)
    for i, n in right:
        op(x, i, n)
        begin = part(torch_x, i, n).storage_offset()
        assert pointer(driver.launches()[-1], 0) == x.data_ptr() + 4 * begin
    for i, n in wrong:
        refused(op, x, i, n, match="takes a part that its tensor does not have")
    assert len(driver.launches()) == len(right)


def test_an_empty_part_is_null(driver):
    op = define("(Tensor x, SymInt i) -> Tensor", {"x": "float32[n]", "out": "float32[n]"},
                lambda x, out, i: (x.narrow(0, i, 0), x, out, 0))  # fmt: skip
    op(tensors.empty(4), 4)
    op(tensors.empty(4), 0)
    assert [pointer(launch, 0) for launch in driver.launches()] == [0, 0]
    refused(op, tensors.empty(4), 5, match="places of a dim of 4, got 0 from 5 on")


def test_a_part_of_an_item(driver):
    """An item that the list does not have gives no null pointer, as the item itself gives none."""
    op = define("(Tensor(a!) x, Tensor[] xs) -> ()", {"x": "float32[n]", "xs": "float32[k]"},
                lambda x, xs: (x, xs[1].select(0, 3), None, 0))  # fmt: skip
    op(tensors.empty(4), [tensors.empty(4), y := tensors.empty(5)])
    assert pointer(driver.launches()[0], 1) == y.data_ptr() + 12
    for items in ([], [tensors.empty(4)]):
        refused(op, tensors.empty(4), items, match="wants an item that its list does not have")
    refused(op, tensors.empty(4), [y, tensors.empty(3)], match="places of a dim of 3, got 1 from 3")
    assert len(driver.launches()) == 1


WRONG = {
    "a sum": lambda x: x + 1,
    "a difference": lambda x: 1 - x,
    "an item": lambda x: x[0],
    "a slice": lambda x: x[1:, None],
    "a product": lambda x: x * 2,
    "a comparison": lambda x: x > 0,
    "a negative dim": lambda x: x.select(-1, 0),
    "a negative place": lambda x: x.select(0, -1),
    "a float": lambda x: x.narrow(0, 0.5, 1),
    "a part's elements": lambda x: x.select(0, 1).numel(),
    "a map of a part": lambda x: torch_cubin.TensorMap(x.select(0, 1), box=(4,)),
    "another attribute": lambda x: x.select(0, 1).data_ptr(),
}


@pytest.mark.parametrize("case", WRONG)
def test_unsupported_queries_of_a_tensor_are_refused(case: str, driver):
    with pytest.raises(errors.InputError) as caught:
        define("(Tensor x) -> Tensor", {"x": "float32[n, m]", "out": "float32[n]"},
               lambda x: (WRONG[case](x), None, None, 0))  # fmt: skip
    assert "fake_views.py" in str(caught.value)
    with pytest.raises(errors.InputError, match="like a part"):
        define("(Tensor x) -> Tensor",
               {"x": "float32[n, m]", "out": lambda x: torch_cubin.like(x.select(0, 1))},
               ("x", "x", "x", 0))  # fmt: skip


def test_a_sum_binds_its_name(driver):
    """cu_seqlens of b + 1 entries, before anything else says b."""
    op = define(
        "(Tensor starts, Tensor last, SymInt? limit) -> Tensor",
        {"starts": "int32[b + 1]", "last": "int32[b]", "out": "float32[2 * b]"},
        lambda starts, last, out, b, limit: (
            starts, last, out, b + torch_cubin.select(limit.defined, limit, 0)
        ),
    )  # fmt: skip
    starts, last = tensors.empty(4, dtype=torch.int32), tensors.empty(3, dtype=torch.int32)
    assert op(starts, last, None).shape == (6,)
    op(starts, last, 100)
    assert [integer(launch, 3) for launch in driver.launches()] == [3, 103]
    two = tensors.empty(2, dtype=torch.int32)
    refused(op, starts, two, None, match="has a wrong size in dim 0: expected 3 (b)")
    refused(op, tensors.empty(0, dtype=torch.int32), two, None,
            match="has a wrong size in dim 0: expected 1 or more in shape ((b + 1),)")  # fmt: skip
    for pattern, size, bound in (("k - 2", 3, 5), ("3 + k", 5, 2), ("k + 0", 4, 4)):
        op = define("(Tensor x) -> Tensor", {"x": f"float32[{pattern}]", "out": "float32[k]"},
                    lambda x, out, k: (x, x, out, k))  # fmt: skip
        assert op(tensors.empty(size)).shape == (bound,)


def test_a_sum_binds_its_name_for_symbols():
    op = torch_cubin.define_op(
        f"{new_name()}(Tensor starts, SymInt? limit) -> Tensor",
        kernel=f"{SEVERAL}:vec_add", grid=1, block=32, args=("starts", "starts", "out", 0),
        tensors={"starts": "int32[b + 1]", "out": "float32[2 * b]"},
        cpu=lambda starts, limit: torch.zeros(2 * starts.shape[0] - 2),
    )  # fmt: skip
    exported = torch.export.export(
        _Module(op), (torch.zeros(4, dtype=torch.int32),),
        dynamic_shapes=({0: torch.export.Dim("n", min=3, max=64)},),
    )  # fmt: skip
    assert exported.module()(torch.zeros(7, dtype=torch.int32)).shape == (12,)


class _Module(torch.nn.Module):
    def __init__(self, op) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(x, x.shape[0])
