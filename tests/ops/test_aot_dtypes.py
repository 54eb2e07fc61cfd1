"""Dtypes in packages of AOTInductor that torch 2.11 makes, which reads them by wrong numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

import torch_cubin
from torch_cubin._inductor import dtypes, fold, parts
from torch_cubin._pytorch import inductor

ops = torch.ops.cubin
X = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def misread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "misreads_dtypes", lambda: True)


def dtypes_in(function: Callable[..., Any], *args: torch.Tensor) -> list[Any]:
    """The dtypes that ops of ours get in the function's graph after the pass, whose results are
    compared."""
    graph = make_fx(function, tracing_mode="symbolic")(*args)
    fold.fold(graph.graph)
    graph.recompile()
    torch.testing.assert_close(graph(*args), function(*args), rtol=0, atol=0)
    values = [
        value
        for node in graph.graph.nodes
        if getattr(node.target, "namespace", "") == "cubin"
        for value in (*node.args, *node.kwargs.values())
    ]
    return [value for value in values if isinstance(value, torch.dtype)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("wanted", [None, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("op", [ops.softmax, ops.log_softmax], ids=str)
def test_softmax_has_its_rows_dtype(op: Any, wanted: Any, dtype: torch.dtype) -> None:
    if wanted is None or wanted.itemsize > dtype.itemsize:
        assert dtypes_in(lambda x: op(x, 0, wanted), X.to(dtype)) == []


def test_defaults_are_omitted() -> None:
    def products(x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
        rows, of_rows = ops.quantize(x, 1, dtype=torch.float8_e4m3fn)
        scaled = ops.scaled_matmul(
            *(rows, data.t(), of_rows, 1, scale.t(), 1), output_dtype=torch.bfloat16
        )
        return [scaled, ops.syrk(x, out_dtype=torch.float32)]

    assert dtypes_in(products, X, *ops.quantize(X, 1)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("in_grad_mode", [False, True])
def test_losses_have_their_rows_dtype(
    reduction: str, in_grad_mode: bool, dtype: torch.dtype
) -> None:
    def losses(x: torch.Tensor, head: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        target = torch.arange(6) - 1
        options = {"weight": weight, "reduction": reduction}
        options |= {"ignore_index": -1, "label_smoothing": 0.25}
        own = torch.ops.cubin.cross_entropy(x, target, **options)
        bias = head[:, 0].contiguous()
        of_head = ops.linear_cross_entropy(x, head, target, linear_bias=bias, **options)
        return [own, of_head]

    weight = torch.linspace(0.5, 2, 40)
    with torch.set_grad_enabled(in_grad_mode):
        assert dtypes_in(losses, X.to(dtype), torch.randn(40, 40).to(dtype), weight) == []


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda x: ops.syrk(x.bfloat16(), out_dtype=torch.float32), "syrk .* 'out_dtype'"),
        (lambda x: ops.quantize(x, 1, dtype=torch.float8_e5m2), "quantize .* 'dtype'"),
        (
            lambda x: ops.linear_cross_entropy(x, x, x[:, 0].long() * 0, dtype=torch.float64),
            "linear_cross_entropy .* 'dtype'",
        ),
    ],
    ids=["syrk", "quantize", "linear_cross_entropy"],
)
def test_other_dtypes_are_refused(function: Any, problem: str) -> None:
    graph = make_fx(function, tracing_mode="symbolic")(X)
    with pytest.raises(torch_cubin.Error, match=rf"\[input\]: cubin::{problem}.* torch 2.12"):
        fold.fold(graph.graph)


@torch.library.custom_op("test_aot_dtypes::declared", mutates_args=())
def declared(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype)


@declared.register_fake
def _(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype)


def test_declared_ops_are_refused_but_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = make_fx(lambda x: declared(x, torch.float16), tracing_mode="symbolic")(X).graph
    assert not dtypes.omit_defaults(graph)
    monkeypatch.setattr(parts, "declared", lambda name: name == "test_aot_dtypes::declared")
    with pytest.raises(torch_cubin.Error, match="test_aot_dtypes::declared .* got float16"):
        dtypes.omit_defaults(graph)


def test_only_packages_of_torch_before_2_12(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for version, wrong in (("2.11.0+cu130", True), ("2.12.1", False), ("2.13.0+cpu", False)):
        monkeypatch.setattr(torch, "__version__", version)
        assert not inductor.misreads_dtypes()
        with V.set_aot_compilation(True):
            assert inductor.misreads_dtypes() == wrong
