"""torch.compile with Inductor under install(): products are folded with the ops that follow them,
and only if that is correct. Results are compared with the same graph without torch_cubin's pass.

The file is over 500 lines because its tests share one process, whose dispatcher install() changes.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from installed import installed
from ops.samples import ATEN_IS_CALLED
from test_fold import HEADS, again, attention, efficient, graph_of, repeated
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.select_algorithm import AlgorithmSelectorCache
from torch._inductor.utils import run_and_get_code

import torch_cubin
from torch_cubin._inductor import fold, register

M, K, N = 6, 8, 16
DTYPES = [torch.float32, torch.bfloat16]


class Seen:
    """The targets of the graphs after our pass, which runs first here."""

    def __init__(self) -> None:
        self.graphs: list[collections.Counter[str]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        seen = self

        class Watch(CustomGraphPass):
            def __call__(self, graph: torch.fx.Graph) -> None:
                fold.fold(graph)
                calls = [node for node in graph.nodes if node.op == "call_function"]
                seen.graphs.append(collections.Counter(str(node.target) for node in calls))

            def uuid(self) -> None:
                return None

        with inductor_config.patch(post_grad_custom_pre_pass=Watch()):
            yield

    def count(self, op: str) -> int:
        return sum(graph[f"cubin.{op}.default"] for graph in self.graphs)


def _compiled(function, *args, train: bool = False, **options):
    """The results (and gradients) of eager PyTorch and of the folded graph, and the ops that it
    calls."""
    torch._dynamo.reset()
    seen = Seen()

    def run(f):
        if not train:
            with torch.no_grad():
                return f(*args), []
        leaves = [arg.detach().requires_grad_() for arg in args]
        result = f(*leaves)
        (result.float() ** 2).sum().backward()
        return result, [leaf.grad for leaf in leaves]

    want = run(function)
    with installed(), seen.watching(), inductor_config.patch(ATEN_IS_CALLED):
        got = run(torch.compile(function, **options))
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if args[0].dtype == torch.bfloat16 else {}
    torch.testing.assert_close(got[0], want[0], **tolerance)
    for g, w in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(g, w, rtol=5e-2, atol=5e-2 * w.abs().max().item())
    return seen


def _tensors(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).to(dtype) / 2 for shape in shapes]


ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


# A graph costs a second or more of the compiler: all activations are in one.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_activation_joins_its_product(dtype) -> None:
    def layers(x, w, b):
        for activation in ACTIVATIONS.values():
            x = activation(F.linear(x, w, b)) * 2
        return x

    seen = _compiled(layers, *_tensors((2, M, K), (K, K), (K,), dtype=dtype))
    assert seen.count("_linear_activation") == len(ACTIVATIONS)


def test_dynamic_sizes() -> None:
    def layer(x, w, b):
        return F.gelu(F.linear(x, w, b)) * 2

    seen = _compiled(layer, *_tensors((2, M, K), (N, K), (N,)), dynamic=True)
    assert seen.count("_linear_activation") == 1


def test_a_matrix_that_is_not_transposed() -> None:
    seen = _compiled(lambda x, w: F.relu(x @ w), *_tensors((M, K), (K, N)))
    assert seen.count("_linear_activation") == 1


def test_training_keeps_the_sums() -> None:
    def layer(x, w, b):
        return F.gelu(F.linear(x, w, b))

    seen = _compiled(layer, *_tensors((2, M, K), (N, K), (N,)), train=True)
    assert seen.count("_linear_activation_aux") == 1


def test_gate_and_up_are_one() -> None:
    def layers(x, g, u):
        for activation in ACTIVATIONS.values():
            gate, up = activation(F.linear(x, g)), F.linear(x, u)
            x = gate * up
        gate, up = F.silu(F.linear(x, g)), F.linear(x, u)
        return up * gate

    seen = _compiled(layers, *_tensors((2, M, K), (K, K), (K, K)))
    assert seen.count("_linear_glu") == len(ACTIVATIONS) + 1


def test_gate_and_up_in_training() -> None:
    def layer(x, g, u):
        return F.silu(F.linear(x, g)) * F.linear(x, u)

    args = _tensors((2, M, K), (N, K), (N, K), dtype=torch.bfloat16)
    seen = _compiled(layer, *args, train=True)
    assert seen.count("_linear_glu_aux") == 1


def test_products_of_one_input_are_one() -> None:
    def layer(x, q, k, v, b):
        return F.linear(x, q), F.linear(x, k, b).sin(), F.linear(x, v)

    args = _tensors((2, M, K), (N, K), (N // 2, K), (N // 2, K), (N // 2,))
    seen = _compiled(lambda *args: torch.cat(layer(*args), -1), *args)
    assert seen.count("_linears") == 1


# Graphs that look foldable but are not, or only in part.
def _rounded_between(x, w):
    return F.relu(F.linear(x, w).to(torch.float8_e4m3fn).to(x.dtype))


def _outer(x, w):
    y = F.linear(x, w)
    return F.silu(y)[:, None, :] * y[None, :, :]


def _half_gelu(x, w):
    y = F.linear(x, w)
    return y * 0.5 * (1 + torch.erf(y * 0.7))


def _another_input(x, w):
    return F.silu(F.linear(x, w)) * F.linear(x + 1, w)


def _chained(x, w):
    y = F.linear(x, w)
    return F.linear(x, w + y.sum()).sin() + y.cos()


NOT_FOLDED = [_rounded_between, _half_gelu, _another_input, _chained]


@pytest.mark.parametrize("function", NOT_FOLDED, ids=lambda function: function.__name__)
def test_what_only_looks_alike_stays(function) -> None:
    seen = _compiled(function, *_tensors((M, K), (N, K)))
    ours = {key for graph in seen.graphs for key in graph if key.startswith("cubin.")}
    assert ours <= {"cubin._linear_activation.default"}
    if function is not _another_input:  # where only the gate is a product with an activation
        assert not ours


def test_a_product_that_others_read_stays_whole() -> None:
    seen = _compiled(_outer, *_tensors((M, K), (N, K)))
    assert seen.count("_linear_activation_aux") == 1


def test_repeated_heads_of_keys_are_not_written() -> None:
    """A step of decoding, as transformers' Llama computes it on a GPU, with a static cache. The
    query is a copy of what then changes: attention, which reads the original, comes before."""
    attention = torch.ops.aten._scaled_dot_product_efficient_attention

    def step(q, k, v, at, new, mask):
        wide, query = [], q.clone()
        q.zero_()
        for cache in (k, v):
            cache.index_copy_(2, at, new)
            batch, heads, length, width = cache.shape
            again = cache[:, :, None, :, :].expand(batch, heads, 3, length, width)
            wide.append(again.reshape(batch, heads * 3, length, width))
        bias = torch.where(mask, 0.0, -torch.inf).expand(-1, 6, -1, -1)
        out = attention(query, *wide, bias, False, scale=0.5)[0]
        return out.transpose(1, 2).flatten(2) * 2

    q, k, v, new = _tensors((3, 6, 1, K), (3, 2, M, K), (3, 2, M, K), (3, 2, 1, K))
    at, mask = torch.tensor([2]), torch.arange(M).expand(3, 1, 1, M) <= 2
    torch._dynamo.reset()
    with installed(), torch.no_grad():
        want = step(q.clone(), k.clone(), v.clone(), at, new, mask)
        caches = k.clone(), v.clone()
        got, (code,) = run_and_get_code(torch.compile(step), q, *caches, at, new, mask)
    torch.testing.assert_close(got, want)
    assert not q.any()
    assert all(torch.equal(cache[:, :, 2:3], new) for cache in caches)
    assert "torch.ops.cubin._scaled_dot_product_attention.default(" in code
    assert "torch.ops.aten._scaled" not in code


def test_repeated_heads_of_pytorchs_attention() -> None:
    q, k, v, mask = HEADS
    with installed():

        def pytorchs(q, k, v, mask):
            mask = torch.where(mask, 0.0, -torch.inf).expand(2, 6, 5, 7)
            return efficient(q, repeated(k, 3), repeated(v, 3), mask, False, scale=0.5)[0]

        nodes = graph_of(pytorchs, q, k, v, mask)
        assert not nodes.find_nodes(op="call_function", target=efficient)
        (found,) = nodes.find_nodes(op="call_function", target=attention)
        assert found.kwargs == {"scale": 0.5, "enable_gqa": True}

        def with_options(values: Callable[..., Any], *options: Any) -> Callable[..., Any]:
            return lambda q, k, v: efficient(q, repeated(k, 3), values(v, 3), None, *options)

        def used(call: Callable[..., Any], results: int) -> Callable[..., Any]:
            return lambda *args: call(*args)[:results]

        for other in (
            used(with_options(repeated, True), 2),  # logsumexp
            used(with_options(again, False), 1),
            used(with_options(repeated, False, 0.0, True), 1),  # causal, of other sizes
        ):
            nodes = graph_of(other, q, k, v)
            assert len(nodes.find_nodes(op="call_function", target=efficient)) == 1


def test_without_install_products_of_pytorch_stay() -> None:
    torch._dynamo.reset()
    seen = Seen()
    x, w = _tensors((M, K), (N, K))
    with seen.watching(), torch.no_grad():
        torch.compile(lambda x, w: F.relu(F.linear(x, w)))(x, w)
    assert not [key for graph in seen.graphs for key in graph if key.startswith("cubin.")]


def test_generated_code_writes_to_inductors_memory() -> None:
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    x, w, w2 = _tensors((M, K), (N, K), (K, N))
    with installed(), torch.no_grad():
        result, code = run_and_get_code(
            torch.compile(lambda x, w, w2: F.linear(F.gelu(F.linear(x, w)), w2)), x, w, w2
        )
    assert "extern_kernels.cubin_linear_activation(" in code[0]
    assert "torch.ops.cubin" not in code[0]
    torch.testing.assert_close(result, F.linear(F.gelu(F.linear(x, w)), w2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(K)
        self.q, self.k, self.v = (nn.Linear(K, K) for _ in range(3))
        self.o = nn.Linear(K, K, bias=False)
        self.gate, self.up = (nn.Linear(K, N, bias=False) for _ in range(2))
        self.down = nn.Linear(N, K, bias=False)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (2, -1)).mT for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).mT.flatten(-2))
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def test_generated_code_of_a_block_has_no_more_buffers_than_pytorchs() -> None:
    block, x = Block(), torch.randn(2, M, K)

    def facts() -> tuple[int, int, int]:
        """Tensors that are allocated, fused kernels, and copies."""
        torch._dynamo.reset()
        with torch.no_grad():
            _, (code,) = run_and_get_code(torch.compile(block), x)
        _, _, calls = code.partition("def call(")
        calls, _, _ = calls.partition("return (")
        own = len(re.findall(r" = buf\d+\[\d\]", calls))  # results of _linears
        return calls.count("empty_strided") + own, calls.count("cpp_fused"), calls.count(".clone()")

    stock = facts()
    with installed():
        ours = facts()
    assert all(mine <= theirs for mine, theirs in zip(ours, stock, strict=True)), (ours, stock)
    assert ours[1] < stock[1]  # silu and the product with up are in the product


@pytest.mark.parametrize("autocast", [False, True])
def test_a_blocks_training_step(autocast) -> None:
    """Autocast's casts of the weights are between the products that are folded. There .ci/run
    has PyTorch's own ops called, not generated: the other case shows those, and g++ takes 10 s for
    each case.
    """
    torch._dynamo.reset()
    options = ATEN_IS_CALLED if autocast else {}
    block, x = Block(), torch.randn(2, M, K)

    def step(f):
        block.zero_grad()
        with torch.autocast("cpu", enabled=autocast):
            y = f(x)
        (y.float() ** 2).sum().backward()
        return [y, *(parameter.grad.clone() for parameter in block.parameters())]

    want = step(block)
    seen = Seen()
    with installed(), seen.watching(), inductor_config.patch(options):
        got = step(torch.compile(block))
        ran = {row.op.removeprefix("cubin::") for row in torch_cubin.report().ran}
    assert {"linear_glu_aux", "linears"} <= ran
    assert "linear" not in ran
    assert [seen.count(op) for op in ("_linear_glu_aux", "_linears")] == [1, 1]
    for g, w in zip(got, want, strict=True):
        tolerance = 5e-2 * w.abs().max().item() if autocast else 1e-4
        torch.testing.assert_close(g, w, rtol=1e-2 if autocast else 1e-4, atol=tolerance)


def test_parameters_do_not_make_a_graph_compose_its_ops() -> None:
    """They require a gradient, but no graph records one. Nor do graphs of training, as the test
    above sees: AOTAutograd has computed the backward."""
    torch._dynamo.reset()
    block, x = Block(), torch.randn(2, M, K)
    with installed(), torch.no_grad():
        torch.compile(block)(x)
        ran = {row.op.removeprefix("cubin::") for row in torch_cubin.report().ran}
    assert {"linear_glu", "linears"} <= ran
    assert "linear" not in ran


def test_graphs_that_other_threads_compile_are_folded() -> None:
    """Since torch 2.13 an option that is assigned is the thread's own."""
    torch._dynamo.reset()
    x, w = _tensors((M, K), (N, K))

    def layer(x, w):
        return F.relu(F.linear(x, w)).exp()

    def code() -> str:
        with torch.no_grad():
            return "".join(run_and_get_code(torch.compile(layer), x, w)[1])

    class Users(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            ran.append(threading.get_ident())

        def uuid(self) -> None:
            return None

    ran: list[int] = []
    with installed(), concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert "cubin_linear_activation" in pool.submit(code).result()
        if hasattr(inductor_config, "_cache_config_factory_keys"):
            assert pool.submit(lambda: inductor_config.inductor_choices_class).result()
        torch._dynamo.reset()
        with inductor_config.patch(post_grad_custom_pre_pass=Users()):  # which replaces ours
            assert "cubin_linear_activation" not in code()
    assert ran == [threading.get_ident()]


def test_the_users_pass_runs_beside_ours() -> None:
    ran = []

    class Users(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            ran.append(len(graph.nodes))

        def uuid(self) -> str:
            return name

    torch._dynamo.reset()
    name = str(uuid.uuid4())  # not in a cache
    both = register.beside(Users())
    key = both.uuid()
    assert name in key
    with torch_cubin.batch_invariant():
        assert both.uuid() != key
    x, w = _tensors((M, K), (N, K))
    with installed(), inductor_config.patch(post_grad_custom_pre_pass=both), torch.no_grad():
        assert both.uuid() != key  # install() is part of the key
        torch.compile(lambda x, w: F.relu(F.linear(x, w)).cos())(x, w)
        assert ran
        assert register.beside([Users()]).uuid() == both.uuid()
    assert register.beside(lambda graph: None).uuid() is None  # a pass without a key: no caching


def test_the_handle_ends_the_folding_of_new_graphs() -> None:
    torch._dynamo.reset()
    x, w = _tensors((M, K), (N, K))
    handle = torch_cubin.install(policy="all")
    handle.remove()
    seen = Seen()
    with seen.watching(), torch.no_grad():
        torch.compile(lambda x, w: F.relu(F.linear(x, w)).tan())(x, w)
    assert seen.count("_linear_activation") == 0


def test_inductors_cache_is_kept(tmp_path, monkeypatch) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, w = _tensors((M, K), (N, K))
    counted = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        with installed(), torch.no_grad():
            torch.compile(lambda x, w: F.relu(F.linear(x, w)).sinh())(x, w)
        counted.append({k: v for c in counters.values() for k, v in c.items() if "cache" in k})
    assert not any("bypass" in key for counts in counted for key in counts), counted
    assert any("hit" in key for key in counted[1]), counted


needs_choices = pytest.mark.skipif(
    not hasattr(inductor_config, "_cache_config_factory_keys"),
    reason="this torch pickles the factory of choices",
)


@needs_choices
@pytest.mark.parametrize("quicker", ["mm", "cubin_pytorchs_mm"])
def test_max_autotune_times_pytorchs_kernel_beside_ours(quicker, monkeypatch) -> None:
    timed: list[list[str]] = []

    def times(self, choices, *args, **kwargs):
        timed.append([choice.choice.name for choice in choices])
        return {choice: float(choice.choice.name != quicker) for choice in choices}

    monkeypatch.setattr(AlgorithmSelectorCache, "benchmark", times, raising=False)
    monkeypatch.setattr(AlgorithmSelectorCache, "make_benchmark_fn", lambda *a, **k: (
        lambda choices: times(None, choices)))  # fmt: skip
    torch._dynamo.reset()
    x, w = _tensors((M, K), (K, N))
    options = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}
    config = {**options, "fx_graph_cache": False, "autotune_local_cache": False}
    with torch.no_grad(), installed(), inductor_config.patch(config):
        compiled = torch.compile(lambda x, w: x @ w)
        torch.testing.assert_close(compiled(x, w), x @ w)
        torch_cubin.report(reset=True)
        _, (code,) = run_and_get_code(torch.compile(lambda x, w: x @ w), x, w)
        compiled(x, w)
        report = torch_cubin.report()
    assert ["mm", "cubin_pytorchs_mm"] in timed
    assert f"extern_kernels.{quicker}(" in code
    served = {row.function: row.calls for row in report.served}
    declined = {row.reason: row.calls for row in report.declined}
    if quicker == "mm":
        assert set(served) == {"aten::mm.out"}
        assert declined == {}
    else:
        assert served == {}
        assert set(declined) == {"measured by max-autotune to be quicker"}


@needs_choices
def test_max_autotune_times_pytorchs_kernel_of_every_product(monkeypatch) -> None:
    timed: dict[str, list[str]] = {}

    def times(self, choices, *args, **kwargs):
        names = [choice.choice.name for choice in choices]
        timed[names[0]] = names
        return {choice: float("pytorchs" not in choice.choice.name) for choice in choices}

    monkeypatch.setattr(AlgorithmSelectorCache, "benchmark", times, raising=False)
    monkeypatch.setattr(AlgorithmSelectorCache, "make_benchmark_fn", lambda *a, **k: (
        lambda choices: times(None, choices)))  # fmt: skip
    torch._dynamo.reset()
    x, w, s, xs, ws, ss = _tensors((M, K), (K, N), (M, N), (2, M, K), (2, K, N), (2, M, N))

    def products(x, w, s, xs, ws, ss):
        single = torch.mm(x, w).sin() + torch.addmm(s, x, w, beta=0.5)
        return single + torch.bmm(xs, ws).sin() + torch.baddbmm(ss, xs, ws, alpha=2)

    options = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}
    config = {**options, "fx_graph_cache": False, "autotune_local_cache": False}
    with torch.no_grad(), installed(), inductor_config.patch(config):
        want = products(x, w, s, xs, ws, ss)
        got, (code,) = run_and_get_code(torch.compile(products), x, w, s, xs, ws, ss)
    torch.testing.assert_close(got, want)
    for name in ("mm", "addmm", "bmm", "baddbmm"):
        assert f"cubin_pytorchs_{name}" in timed[name]
        assert f"extern_kernels.cubin_pytorchs_{name}(" in code
