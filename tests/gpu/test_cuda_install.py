"""install() on a GPU: operators of aten run from cubins, other calls run cuBLAS; all are right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import many_threads
import numerics
import pytest
import scaled_cases as cases
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_cubin
from torch_cubin._drop_in import aten_kernels
from torch_cubin._native import library

NAME = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@contextlib.contextmanager
def counted() -> Iterator[Callable[[], tuple[dict[str, int], dict[str, str]]]]:
    """install(policy="all"), and what the report says of it."""

    def counts() -> tuple[dict[str, int], dict[str, str]]:
        report = torch_cubin.report()
        served = {row.function: row.calls for row in report.served}
        return served, {row.function: row.reason for row in report.declined}

    with torch_cubin.install(policy="all"):
        yield counts


def integers(*shape: int, dtype=torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Small ones, whose products and sums are exact in every dtype."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator, device="cuda").to(dtype)


def out_of(call):
    def with_out(*operands):
        out = torch.full_like(call(*operands), 9)
        assert call(*operands, out=out) is out
        return out

    return with_out


CALLS = [
    ("aten::mm", [(33, 40), (40, 56)], torch.mm),
    ("aten::mm", [(512, 256), (384, 256)], lambda a, b: a @ b.t()),
    ("aten::mm.out", [(64, 128), (128, 72)], out_of(torch.mm)),
    ("aten::mm.out", [(33, 7), (7, 5)], out_of(torch.mm)),
    ("aten::bmm", [(3, 33, 40), (3, 40, 56)], torch.bmm),
    ("aten::bmm.out", [(3, 64, 40), (3, 40, 56)], out_of(torch.bmm)),
    ("aten::mv", [(33, 40), (40,)], torch.mv),
    ("aten::addmm", [(56,), (33, 40), (40, 56)], torch.addmm),
    ("aten::addmm", [(56,), (33, 40), (56, 40)], lambda b, x, w: F.linear(x, w, b)),
    ("aten::addmm", [(33, 56), (33, 40), (40, 56)], lambda *x: torch.addmm(*x, beta=2, alpha=-1)),
    ("aten::addmm.out", [(56,), (64, 40), (40, 56)], out_of(torch.addmm)),
    ("aten::addmm_", [(33, 56), (33, 40), (40, 56)], lambda s, a, b: s.clone().addmm_(a, b)),
    (
        "aten::addmm_",
        [(33, 56), (33, 40), (40, 56)],
        lambda s, a, b: s.clone().addmm_(a, b, beta=0),
    ),
    ("aten::baddbmm", [(56,), (3, 33, 40), (3, 40, 56)], torch.baddbmm),
    ("aten::baddbmm.out", [(3, 64, 56), (3, 64, 40), (3, 40, 56)], out_of(torch.baddbmm)),
    ("aten::addmv", [(33,), (33, 40), (40,)], torch.addmv),
    *(
        ("aten::sum.dim_IntList", [shape], call)
        for shape, call in (
            ((5000, 72), lambda a: a.sum(0)),  # a part's last rows, a strip's last columns
            ((3001, 72), lambda a: a.sum(0)),  # a cluster's
            ((700, 1001), lambda a: a.sum(-2, keepdim=True)),  # single elements
            ((3, 500, 4, 128), lambda a: a.sum((1, 0), dtype=torch.float32)),
            ((600, 2304), lambda a: a[1::2, 8:1544].sum(0)),
            ((1, 40), lambda a: a.sum(0)),
            ((4099, 1), lambda a: a.sum(0)),
        )
    ),
]


@pytest.mark.usefixtures("filled_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CALLS, ids=lambda case: case[0])
def test_operators_run_from_cubins_and_are_exact(case, dtype) -> None:
    op, shapes, call = case
    if "sum" in op and dtype == torch.float64:
        pytest.skip("sums of float64 are PyTorch's")
    operands = [integers(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    expected = call(*operands)
    launches = library.launches()
    with counted() as counts:
        result = call(*operands)
        served, declined = counts()
    assert op in served
    assert declined == {}
    assert library.launches() > launches
    assert result.stride() == expected.stride()
    numerics.check_exact(result, expected, f"{op} {dtype}")


# Rows and a row's shape, with weight and bias or without.
NORMS = [((600, 768), (768,), True), ((70, 1152), (1152,), False), ((5000, 264), (264,), True),
         ((9, 5, 7, 33), (7, 33), True)]  # fmt: skip


@pytest.mark.usefixtures("filled_memory")
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", NORMS, ids=str)
def test_norms_run_from_cubins(case, dtype, kind) -> None:
    shape, row, affine = case
    torch.manual_seed(0)
    parameters = (2 if kind == "layer_norm" else 1) if affine else 0
    x = torch.randn(shape, device="cuda", dtype=dtype)
    rest = [torch.randn(row, device="cuda", dtype=dtype) for _ in range(parameters)]
    grad = torch.randn(shape, device="cuda", dtype=dtype)

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [each.to(dtype).clone().requires_grad_() for each in (x, *rest)]
        out = getattr(F, kind)(leaves[0], row, *leaves[1:])
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]

    exact, pytorchs = results(torch.float64), results(dtype)
    name = {"layer_norm": "native_layer_norm", "rms_norm": "_fused_rms_norm"}[kind]
    with counted() as counts:
        ours = results(dtype)
        served, declined = counts()
    assert (served, declined) == ({f"aten::{name}": 1, f"aten::{name}_backward": 1}, {})
    for own, theirs, right in zip(ours, pytorchs, exact, strict=True):
        assert (own.dtype, own.shape, own.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        numerics.check_close(own, theirs, right, f"{kind} {case} {dtype}")


def test_fastest_serves_norms_of_measured_sizes() -> None:
    if not any("norm" in row["kinds"] for row in aten_kernels.shipped_rows(NAME)):
        pytest.skip(f"{NAME} has no stored run of norms")
    x = torch.randn(4096, 1152, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    few, name = "few rows, which are not known to be quicker", "aten::native_layer_norm"
    # 4000 rows of 1152 take two launches, 512 one.
    for rows, declined in ((4096, {}), (4000, {f"{name}_backward": few}), (512, {})):
        with torch_cubin.install():
            F.layer_norm(x[:rows], (1152,)).sum().backward()
            report = torch_cubin.report()
        left = {row.function: row.reason for row in report.declined if "norm" in row.function}
        assert left == declined
        assert name in {row.function for row in report.served}
    with torch_cubin.install():
        F.layer_norm(x.detach(), (1152,), x[0]).sum().backward()
        F.layer_norm(x[:16, :768].contiguous(), (768,))
        left = {row.function: row.reason for row in torch_cubin.report().declined}
    assert left[f"{name}_backward"].startswith("no gradient of the input")
    assert left[name] == "few elements, which are not known to be quicker"


def test_calls_of_norms_that_pytorch_computes() -> None:
    """Its errors, its kernels for what we do not serve, and gradients of some arguments only."""
    x = torch.randn(64, 256, device="cuda")
    w = torch.randn(256, device="cuda", requires_grad=True)
    for call in (
        lambda: F.layer_norm(x.double(), (256,)),
        lambda: F.rms_norm(x.double(), (256,), w.double()),
        lambda: F.layer_norm(x[:0], (256,), w),
        lambda: F.layer_norm(x, (256,), w).sum() + torch.autograd.grad(
            F.layer_norm(x, (256,), w).square().sum(), w)[0].sum(),
    ):  # fmt: skip
        wanted = call()
        with counted():
            torch.testing.assert_close(call(), wanted, rtol=1e-4, atol=1e-4)
    with counted(), pytest.raises(RuntimeError, match="normalized_shape"):
        F.layer_norm(x, (255,))


LAYOUT = "out= of another shape, or not contiguous"
DECLINED = [
    ("dtype complex64", lambda a: torch.mm(a.to(torch.complex64), a.to(torch.complex64))),
    ("dtype complex64", lambda a: torch.addmm(*[a.to(torch.complex64)] * 3, beta=2j)),
    (LAYOUT, lambda a: torch.mm(a, a, out=a.new_empty(0))),
    (LAYOUT, lambda a: torch.mm(a, a, out=torch.empty_like(a).t())),
    (LAYOUT, lambda a: torch.addmm(a, a, a, out=torch.empty_like(a).t())),
    ("float64, which has no kernels", lambda a: a.double().sum(0)),
]


@pytest.mark.parametrize("case", DECLINED, ids=lambda case: case[0])
def test_pytorch_s_kernels_are_reached_below_the_dispatcher(case) -> None:
    reason, call = case
    a = integers(32, 32, dtype=torch.float32)
    expected = call(a)
    with counted() as counts:
        result = call(a)
        served, declined = counts()
    assert list(declined.values()) == [reason]
    assert served == {}
    torch.testing.assert_close(result, expected)


def test_wrong_calls_raise_runtime_errors_with_pytorch_s_words() -> None:
    a, b = integers(3, 4), integers(4, 5)
    with counted():
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            torch.mm(a, a)
        with pytest.raises(RuntimeError, match="same dtype"):
            torch.mm(a, b.float())
        with pytest.raises(RuntimeError, match="same device"):
            torch.mm(a, b.cpu())
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            torch.addmm(b[0], a, a)
        with pytest.raises(RuntimeError, match="3D"):
            torch.bmm(a, a)
        with pytest.raises(RuntimeError, match="out tensor to have dtype c10::BFloat16, but got f"):
            torch.mm(a, b, out=b.new_empty(3, 5).float())


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256, bias=False)]
    return torch.nn.Sequential(*layers).cuda().bfloat16()


def gradients(net, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    net.zero_grad()
    net(x).float().square().mean().backward()
    return [x.grad, *(parameter.grad.clone() for parameter in net.parameters())]


def test_training_runs_ours_forward_and_backward() -> None:
    """backward() computes on PyTorch's thread of the device."""
    net, x = model(), torch.randn(384, 256, device="cuda", dtype=torch.bfloat16)
    expected = gradients(net, x)
    with counted() as counts:
        result = gradients(net, x)
        served, declined = counts()
    assert served == {"aten::addmm": 1, "aten::mm": 5, "aten::sum.dim_IntList": 1}
    assert declined == {}
    for own, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(own, wanted, rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_graphs_run_ours(mode: str) -> None:
    """Whether they were compiled before or not; a CUDA graph keeps what it captured."""
    net, x = model(), torch.randn(384, 256, device="cuda", dtype=torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(net, mode=mode)
    with torch.no_grad():
        expected = net(x)
        with counted() as counts:
            for _ in range(3):
                result = compiled(x).clone()
            served, declined = counts()
        ran = {row.op for row in torch_cubin.report().ran}
    assert "aten::mm.out" in served
    assert "cubin::linear_activation" in ran  # the first layer and its GELU
    assert declined == {}
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=1e-2)


BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def attention_operands(rows: int, layout: str) -> list[torch.Tensor]:
    shape = (2, 4, rows, 64) if layout == "heads first" else (2, rows, 4, 64)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    made = [torch.randn(shape, **options) for _ in range(4)]
    return made if layout == "heads first" else [x.transpose(1, 2) for x in made]


def attend(operands: list[torch.Tensor], backend, install: tuple[bool, bool], **options):
    """Output and gradients, with install() on in the forward, in the backward."""

    def on(yes: bool):
        return torch_cubin.install(policy="all") if yes else contextlib.nullcontext()

    *leaves, grad = [x.detach().clone() for x in operands]
    for leaf in leaves:
        leaf.requires_grad_()
    with sdpa_kernel([backend]):
        with on(install[0]):
            out = F.scaled_dot_product_attention(*leaves, **options)
        with on(install[1]):
            out.backward(grad)
    return [out, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("layout", ["heads first", "rows first"])
@pytest.mark.parametrize("options", ["plain", "causal", "mask", "bool mask"])
def test_attention_is_served_forward_and_backward(kind, layout, options) -> None:
    """Also where only one of the two is: each takes what the other's kernel left."""
    torch.manual_seed(0)
    rows = 192
    operands = attention_operands(rows, layout)
    mask = torch.randn(2, 1, rows, rows, device="cuda", dtype=torch.bfloat16)
    given = {
        "plain": {},
        "causal": {"is_causal": True},
        "mask": {"attn_mask": mask},
        "bool mask": {"attn_mask": (mask > -1).logical_or(torch.eye(rows, device="cuda").bool())},
    }[options]
    if kind == "flash" and "attn_mask" in given:
        pytest.skip("flash attention takes no mask")
    wide = [x.double() for x in operands]
    wide_given = {
        name: value.double() if name == "attn_mask" and value.dtype != torch.bool else value
        for name, value in given.items()
    }
    exact = attend(wide, SDPBackend.MATH, (False, False), **wide_given)
    pytorchs = attend(operands, BACKENDS[kind], (False, False), **given)
    name = f"aten::_scaled_dot_product_{kind}_attention"
    for install in ((True, True), (True, False), (False, True)):
        torch_cubin.report(reset=True)
        own = attend(operands, BACKENDS[kind], install, **given)
        served = [row.function for row in torch_cubin.report().served]
        assert (f"{name}_backward" if install[1] else name) in served  # since the last install()
        for mine, theirs, wanted in zip(own, pytorchs, exact, strict=True):
            assert mine.stride() == theirs.stride()
            error = (mine.double() - wanted).abs().max().item()
            limit = 2 * (theirs.double() - wanted).abs().max().item()
            limit += numerics.ulp(mine.dtype, wanted.abs().max().item())
            assert not numerics.exceeds(error, limit), (install, error, limit)


def test_compiled_attention_has_the_strides_that_its_graph_expects() -> None:
    for kind, layout in ((k, x) for k in BACKENDS for x in ("heads first", "rows first")):
        torch._dynamo.reset()  # a graph keeps the backend that was allowed when it was traced
        compiled = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v) * 2)
        query, key, value, _ = attention_operands(128, layout)
        with sdpa_kernel([BACKENDS[kind]]):
            expected = compiled(query, key, value)
            with counted() as counts:
                result = compiled(query, key, value)
                served, declined = counts()
        # Inductor's cache knows no sdpa_kernel(): a graph of another backend may be found.
        assert any(name.startswith("aten::_scaled_dot_product_") for name in served)
        assert declined == {}
        assert result.stride() == expected.stride()
        torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


def test_in_a_cuda_graph() -> None:
    a, b, s = integers(256, 256), integers(256, 256, seed=1), integers(256, seed=2)
    expected = torch.addmm(s, a, b)
    with counted() as counts:
        torch.addmm(s, a, b)  # loads the kernel
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = torch.addmm(s, a, b)
        graph.replay()
        assert counts()[1] == {}
    torch.cuda.synchronize()
    numerics.check_exact(out, expected, "captured addmm")


def test_many_threads_multiply_while_it_is_installed_and_removed() -> None:
    a, b, s = integers(128, 128), integers(128, 128, seed=1), integers(128, seed=2)
    aten_kernels.register()

    def stream() -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(torch.cuda.Stream())

    torch.cuda.synchronize()
    assert many_threads.wrong_products(a, b, s, 200, stream) == []


def test_the_policy_fastest_leaves_calls_not_known_to_be_quicker() -> None:
    single, double = integers(64, 64, dtype=torch.float32), integers(64, 64, dtype=torch.float64)
    with torch_cubin.install():
        torch.mm(single, single)
        torch.mm(double, double)
        report = torch_cubin.report()
    assert report.served == ()
    assert len(report.declined) == 2
    assert all("known to be quicker" in row.reason or "not been measured" in row.reason
               for row in report.declined)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_of_biases_are_sums_in_float32(dtype: torch.dtype) -> None:
    """One order of additions, whatever else the GPU does; beyond 2^31 elements, too."""
    generator = torch.Generator("cuda").manual_seed(0)
    grad = torch.randn(16384, 392, generator=generator, device="cuda").to(dtype)
    with torch_cubin.install(policy="all"):
        results = [grad.sum(0) for _ in range(8)]
    for other in results[1:]:
        assert torch.equal(results[0], other)
    numerics.check_close(results[0], grad.sum(0), grad.double().sum(0), f"sums {dtype}")
    if dtype == torch.bfloat16:
        long = torch.ones(2**16 + 3, 2**15 + 8, device="cuda", dtype=dtype)
        long[-1] = 3
        with torch_cubin.install(policy="all"):
            assert (long.sum(0, dtype=torch.float32) == 2**16 + 5).all()


def test_no_other_kernels_replace_ours() -> None:
    aten_kernels.register_for("all")
    assert aten_kernels.serves_sums()
    assert [op for op in aten_kernels.OPERATORS if not aten_kernels.is_ours(op)] == []


@pytest.mark.child("calibrated")
def test_a_gpu_without_known_speeds_is_calibrated_at_its_first_call(child) -> None:
    answer = child.check()
    first, second = answer["seconds"]
    assert first < 4, answer  # two of measuring, and loading of kernels
    assert second < 0.1, answer
    assert (answer["calls"], answer["ran"]) == (2, []), answer
    assert answer["same random numbers"]
    speeds = {(kind, dtype): speed for kind, dtype, speed in answer["lines"]}
    assert {("product", "bfloat16"), ("attention", "bfloat16")} <= set(speeds), answer
    # (Beside 27 other processes, batches once measured 26.)
    assert all(0.02 < speed < 100 for speed in speeds.values()), answer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_groups_and_their_gradients(dtype) -> None:
    sizes = (5, 0, 120, 17)
    offs = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
    a = integers(sum(sizes), 64, dtype=dtype).requires_grad_()
    b = integers(len(sizes), 136, 64, dtype=dtype, seed=1).requires_grad_()
    grad = integers(sum(sizes), 136, dtype=dtype, seed=2)
    own = zip(a.double().split(sizes), b.double(), strict=True)
    right = torch.cat([x @ w.t() for x, w in own])
    with counted() as counts:
        out = F.grouped_mm(a, b.mT, offs=offs)
        got = torch.autograd.grad(out, (a, b), grad)
        assert counts()[0]["aten::_grouped_mm"] == 3
    numerics.check_exact(out, right, "rows")
    for one, want in zip(got, torch.autograd.grad(right, (a, b), grad.double()), strict=True):
        numerics.check_exact(one, want.double(), "gradient")


def test_products_of_groups_that_are_left_to_pytorch() -> None:
    offs = torch.tensor([3, 10], device="cuda", dtype=torch.int32)
    with counted() as counts:
        out = torch._grouped_mm(torch.ones(10, 8, device="cuda"),
                                torch.ones(2, 8, 4, device="cuda"), offs=offs)  # fmt: skip
        assert counts()[1]["aten::_grouped_mm"] == "groups of a wide dtype"
    assert torch.equal(out, torch.full_like(out, 8))


@pytest.mark.parametrize("scales", ["rows", "tensors"])
def test_products_of_8_bit_floats(scales: str) -> None:
    a, b = (torch.randn(n, 64, device="cuda").to(torch.float8_e4m3fn) for n in (40, 48))
    scale_a, scale_b = (torch.rand(n, device="cuda") + 1 for n in (40, 48))
    if scales == "tensors":
        scale_a, scale_b = scale_a[:1], scale_b[:1]
    operands = a, b.t(), scale_a[:, None], scale_b[None]
    stock = torch._scaled_mm(*operands, out_dtype=torch.bfloat16)
    with counted() as counts:
        out = torch._scaled_mm(*operands, out_dtype=torch.bfloat16)
        assert counts()[0]["aten::_scaled_mm"] == 1
        recipe = F.ScalingType.RowWise if scales == "rows" else F.ScalingType.TensorWise
        second = F.scaled_mm(a, b.t(), operands[2], recipe, operands[3], recipe)
        assert counts()[0]["aten::_scaled_mm_v2"] == 1
    assert torch.equal(out, second)
    torch.testing.assert_close(out, stock, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("recipes", cases.BLOCKS, ids=str)
def test_products_of_8_bit_floats_with_scales_of_blocks(recipes, generator) -> None:
    """K / 128 is no multiple of 4, and M not of 4: PyTorch's products are wrong, or refuse it."""
    args = cases.operands(30, 272, 1152, recipes, generator)
    a, b, scale_a, _, scale_b, _ = args
    first = scale_a if recipes[0] == cases.BLOCK_1X128 else scale_a.t()
    second = scale_b.t() if recipes[1] == cases.BLOCK_1X128 else scale_b
    kinds = [F.ScalingType(recipe) for recipe in recipes]
    with counted() as counts:
        outs = [
            torch._scaled_mm(a, b, first, second, out_dtype=torch.bfloat16),
            F.scaled_mm(a, b, scale_a, kinds[0], scale_b, kinds[1]),
        ]
        own = counts()[0]
    assert own["aten::_scaled_mm"] == own["aten::_scaled_mm_v2"] == 1
    assert all(torch.equal(out, cases.expected(*args).bfloat16()) for out in outs)
