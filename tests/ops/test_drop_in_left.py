"""report(): products that drop_in() leaves to PyTorch, and what graphs and backward() run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from drop_in_cases import integers

import torch_cubin

_A, _B = torch.randn(16, 16), torch.randn(16, 16).bfloat16()
_EXPERTS = torch.randn(3, 16, 16).bfloat16()
_OFFSETS = torch.tensor([4, 8, 16], dtype=torch.int32)
_F8 = _A.to(torch.float8_e4m3fn)
_ONE = torch.ones(())
_BYTES = torch.ones(32, 32, dtype=torch.int8)
_Q = torch.randn(1, 2, 8, 16)
aten = torch.ops.aten


def _scaled(function):
    return function(_F8, _F8.t(), scale_a=_ONE, scale_b=_ONE, out_dtype=torch.bfloat16)


# A part of the name in the report, and a call that PyTorch computes.
LEFT = {
    "_int_mm": lambda: torch._int_mm(_BYTES, _BYTES),
    "sparse": lambda: torch.sparse.mm(_A.to_sparse(), _A),
    "torch.ops.aten.mm": lambda: aten.mm(_A, _A),
    "torch.ops.aten.addmm": lambda: aten.addmm.default(_A, _A, _A),
    "torch.ops.aten.linear": lambda: aten.linear(_A, _A),
    "torch.ops.aten._scaled_mm": lambda: _scaled(aten._scaled_mm),
    "_scaled_dot_product_attention_math": lambda: aten._scaled_dot_product_attention_math(
        _Q, _Q, _Q
    )[0],
    "_scaled_dot_product_flash_attention_for_cpu": lambda: (
        torch._scaled_dot_product_flash_attention_for_cpu(_Q, _Q, _Q)[0]
    ),
    "lstm_cell": lambda: torch.nn.LSTMCell(16, 16)(_A)[0],
    "cdist": lambda: torch.cdist(_A, _A),
    "matrix_power": lambda: torch.linalg.matrix_power(_A, 3),
    "Tensor.matrix_power": lambda: _A.matrix_power(3),
    "matrix_exp": lambda: torch.linalg.matrix_exp(_A),
    "vecdot": lambda: torch.linalg.vecdot(_A, _A),
    "cov": lambda: torch.cov(_A),
    "chain_matmul": lambda: torch.linalg.multi_dot([_A, _A, _A]),
}
LEFT["multi_dot"] = LEFT.pop("chain_matmul")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", LEFT)
def test_pytorchs_other_products_are_listed_once(name, compiled) -> None:
    call = LEFT[name]
    if compiled and name in ("sparse", "lstm_cell", "cov"):
        pytest.skip("torch.compile does not trace it")
    torch.manual_seed(1)
    expected = call()
    torch._dynamo.reset()

    def function(argument):
        return call(), argument + 1  # without a tensor among the arguments nothing is compiled

    if compiled:
        function = torch.compile(function, backend="eager", fullgraph=True)
    for _ in range(2):  # the second time out of dynamo's cache
        with torch_cubin.drop_in():
            torch.manual_seed(1)
            torch.testing.assert_close(function(_A)[0], expected)
        (row,) = torch_cubin.report().declined
        assert name in row.function
        # The backend "eager" calls the graph's functions within the drop_in().
        assert (row.calls, row.traced) == (1, int(compiled))
        assert torch_cubin.report().served == ()
        assert row.function in str(torch_cubin.report())


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_flex_attention_is_listed(backend) -> None:
    """It traces itself where nobody else compiles it."""
    from torch.nn.attention.flex_attention import flex_attention

    name = "torch.nn.attention.flex_attention.flex_attention"
    torch._dynamo.reset()
    call = torch.compile(flex_attention, backend=backend) if backend else flex_attention
    expected = F.scaled_dot_product_attention(_Q, _Q, _Q)
    for _ in range(2):
        with torch_cubin.drop_in():
            torch.testing.assert_close(call(_Q, _Q, _Q), expected)
        (row,) = torch_cubin.report().declined
        assert row.function == name
        assert row.calls + row.traced >= 1
        assert torch_cubin.report().served == ()


class _Experts(torch.nn.Module):
    """A gate and experts that are served, and a distance that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)
        self.experts = torch.nn.Parameter(_EXPERTS.clone())

    def forward(self, x):
        out = F.grouped_mm(self.gate(x), self.experts, offs=_OFFSETS)
        return out + torch.cdist(x.float(), x.float()).bfloat16()


@pytest.mark.parametrize("where", ["eager", "inside", "outside"])
def test_a_mixture_of_experts(where) -> None:
    model = _Experts()
    with torch.no_grad():
        expected = model(_B)
    torch._dynamo.reset()
    if where == "inside":

        @torch.compile(fullgraph=True, backend="eager")
        def call(x):
            with torch_cubin.drop_in():
                return model(x)
    else:
        inner = (
            torch.compile(model, fullgraph=True, backend="eager") if where == "outside" else model
        )

        def call(x):
            with torch_cubin.drop_in(), torch_cubin.drop_in():
                return inner(x)

    with torch.no_grad():
        for _ in range(3):
            torch_cubin.report(reset=True)
            torch.testing.assert_close(call(_B), expected)
            report = torch_cubin.report()
            served = {row.function for row in report.served}
            assert served == {"torch.nn.functional.linear", "torch._grouped_mm"}
            assert [row.function for row in report.declined] == ["torch.cdist"]
            assert {(row.op, row.dtype, row.calls, row.device) for row in report.ran} == {
                ("cubin::linear", "bfloat16", 1, "cpu"),
                ("cubin::grouped_matmul", "bfloat16", 1, "cpu"),
            }
            assert "nothing" not in str(report)


def test_report_counts_cached_graphs_and_backward() -> None:
    weight = integers(4, 4).requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: F.linear(x, weight).sin() @ weight, backend="aot_eager")
    for _ in range(2):
        with torch_cubin.drop_in():
            for _ in range(3):
                loss = compiled(integers(4, 4)).sum()
        assert {row.op: row.calls for row in torch_cubin.report().ran} == {
            "cubin::linear": 3,
            "cubin::matmul": 3,
        }
        loss.backward()
        ran = {row.op: row.calls for row in torch_cubin.report().ran}
        assert ran["cubin::matmul"] == 6
    text = str(torch_cubin.report())
    assert "cubin ops that ran" in text
    assert torch_cubin.report(reset=True).ran
    assert torch_cubin.report().ran == ()
    assert [row.calls for row in torch_cubin.report().served] == [0, 0]


def test_report_skips_meta_tensors_and_failed_calls() -> None:
    a = integers(4, 4)
    with torch_cubin.drop_in():
        torch.ops.cubin.matmul(a.to("meta"), a.to("meta"))
        with pytest.raises(RuntimeError):
            torch.ops.cubin.matmul(a, integers(3, 3))
        torch.ops.cubin.matmul(a.double(), a.double())
    assert [(row.dtype, row.calls) for row in torch_cubin.report().ran] == [("float64", 1)]


def test_graphs_of_before_stay_listed_and_eager_calls_begin_anew() -> None:
    torch._dynamo.reset()
    a = integers(4, 4)
    compiled = torch.compile(torch.mm, backend="eager")
    with torch_cubin.drop_in():
        compiled(a, a)
        a @ a
    with torch_cubin.drop_in():
        compiled(a, a)
    report = torch_cubin.report()
    assert [(row.function, row.calls, row.traced) for row in report.served] == [("torch.mm", 0, 1)]
    assert [(row.op, row.calls) for row in report.ran] == [("cubin::matmul", 1)]
