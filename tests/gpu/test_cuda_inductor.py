"""torch.compile on a GPU: our ops write to Inductor's memory, and install() folds its products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

import torch_cubin
from torch_cubin._native import library

pytestmark = pytest.mark.usefixtures("nan_memory")

ops = torch.ops.cubin
WIDTH, INNER, HEADS, ROWS = 256, 512, 4, 384


def integers(*shape: int, dtype=torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator, device="cuda").to(dtype)


# Name, shapes of the tensors, the other arguments: one kernel, skinny, composed, no columns of K.
OUT_OPS = [
    ("_matmul", [(512, 256), (256, 384)], {}),
    ("_matmul", [(3, 33, 7), (3, 7, 5)], {}),
    ("_matmul", [(16, 0), (0, 24)], {}),
    ("_linear", [(512, 256), (384, 256), (384,)], {}),
    ("_linear", [(4, 256), (384, 256)], {}),
    ("_linear", [(16, 0), (24, 0), (24,)], {}),
    ("_linear_activation", [(512, 256), (384, 256), (384,)], {"activation": "relu"}),
    ("_linear_activation", [(16, 0), (24, 0), (24,)], {"activation": "gelu"}),
    ("_addmm", [(384,), (512, 256), (256, 384)], {}),
    ("_addmm", [(512, 384), (512, 256), (256, 384)], {"beta": 0.5, "alpha": 2.0}),
    ("_addmm", [(384,), (512, 256), (256, 384)], {"alpha": 0.0}),
    ("_linear_glu", [(2048, 256), (1024, 256), (1024, 256)], {"activation": "silu"}),
    ("_linear_glu", [(33, 24), (17, 24), (17, 24)], {"activation": "silu"}),
    ("_linear_glu", [(4, 256), (512, 256), (512, 256)], {"activation": "silu"}),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "shapes", "rest"), OUT_OPS, ids=str)
def test_an_out_form_writes_what_the_op_returns(name, shapes, rest, dtype) -> None:
    tensors = [integers(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    want = getattr(ops, name).default(*tensors, **rest)
    out = torch.full_like(want, float("nan"))
    assert getattr(ops, name).out(*tensors, **rest, out=out) is out
    assert torch.equal(out, want)


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=bias)
        self.wide, self.narrow = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (
            layer(h).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(-2))
        h = self.norm2(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return x + self.narrow(F.gelu(self.wide(x)))


@pytest.fixture
def block() -> Block:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Block(bias=True).cuda()


def _ran() -> set[str]:
    return {row.op.removeprefix("cubin::") for row in torch_cubin.report().ran}


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("dynamic", [None, True])
def test_inference_under_install(block, dynamic) -> None:
    x = torch.randn(2, ROWS, WIDTH, device="cuda")
    want = block.double()(x.double()).detach()
    block.bfloat16()
    with torch.no_grad():
        stock = _error(block(x.bfloat16()), want)
        with torch_cubin.install(policy="all"):
            compiled = torch.compile(block, dynamic=dynamic)
            assert not _error(compiled(x.bfloat16()), want) > 1.5 * stock
            if dynamic:
                longer = torch.randn(3, ROWS + 40, WIDTH, device="cuda")
                expected = block.double()(longer.double())
                block.bfloat16()
                assert not _error(compiled(longer.bfloat16()), expected) > 2 * stock
            assert {"linear_glu", "linear_activation", "linears"} <= _ran()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_max_autotune_runs_what_it_measured(dtype) -> None:
    """Ours or PyTorch's: the number is right, and report() says which it was."""
    torch._dynamo.reset()
    x, w, b = (integers(*shape, dtype=dtype) for shape in ((512, 256), (256, 384), (384,)))
    config = {
        "max_autotune": True, "max_autotune_gemm_backends": "ATEN", "autotune_local_cache": False,
        "fx_graph_cache": False,
    }  # fmt: skip
    with torch.no_grad(), inductor_config.patch(config), torch_cubin.install(policy="all"):
        compiled = torch.compile(lambda x, w, b: (x @ w, torch.addmm(b, x, w).abs()))
        results, (code,) = run_and_get_code(compiled, x, w, b)
        torch_cubin.report(reset=True)
        compiled(x, w, b)
        report = torch_cubin.report()
    product = x.double() @ w.double()
    assert torch.equal(results[0].double(), product)
    assert torch.equal(results[1].double(), (product + b).abs())
    served = {row.function for row in report.served}
    declined = {row.function for row in report.declined}
    # Inductor may add the bias by a Triton kernel after a product: then there is no addmm.
    for name, others in (("mm", ()), ("addmm", ("bias_addmm",))):
        ours = any(f"extern_kernels.{each}(" in code for each in (name, *others))
        pytorchs = f"extern_kernels.cubin_pytorchs_{name}(" in code
        assert ours or pytorchs or name != "mm", code
        operator = f"aten::{name}.out"
        assert (operator in served, operator in declined) == (ours, pytorchs), code


def test_a_training_step_under_install(block) -> None:
    x = torch.randn(2, ROWS, WIDTH, device="cuda")

    def gradients(function, dtype) -> list[torch.Tensor]:
        block.to(dtype).zero_grad()
        y = function(x.to(dtype))
        y.backward(torch.ones_like(y))
        return [y.detach(), *(parameter.grad.clone() for parameter in block.parameters())]

    want = gradients(block, torch.float64)
    stock = [_error(g, w) for g, w in zip(gradients(block, torch.bfloat16), want, strict=True)]
    with torch_cubin.install(policy="all"):
        got = gradients(torch.compile(block), torch.bfloat16)
        assert {"linear_glu_aux", "linear_activation_aux", "linears"} <= _ran()
    for g, w, of_stock in zip(got, want, stock, strict=True):
        assert not _error(g, w) > 2 * of_stock + 1e-2


def test_a_graph_of_drop_in_is_captured(block) -> None:
    """mode="reduce-overhead": CUDA graphs of ops that write to Inductor's memory."""
    block.bfloat16()
    x = torch.randn(2, ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)

    @torch.compile(mode="reduce-overhead")
    def served(x: torch.Tensor) -> torch.Tensor:
        with torch_cubin.drop_in():
            return block(x)

    with torch.no_grad():
        want = block(x)
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            got = served(x).clone()
            torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)


def test_aot_inductor_calls_our_functions(block, tmp_path) -> None:
    block.bfloat16()

    class Served(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch_cubin.drop_in():
                return self.block(x)

    x = torch.randn(2, ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        want = block(x)
        path = torch._inductor.aoti_compile_and_package(
            torch.export.export(Served(), (x,)),
            package_path=str(tmp_path / "block.pt2"),
            inductor_configs=torch_cubin.aot_options(),
        )
        got = torch._inductor.aoti_load_package(path)(x)
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)


class OneInput(nn.Module):
    """Products of one input, all without biases, which graphs join: an op with several results."""

    def __init__(self) -> None:
        super().__init__()
        like = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, **like) for _ in range(3))
        self.gate, self.up = (nn.Linear(WIDTH, INNER, **like) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return q * k + v, F.silu(self.gate(x)) * self.up(x)


@pytest.mark.parametrize("options", [True, False], ids=["aot_options", "no_options"])
def test_aot_inductor_joins_products_without_biases(options: bool, tmp_path) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = OneInput()
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    rows = {"x": {0: torch.export.Dim("rows", min=2, max=4096)}}
    with torch.no_grad(), torch_cubin.install():
        path = torch._inductor.aoti_compile_and_package(
            torch.export.export(model, (x,), dynamic_shapes=rows),
            package_path=str(tmp_path / "model.pt2"),
            inductor_configs={
                "aot_inductor.precompile_headers": False,
                **(torch_cubin.aot_options() if options else {}),
            },
        )
    with torch.no_grad():
        package = torch._inductor.aoti_load_package(path)
        for given in (x, torch.randn(ROWS + 3, WIDTH, device="cuda", dtype=torch.bfloat16)):
            before = library.launches()
            got = package(given)
            assert library.launches() >= before + 2  # compiled C++ called ours
            for one, want in zip(got, model(given), strict=True):
                assert _error(one, want.double()) < 2e-2


@pytest.mark.parametrize("length", [1, 96, 192])
def test_attention_with_a_mask_reads_heads_that_are_not_repeated(length: int) -> None:
    """As transformers calls it for models with fewer heads of keys (repeat_kv)."""
    batch, heads, keys, width, times = 3, 2, 192, 64, 4

    def repeated(x: torch.Tensor) -> torch.Tensor:
        wide = x[:, :, None, :, :].expand(batch, heads, times, keys, width)
        return wide.reshape(batch, heads * times, keys, width)

    def layer(q, k, v, mask):
        out = F.scaled_dot_product_attention(q, repeated(k), repeated(v), mask, scale=0.125)
        return out.transpose(1, 2).flatten(2) * 2

    options = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(batch, heads * times, length, width, **options)
    k, v = (torch.randn(batch, heads, keys, width, **options) for _ in range(2))
    at = torch.arange(keys - length, keys, device="cuda")[:, None]
    mask = (torch.arange(keys, device="cuda") <= at).expand(batch, 1, length, keys)
    exact = layer(*(x.double() for x in (q, k, v)), mask)
    torch._dynamo.reset()
    with torch.no_grad(), torch_cubin.install(policy="all"):
        got, (code,) = run_and_get_code(torch.compile(layer), q, k, v, mask)
    assert "torch.ops.cubin._scaled_dot_product_attention.default(" in code
    assert "torch.ops.aten._scaled" not in code
    torch.testing.assert_close(got.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_reads_a_boolean_mask(dtype: torch.dtype) -> None:
    """Also that of a row without a visible key, on which versions of PyTorch differ."""
    batch, heads, rows, keys, width = 2, 4, 96, 160, 64

    def layer(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2) * 2

    options = {"device": "cuda", "dtype": dtype}
    q = torch.randn(batch, heads, rows, width, **options)
    k, v = (torch.randn(batch, heads, keys, width, **options) for _ in range(2))
    mask = torch.rand(batch, 1, rows, keys, device="cuda") < 0.5
    mask[0, :, 7], mask[1, :, 8] = False, True
    torch._dynamo.reset()
    with torch.no_grad():
        want = layer(q, k, v, mask)
        with torch_cubin.install(policy="all"):
            got, (code,) = run_and_get_code(torch.compile(layer), q, k, v, mask)
    assert "torch.ops.cubin._scaled_dot_product_attention.default(" in code
    assert "torch.ops.aten._scaled" not in code
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)


def test_attention_reads_what_contiguous_would_copy() -> None:
    """As in transformers' Whisper, whose result is turned back, too."""
    batch, length, heads, width = 2, 200, 4, 64

    def layer(x, *weights):
        three = (F.linear(x, w).unflatten(2, (heads, width)).transpose(1, 2) for w in weights)
        out = F.scaled_dot_product_attention(*(each.contiguous() for each in three))
        return out.transpose(1, 2).contiguous().flatten(2) * 2

    options = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(batch, length, heads * width, **options)
    weights = [torch.randn(heads * width, heads * width, **options) / 16 for _ in range(3)]
    exact = layer(*(each.double() for each in (x, *weights)))
    torch._dynamo.reset()
    with torch.no_grad(), torch_cubin.install(policy="all"):
        got, (code,) = run_and_get_code(torch.compile(layer), x, *weights)
    assert "torch.ops.cubin._scaled_dot_product_attention.default(" in code
    assert "clone" not in code
    torch.testing.assert_close(got.double(), exact, rtol=2e-2, atol=2e-2)


class Modulated(nn.Module):
    """Norms before products, as in a diffusion transformer."""

    def forward(self, x, weight, scale, shift):
        for _ in range(2):
            hidden = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
            x = x + scale * (hidden @ weight)
        return x


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(256, 1152), (512, 2048), (256, 2056), (3, 1152)])
def test_norms_of_rows(rows: int, columns: int, apart: bool) -> None:
    """`apart`: columns as a convolution leaves them."""
    given = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(32, columns, rows, **given).mT
    x = x if apart else x.contiguous()
    weight = torch.randn(columns, columns, **given) / columns**0.5
    scale, shift = torch.randn(2, 32, 1, columns, **given)
    layer = Modulated()
    wanted = layer(*(operand.double() for operand in (x, weight, scale, shift)))

    def measured() -> tuple[str, float]:
        torch._dynamo.reset()
        with torch.no_grad():
            result, (code,) = run_and_get_code(torch.compile(layer), x, weight, scale, shift)
        assert result.stride() == x.stride()
        return code, (result.double() - wanted).abs().mean().item()

    _, of_stock = measured()
    with torch_cubin.install():
        code, error = measured()
    assert error <= 1.2 * of_stock
    if rows >= 256 and columns <= 2048:
        assert "def triton_per_" in code
        assert "def triton_red_" not in code
