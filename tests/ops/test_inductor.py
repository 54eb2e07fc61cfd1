"""Inductor and our ops: out= variants, extern kernels in generated Python, and C functions in
C++."""

from __future__ import annotations

import re

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from drop_in_cases import integers
from ops.samples import ATEN_IS_CALLED
from torch import nn
from torch._inductor.utils import run_and_get_code

import torch_cubin
from torch_cubin._inductor import lowerings
from torch_cubin._ops import raw_ops

ops = torch.ops.cubin
M, K, N = 3, 4, 5

# Name, shapes of the tensors, the other arguments.
OUT_OPS = [
    ("_matmul", [(2, M, K), (K, N)], {}),
    ("_matmul", [(M, 0), (0, N)], {}),
    ("_linear", [(2, M, K), (N, K), (N,)], {}),
    ("_linear", [(M, K), (N, K)], {}),
    ("_linear", [(M, 0), (N, 0), (N,)], {}),
    ("_linear_activation", [(M, K), (N, K), (N,)], {"activation": "gelu"}),
    ("_linear_activation", [(M, 0), (N, 0), (N,)], {"activation": "relu"}),
    ("_linear_activation", [(M, K), (N, K)], {"bias": None, "activation": "silu"}),
    ("_addmm", [(N,), (M, K), (K, N)], {"beta": 0.5, "alpha": 2.0}),
    ("_addmm", [(N,), (M, K), (K, N)], {"alpha": 0.0}),
    ("_linear_glu", [(M, K), (N, K), (N, K)], {"activation": "silu"}),
]


@pytest.mark.parametrize(("name", "shapes", "rest"), OUT_OPS, ids=str)
def test_an_out_form_writes_what_the_op_returns(name, shapes, rest) -> None:
    tensors = [integers(*shape, dtype=torch.float32, seed=i) for i, shape in enumerate(shapes)]
    want = getattr(ops, name).default(*tensors, **rest)
    out = torch.full_like(want, 7)
    version = out._version
    assert getattr(ops, name).out(*tensors, **rest, out=out) is out
    assert torch.equal(out, want)
    assert out._version > version  # autograd must detect the mutation


def test_an_out_form_refuses_other_outs() -> None:
    x, w = torch.ones(M, K), torch.ones(N, K)
    for out in (
        torch.empty(M, N + 1),
        torch.empty(M, N, dtype=torch.bfloat16),
        torch.empty(N, M).t(),
        torch.empty(M, N, device="meta"),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            ops._linear.out(x, w, None, out=out)
    square = torch.ones(K, K)
    with pytest.raises(RuntimeError, match=r"\[input\].*'out' shares memory"):
        ops._matmul.out(square, square.clone(), out=square)


def test_every_lowered_op_has_its_forms() -> None:
    for name in lowerings.WITH_OUT:
        raw = getattr(ops, f"_{name}")
        of_op, of_out = raw.default._schema.arguments, raw.out._schema.arguments
        facts = [
            [(a.name, str(a.type), a.default_value) for a in arguments if a.name != "out"]
            for arguments in (of_op, of_out)
        ]
        assert facts[0] == facts[1]
        (declared,) = lowerings.declarations()[raw.out]
        assert declared.count(",") + 1 == len(of_out)


class Model(nn.Module):
    """A model with all lowered ops, traced inside drop_in()."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.gate, self.up = (nn.Linear(8, 16, bias=False) for _ in range(2))

    def forward(self, x):
        with torch_cubin.drop_in():
            y = self.b(F.gelu(self.a(x)))
            gated = F.silu(self.gate(x)) * self.up(x)
            return torch.addmm(y, gated, self.b.weight.t(), beta=0.5) @ y.t()


CALLS = ("linear_activation", "linear", "linear_glu", "addmm", "matmul")


def test_generated_python_calls_extern_kernels() -> None:
    model, x = Model(), torch.randn(6, 8)
    torch._dynamo.reset()
    with torch.no_grad():
        result, code = run_and_get_code(torch.compile(model), x)
    torch.testing.assert_close(result, model(x))
    for name in CALLS:
        assert f"extern_kernels.cubin_{name}(" in code[0]
    assert "torch.ops.cubin" not in code[0]


def test_generated_python_calls_no_autograd_variant() -> None:
    """Which begins in Python, for parameters that require a gradient."""
    w13, w2 = (nn.Parameter(torch.randn(2, *shape)) for shape in ((16, 8), (8, 8)))
    ids, weights = torch.tensor([[0], [1], [0]]), torch.rand(3, 1)

    def layer(x):
        return torch_cubin.moe(x * 2, ids, weights, w13, w2, activation="silu") * 2

    x = torch.randn(3, 8)
    torch._dynamo.reset()
    with torch.no_grad():
        result, (code,) = run_and_get_code(torch.compile(layer), x)
    torch.testing.assert_close(result, layer(x))
    assert "torch.ops.cubin._moe.default(" in code


_WEIGHT = nn.Parameter(torch.randn(8, 8))
_CALLS_BELOW = {
    "linears": lambda x: ops._linears(x, [_WEIGHT, _WEIGHT], []),
    "linear_glu_aux": lambda x: ops._linear_glu_aux(x, _WEIGHT, _WEIGHT, "silu"),
    "linear_activation_aux": lambda x: ops._linear_activation_aux(x, _WEIGHT, None, "silu"),
}


@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_generated_code_calls_no_autograd_kernel(cpp_wrapper: bool) -> None:
    """Which begins in Python, for parameters that require a gradient."""

    def call(x):
        return [_CALLS_BELOW[name](x) for name in raw_ops.BELOW_AUTOGRAD]

    x = torch.randn(3, 8)
    options = {"cpp_wrapper": cpp_wrapper, "cpp_cache_precompile_headers": False}
    torch._dynamo.reset()
    with torch.no_grad():
        result, (code,) = run_and_get_code(torch.compile(call, options=options), x)
    torch.testing.assert_close(result, call(x))
    for name in raw_ops.BELOW_AUTOGRAD:
        assert re.search(rf"_{name}\W+below_autograd", code), name


def test_generated_cpp_calls_c_functions() -> None:
    model, x = Model(), torch.randn(6, 8)
    # Precompiled headers would serve this one file, and take longer than it.
    options = {"cpp_wrapper": True, "cpp_cache_precompile_headers": False}
    options |= torch_cubin.aot_options()
    torch._dynamo.reset()
    with torch.no_grad():
        result, code = run_and_get_code(torch.compile(model, options=options), x)
    torch.testing.assert_close(result, model(x))
    for name in CALLS:
        assert f"(aoti_torch_cubin_{name}_out(" in code[0]


def test_attention_whose_strides_are_read_has_them() -> None:
    def layer(q, k, v):
        out = ops._scaled_dot_product_attention(q.transpose(1, 2).contiguous(), k, v)
        other = ops._scaled_dot_product_attention(q.transpose(1, 2).contiguous(), v, k)
        turned = other.transpose(1, 2)[:, :, :2]
        return out.as_strided((30, 8), (8, 1)) + turned.as_strided((30, 8), (8, 1))

    args = [torch.randn(shape) for shape in ((2, 5, 3, 8), (2, 3, 5, 8), (2, 3, 5, 8))]
    torch._dynamo.reset()
    with torch.no_grad(), inductor_config.patch(ATEN_IS_CALLED):
        torch.testing.assert_close(torch.compile(layer)(*args), layer(*args))


class OneInput(Model):
    """With products of one input, without biases, which are one op with several results."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (nn.Linear(8, 4, bias=False) for _ in range(2))

    def forward(self, x):
        with torch_cubin.drop_in():
            return super().forward(x) + self.query(x) @ self.key(x).t()


def test_aot_inductor(tmp_path) -> None:
    model, x = OneInput(), torch.randn(6, 8)
    rows = {"x": {0: torch.export.Dim("rows", min=2, max=64)}}
    exported = torch.export.export(model, (x,), dynamic_shapes=rows)
    with torch.no_grad():
        path = torch._inductor.aoti_compile_and_package(
            exported,
            package_path=str(tmp_path / "model.pt2"),
            inductor_configs={
                "aot_inductor.precompile_headers": False,
                **torch_cubin.aot_options(),
            },
        )
        compiled = torch._inductor.aoti_load_package(path)
        for given in (x, torch.randn(11, 8)):
            torch.testing.assert_close(compiled(given), model(given))
