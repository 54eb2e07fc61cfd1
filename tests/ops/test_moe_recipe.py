"""torch_cubin.moe with recipe="block" on the CPU: training in 8-bit floats."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from moe_cases import products_of_8_bits
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import torch_cubin
from torch_cubin._ops import kept_weights

EXPERTS = 4
WANTED = ("x", "topk_weights", "w13", "w2")
block_moe = functools.partial(torch_cubin.moe, recipe="block")


def layer(
    tokens: int = 70,
    k: int = 2,
    hidden: int = 200,
    inner: int = 136,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Tensor]:
    """With an expert without tokens, and ids of no expert, whose weights are NaN."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :k]
    ids[ids == 2] = 7
    weights = torch.rand(tokens, k, generator=generator)
    weights[ids == 7] = torch.nan
    w13 = torch.randn(EXPERTS, 2 * inner, hidden, generator=generator) * hidden**-0.5
    w2 = torch.randn(EXPERTS, hidden, inner, generator=generator) * inner**-0.5
    x = torch.randn(tokens, hidden, generator=generator)
    return {"x": x.to(dtype), "topk_ids": ids, "topk_weights": weights,
            "w13": w13.to(dtype), "w2": w2.to(dtype)}  # fmt: skip


def trained(args: dict[str, Any], function: Any = block_moe, grad: Tensor | None = None) -> Any:
    """The output and the gradients."""
    own = {name: args[name].detach().requires_grad_() for name in WANTED}
    out = function(**{**args, **own})
    if grad is None:
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, list(own.values()), grad.to(out.dtype))]


def exact(args: dict[str, Any]) -> dict[str, Any]:
    return {name: x.double() if x.is_floating_point() else x for name, x in args.items()}


def errors_of(got: Sequence[Tensor], right: Sequence[Tensor]) -> list[float]:
    """In parts of each result. A number that is rounded to 8 bits once has about 0.027."""
    pairs = list(zip(got, right, strict=True))
    assert all(a.isfinite().all() for a, _ in pairs)
    return [float((a.double() - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs]


@pytest.mark.parametrize(
    ("sizes", "dtype", "stored_transposed"),
    [
        ({}, torch.bfloat16, False),
        ({"tokens": 90}, torch.float32, True),
        ({"hidden": 256, "inner": 128, "k": 3}, torch.float16, True),
        ({"hidden": 24, "inner": 8, "tokens": 60}, torch.bfloat16, False),
    ],
    ids=str,
)
def test_outputs_and_gradients(sizes, dtype, stored_transposed) -> None:
    args = layer(dtype=dtype, **sizes)
    if stored_transposed:
        args |= {name: args[name].mT.contiguous().mT for name in ("w13", "w2")}
    got = trained(args)
    assert max(errors_of(got, trained(exact(args), torch_cubin.moe))) < 0.09
    assert all(torch.equal(a, b) for a, b in zip(got, trained(args), strict=True))
    skipped = args["topk_ids"] == 7
    assert got[2][skipped].eq(0).all()
    assert got[2].dtype == torch.float32
    assert got[3][2].eq(0).all()
    assert got[4][2].eq(0).all()
    assert [x.dtype for x in (got[0], got[1], got[3])] == [dtype] * 3
    assert got[3].stride() == args["w13"].stride()
    assert got[4].stride() == args["w2"].stride()
    # Where nothing is differentiated, the bits are those of the layer of quantised weights.
    with torch.no_grad():
        assert torch.equal(block_moe(**args), got[0])
    quantized = {}
    for name in ("w13", "w2"):
        parts = [torch.ops.cubin.quantize(each, 5) for each in args[name]]
        quantized[name] = torch.stack([data for data, _ in parts])
        quantized[f"{name}_scale"] = torch.stack([scale.t() for _, scale in parts])
    assert torch.equal(torch_cubin.moe(**{**args, **quantized}), got[0])


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [({}, torch.bfloat16), ({"tokens": 310, "k": 3, "inner": 72}, torch.float32)],
    ids=str,
)
def test_results_are_products_of_8_bit_floats(sizes, dtype) -> None:
    """Each of the operands that the formula names, with its scales, and none in 16 bits."""
    args = layer(dtype=dtype, **sizes)
    args["topk_weights"] = args["topk_weights"].nan_to_num(0.0)
    grad = torch.randn(args["x"].shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    got = trained(args, grad=grad)
    # A value beside a half of two 8-bit numbers may be rounded to either.
    assert max(errors_of(got, products_of_8_bits(list(args.values()), grad))) < 4e-3


def test_numbers_that_are_not_finite_stay_with_their_token_and_expert() -> None:
    args = layer(tokens=40, k=1)
    args["topk_ids"][:] = torch.arange(40)[:, None] % 2
    args["topk_weights"][:] = 1.0
    args["x"][:, :64] = 0  # blocks of zeros, with the next line
    args["w13"][1, :128, :128] = 0
    good = trained(args)
    args["x"][4, 70] = torch.inf
    args["x"][6, 3] = torch.nan
    bad = trained(args)
    for kept, (a, b) in enumerate(zip(bad[:3], good[:3], strict=True)):
        rows = [row for row in range(40) if row not in (4, 6)]
        assert torch.equal(a[rows], b[rows]), kept
        assert a[[4, 6]].isnan().any(1).all()
    for a, b in zip(bad[3:], good[3:], strict=True):
        assert a[0].isnan().any()
        assert torch.equal(a[1], b[1])


@pytest.mark.parametrize("times", [1, 300, 3000])
def test_small_rows_keep_their_bits_beside_large_ones(times: int) -> None:
    """Blocks of 128 rows are one expert's. The second product's rows grow with the square of the
    first one's."""
    args = layer(tokens=64, k=1, hidden=64, inner=64, dtype=torch.float32)
    ids = torch.arange(64)[:, None] % 2
    args |= {"topk_ids": ids, "topk_weights": torch.ones(64, 1)}
    args["x"][ids[:, 0] == 1] *= times
    got, right = trained(args), trained(exact(args), torch_cubin.moe)
    for name, own, true in zip(("w13", "w2"), got[3:], right[3:], strict=True):
        assert max(errors_of(own[:1], true[:1])) < 0.1, name
    alone = trained({**args, "topk_ids": ids.masked_fill(ids == 1, -1)})
    assert all(torch.equal(a[0], b[0]) for a, b in zip(alone[3:], got[3:], strict=True))


def test_a_loss_falls_as_in_bfloat16() -> None:
    args = layer(tokens=16, hidden=40, inner=24)
    args["topk_weights"] = args["topk_weights"].nan_to_num(0.0)
    wanted = torch.randn(16, 40, generator=torch.Generator().manual_seed(3)).bfloat16()
    losses = []
    for function in (torch_cubin.moe, block_moe):
        own = {name: args[name].float().requires_grad_() for name in WANTED}
        optimizer = torch.optim.Adam(own.values(), lr=2e-3)
        for _ in range(30):
            with torch.autocast("cpu", torch.bfloat16):
                out = function(**{**args, **own})
            assert out.dtype == torch.bfloat16
            loss = (out - wanted).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    start = float(wanted.float().square().mean())
    assert losses[1] < 0.8 * start
    assert abs(losses[1] - losses[0]) < 0.05 * start


def test_what_needs_a_gradient_gets_one() -> None:
    args = layer()
    right = dict(zip(WANTED, trained(args)[1:], strict=True))
    grad = torch.randn(70, 200, generator=torch.Generator().manual_seed(1)).bfloat16()
    for name in WANTED:
        own = args[name].clone().requires_grad_()
        block_moe(**{**args, name: own}).backward(grad)
        assert torch.equal(own.grad, right[name]), name


@pytest.mark.parametrize("change", [{"tokens": 0}, {"k": 0}, {"inner": 0}, {"hidden": 0}], ids=str)
def test_empty_sizes(change) -> None:
    sizes = {"tokens": 6, "hidden": 24, "inner": 8, **change}
    args = layer(**{**sizes, "hidden": max(sizes["hidden"], 1), "inner": max(sizes["inner"], 1)})
    if change.get("inner") == 0:
        args |= {"w13": args["w13"][:, :0], "w2": args["w2"][:, :, :0]}
    if change.get("hidden") == 0:
        args |= {"x": args["x"][:, :0], "w13": args["w13"][..., :0], "w2": args["w2"][:, :0]}
    got = trained(args)
    wanted = [args[name].shape for name in ("x", *WANTED)]
    assert [x.shape for x in got] == wanted
    assert all(x.eq(0).all() for x in got)


def test_opcheck_compile_and_vmap() -> None:
    args = layer(tokens=8)
    tensors = list(args.values())
    torch.library.opcheck(torch.ops.cubin._moe, (*tensors, "silu", False, "block"))
    out, *kept = torch.ops.cubin._moe_forward(*tensors, "silu", False, "block")
    x, _, *rest = tensors
    backward = (torch.ones_like(out), x, *rest, *kept, "silu", False, True, False, True, "block")
    torch.library.opcheck(torch.ops.cubin._moe_backward, backward)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block_moe, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (8, 11):
        args = layer(tokens=tokens)
        for a, b in zip(trained(args, compiled), trained(args), strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count == 1

    x = torch.stack([args["x"], 2 * args["x"]])
    out = torch.vmap(lambda x: block_moe(**{**args, "x": x}))(x)
    assert torch.equal(out, torch.stack([block_moe(**{**args, "x": each}) for each in x]))


def test_other_derivatives_are_refused() -> None:
    args = layer(tokens=8)

    def of_x(x: Tensor) -> Tensor:
        return block_moe(**{**args, "x": x}).float().sum()

    x = args["x"].clone().requires_grad_()
    message = r"\[input\]: moe has no rule for second derivatives with the recipe 'block'"
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(of_x(x), x, create_graph=True)
    message = r"\[input\]: moe has no rule for derivatives of torch.func and forward mode"
    with pytest.raises(RuntimeError, match=message):
        torch.func.grad(of_x)(args["x"])
    with pytest.raises(RuntimeError, match=message):
        torch.func.jvp(of_x, (args["x"],), (args["x"],))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": "row"}, "argument 'recipe' is not known: expected 'block' or None"),
        ({"activation": "gelu"}, "argument 'activation' is not supported in 8-bit floats"),
        ({"b13": torch.zeros(EXPERTS, 272)}, "argument 'b13' is not supported"),
        ({"interleaved": True}, "argument 'interleaved' is not supported"),
        ({"w2_scale": torch.ones(EXPERTS, 2, 2)}, "argument 'recipe' is given with weights of 8"),
        ({"x": torch.zeros(70, 200).double()}, "argument 'x' has a dtype that is not quantised"),
    ],
    ids=str,
)
def test_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(torch_cubin.errors.InputError, match=rf"torch_cubin.moe {message}"):
        block_moe(**{**layer(), **change})


def test_errors_of_the_op() -> None:
    """The fake kernel, which meta tensors have, refuses what the op refuses."""
    tensors = list(layer().values())
    wide = list(layer(dtype=torch.float64).values())
    for args, activation, interleaved, recipe, message in (
        (tensors, "silu", False, "row", "argument 'recipe' is not known"),
        (tensors, "gelu", False, "block", "argument 'activation' is not supported"),
        (tensors, "silu", True, "block", "argument 'interleaved' is not supported"),
        (wide, "silu", False, "block", "argument 'x' has a wrong dtype"),
    ):
        for device in ("cpu", "meta"):
            own = [x.to(device) for x in args]
            with pytest.raises(RuntimeError, match=rf"moe {message}"):
                torch.ops.cubin._moe(*own, activation, interleaved, recipe)


def test_kept_copies_serve_until_a_weight_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    args = layer()
    made = []
    make = kept_weights._copies

    def count(weight: Tensor) -> Any:
        made.append(weight.shape)
        return make(weight)

    monkeypatch.setattr(kept_weights, "_copies", count)
    own = {name: args[name].clone().requires_grad_() for name in WANTED}
    transposed = own["w2"].detach().mT.contiguous().requires_grad_()
    leaves = [own["x"], own["topk_weights"], own["w13"], transposed]

    def step() -> list[Tensor]:
        out = block_moe(**{**args, **own, "w2": transposed.mT})  # a view in each call
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]

    right = step()
    with torch_cubin.keep_float8_weights():
        for _ in range(3):
            with torch_cubin.keep_float8_weights():
                assert all(torch.equal(a, b) for a, b in zip(step(), right, strict=True))
        assert len(made) == 2
        with torch.no_grad():
            own["w13"].mul_(1.5)
            transposed[0].neg_()
        found = step()
        assert len(made) == 4
    assert not kept_weights._scopes.kept
    again = step()
    assert len(made) == 4
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert not torch.equal(found[0], right[0])


def test_kept_copies_are_freed_with_their_weight() -> None:
    args = layer()
    with torch_cubin.keep_float8_weights():
        trained(args)  # of leaves that nobody has afterwards
        gc.collect()
        assert not kept_weights._scopes.kept


def test_kept_copies_and_recomputation() -> None:
    """And a weight that changes between a forward and its backward is not taken for what it was."""
    args = layer()
    right = trained(args)

    def again(**own: Any) -> Tensor:
        return torch.utils.checkpoint.checkpoint(lambda: block_moe(**own), use_reentrant=False)

    with torch_cubin.keep_float8_weights():
        assert all(torch.equal(a, b) for a, b in zip(trained(args, again), right, strict=True))


def test_copies_opcheck_and_errors() -> None:
    for weight in (layer()["w13"], layer()["w2"].mT.contiguous().mT, layer()["w2"][:1]):
        torch.library.opcheck(torch.ops.cubin._float8_copies, (weight,))
    tensors = list(layer(tokens=8).values())
    copies = [own for weight in tensors[3:] for own in torch.ops.cubin._float8_copies(weight)[:2]]
    op = functools.partial(torch.ops.cubin._moe_forward, *tensors, "silu", False)
    right, *_ = op("block")
    assert torch.equal(op("block", copies)[0], right)
    for recipe, own, message in (
        ("none", copies, "is given without a recipe"),
        ("block", copies[:3], "has a wrong number of tensors"),
        ("block", [*copies[2:], *copies[:2]], "has a wrong shape"),
        ("block", [tensors[3], *copies[1:]], "has a wrong dtype"),
        ("block", [copies[0], copies[1][:, 1:], *copies[2:]], "has a wrong shape"),
    ):
        with pytest.raises(RuntimeError, match=rf"\[input\]: moe argument 'copies' {message}"):
            op(recipe, own)
    with pytest.raises(RuntimeError, match="argument .weight. has a wrong rank"):
        torch.ops.cubin._float8_copies(tensors[3][0])
