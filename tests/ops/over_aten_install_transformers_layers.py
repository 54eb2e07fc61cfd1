"""install() under transformers: norms, gated layers and experts that its models write out are
served, or left to it, with the same results.

It is over 500 lines because each change that a program can make to a layer is a case.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from installed import installed
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import torch_cubin
from torch_cubin._drop_in import transformers_hooks, transformers_layers

NORM, GATED, EXPERTS = (
    *("transformers norm", "transformers gate_proj and up_proj", "transformers experts"),
)
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
IN_16_BITS = {"rtol": 0.05, "atol": 0.05}


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", "5.0")


@pytest.fixture(autouse=True)
def _few_rows_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are otherwise left."""
    monkeypatch.setattr(transformers_layers, "_ROWS_WITH_GRADIENTS", 1)


def llama(transformers: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def mixture(transformers: Any) -> nn.Module:
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **SIZES, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
        )
    )


class Layer:
    """A layer of a model, with random weights, and what it is called with."""

    def __init__(self, transformers: Any, name: str) -> None:
        torch.manual_seed(0)
        self.name = name
        block = (mixture if name == EXPERTS else llama)(transformers).model.layers[0]
        self.module: Any = {
            NORM: block.input_layernorm, GATED: block.mlp,
            EXPERTS: getattr(block.mlp, "experts", None),
        }[name]  # fmt: skip
        for parameter in self.module.parameters():
            nn.init.normal_(parameter, 1.0 if name == NORM else 0.0, 0.3)
        self.args: tuple[Any, ...] = (torch.randn(2 if name != EXPERTS else 6, 32),)
        if name != EXPERTS:
            self.args = (torch.randn(2, 3, 32),)
        else:
            self.args += (torch.randint(4, (6, 2)), torch.rand(6, 2))

    def __call__(self) -> Any:
        return self.module(*self.args)

    def to(self, dtype: torch.dtype) -> None:
        self.module.to(dtype)
        self.args = (self.args[0].to(dtype), *self.args[1:])

    def calls(self, call: Callable[[], Any] | None = None) -> tuple[Any, int, set[str]]:
        """The result under install(), how many calls were served, and the reasons of others."""
        with installed(), counting() as served:
            torch_cubin.report(reset=True)
            out = (call or self)()
            found = torch_cubin.report()
        calls = {row.function: row.calls for row in found.served}
        calls[NORM] = len(served)
        return (
            out,
            calls.get(self.name, 0),
            {row.reason for row in found.declined if row.function == self.name},
        )

    def check(
        self, call: Callable[[], Any] | None = None, served: int = 1, **tolerance: float
    ) -> None:
        """Under install() so many calls are served, with the results of transformers."""
        own = (call or self)()
        ours, calls, _ = self.calls(call)
        assert calls == served
        torch.testing.assert_close(ours, own, **tolerance)


@contextlib.contextmanager
def counting() -> Iterator[list[object]]:
    """The norms that are served, which report() counts on a GPU alone, as aten's."""
    calls: list[object] = []
    norm = F.rms_norm
    try:
        F.rms_norm = lambda *args: calls.append(args) or norm(*args)
        yield calls
    finally:
        F.rms_norm = norm


@pytest.fixture(params=[NORM, GATED, EXPERTS], ids=["norm", "gated", "experts"])
def layer(request: pytest.FixtureRequest, transformers: Any) -> Layer:
    return Layer(transformers, request.param)


def only(*names: str) -> pytest.MarkDecorator:
    """The test is for these layers alone."""
    return pytest.mark.parametrize("layer", names, indirect=True)


# --- served ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_served_until_remove(dtype: torch.dtype, layer: Layer) -> None:
    layer.to(dtype)
    own = layer()
    out, calls, reasons = layer.calls()
    assert (calls, reasons) == (1, set())
    torch.testing.assert_close(out, own, **(IN_16_BITS if dtype == torch.bfloat16 else {}))
    assert torch.equal(layer(), own)  # after remove()


def gradients(layer: Layer, call: Callable[[], Tensor] | None = None) -> list[Tensor]:
    tensors = [*layer.module.parameters(), *(x for x in layer.args if x.is_floating_point())]
    out = (call or layer)()
    return list(torch.autograd.grad(out.square().sum(), tensors))


def test_gradients(layer: Layer) -> None:
    for x in layer.args:
        x.requires_grad_(x.is_floating_point())
    own = gradients(layer)
    ours, calls, _ = layer.calls(functools.partial(gradients, layer))
    assert calls == 1
    torch.testing.assert_close(ours, own)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_of_a_checkpointed_layer(reentrant: bool, layer: Layer) -> None:
    for x in layer.args:
        x.requires_grad_(x.is_floating_point())

    def call() -> list[Tensor]:
        layer.module.zero_grad()
        out = checkpoint(layer.module, *layer.args, use_reentrant=reentrant)
        out.square().sum().backward()
        return [x.grad.clone() for x in layer.module.parameters()]

    layer.check(call, served=2)


def test_gradients_of_gradients(layer: Layer) -> None:
    layer.args[0].requires_grad_()

    def call() -> Tensor:
        (grad,) = torch.autograd.grad(layer().square().sum(), layer.args[:1], create_graph=True)
        return torch.autograd.grad(grad.square().sum(), layer.args[:1])[0]

    layer.check(call, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("case", ["copied", "pickled", "functional_call", "replaced", "no grad"])
def test_weights_are_those_of_the_call(case: str, layer: Layer) -> None:
    if case in ("copied", "pickled"):
        remake = copy.deepcopy if case == "copied" else lambda x: pickle.loads(pickle.dumps(x))
        layer.module = remake(layer.module)
    call: Callable[[], Tensor] = layer
    others = {name: x.detach() * 2 for name, x in layer.module.named_parameters()}
    if case == "functional_call":
        call = functools.partial(torch.func.functional_call, layer.module, others, layer.args)
    elif case == "replaced":
        layer()
        for name, other in others.items():
            module, _, last = name.rpartition(".")
            setattr(layer.module.get_submodule(module), last, nn.Parameter(other))
    with torch.set_grad_enabled(case != "no grad"):
        own = call()
        ours, calls, _ = layer.calls(call)
    assert calls == 1
    torch.testing.assert_close(ours, own)
    assert ours.requires_grad == own.requires_grad


def views(x: Tensor) -> Iterator[Tensor]:
    yield x[0, 0]
    yield x.transpose(0, 1)
    yield x[:, None].expand(2, 4, 3, 32)
    yield x.mT.contiguous().mT
    yield torch._neg_view(x)
    yield F.pad(x, (1, 0))[..., 1:]


@only(NORM, GATED)
@pytest.mark.parametrize("number", range(6))
def test_inputs_of_other_layouts(number: int, layer: Layer) -> None:
    layer.args = (list(views(*layer.args))[number],)
    layer.check()


@only(EXPERTS)
def test_experts_of_other_ranks_are_skipped(layer: Layer) -> None:
    """Their number is that of the experts, as transformers' expert parallelism routes."""
    layer.args[1][:, 0] = 4
    layer.args[2][:, 0] = 0.0
    layer.check()


@only(GATED)
def test_the_work_is_counted_as_without(layer: Layer) -> None:
    def work() -> int:
        with FlopCounterMode(display=False) as counted:
            layer()
        return counted.get_total_flops()

    own = work()
    assert layer.calls(work)[0] == own > 0


@pytest.mark.parametrize("build", [llama, mixture])
def test_models_have_the_same_logits_and_gradients(build: Any, transformers: Any) -> None:
    torch.manual_seed(0)
    model, ids = build(transformers), torch.randint(64, (2, 9))

    def call() -> list[Tensor]:
        model.zero_grad()
        out = model(ids, labels=ids)
        out.loss.backward()
        return [out.logits.detach(), *(x.grad for x in model.parameters() if x.grad is not None)]

    own = call()
    with installed():
        ours = call()
        declined = {row.function for row in torch_cubin.report().declined}
    assert not declined & {NORM, GATED, EXPERTS}
    torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-6)


# --- compiled, exported, traced ---


def test_compiled_layers(layer: Layer) -> None:
    """Experts are ours in the graph until remove(); the others are the fold pass's and Inductor's,
    whose graphs begin with what transformers writes, and are kept."""
    own = layer()
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(layer.module, fullgraph=True, backend=backend)
    ours, calls, _ = layer.calls(lambda: compiled(*layer.args))
    assert calls == 0
    assert any("moe" in target for target in targets) == (layer.name == EXPERTS)
    torch.testing.assert_close(ours, own)
    targets.clear()
    torch.testing.assert_close(compiled(*layer.args), own)
    assert bool(targets) == (layer.name == EXPERTS)
    assert not any("moe" in target for target in targets)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_layers_are_pytorchs(strict: bool, layer: Layer) -> None:
    with torch.no_grad():
        program, _, _ = layer.calls(
            lambda: torch.export.export(layer.module, layer.args, strict=strict)
        )
        assert not [node for node in program.graph.nodes if "cubin" in str(node.target)]
        torch.testing.assert_close(program.module()(*layer.args), layer())


@only(NORM, GATED)
def test_scripted_and_symbolically_traced_layers_are_transformers_own(layer: Layer) -> None:
    own, code = layer(), torch.fx.symbolic_trace(layer.module).code
    with installed():
        assert torch.fx.symbolic_trace(layer.module).code == code
        makers = [torch.fx.symbolic_trace]
        if layer.name == NORM:
            makers.append(torch.jit.script)
        for make in makers:
            torch.testing.assert_close(make(layer.module)(*layer.args), own)


# --- left to transformers ---


class Named(Tensor):
    """A subclass, as DTensor and those of quantised weights are."""


def transformed(case: str, layer: Layer) -> Callable[[], Any]:
    x, *rest = layer.args

    def call(x: Tensor) -> Tensor:
        return layer.module(x, *rest)

    if case == "vmap":
        return functools.partial(torch.func.vmap(call), x[None])
    if case == "jvp":
        return lambda: torch.func.jvp(call, (x,), (x,))[1]
    if case == "grad":
        return lambda: torch.func.grad(lambda x: call(x).sum())(x)
    return lambda: torch.jit.trace(call, (x,), check_trace=False)(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    ("layer", "case"),
    [
        *itertools.product((NORM, GATED), ("vmap", "jvp")),
        *itertools.product((NORM, GATED, EXPERTS), ("grad", "torch.jit.trace")),
    ],
    indirect=["layer"],
)
def test_transformed_calls_are_left(case: str, layer: Layer) -> None:
    call = transformed(case, layer)
    if case == "torch.jit.trace":
        layer.module.requires_grad_(False)
    own = call()
    ours, calls, reasons = layer.calls(call)
    assert calls == 0
    assert reasons == {case if case.startswith("torch") else "a transform of torch.func"}
    torch.testing.assert_close(ours, own)


def change_operands(case: str, layer: Layer) -> contextlib.AbstractContextManager[Any]:
    x, *rest = layer.args
    if case == "autocast":
        return torch.autocast("cpu", torch.bfloat16)
    if case == "float64":
        layer.to(torch.float64)
    elif case == "different dtypes":
        layer.args = (x.bfloat16(), *rest)
        layer.module.float() if layer.name == NORM else layer.module.bfloat16()
        if layer.name != NORM:
            first = next(layer.module.parameters())
            first.data = first.data.float()
    elif case == "subclass":
        layer.args = (x.as_subclass(Named), *rest)
    elif case == "weight of a subclass":
        module = layer.module.up_proj if layer.name == GATED else layer.module
        name = "down_proj" if layer.name == EXPERTS else "weight"
        setattr(module, name, nn.Parameter(getattr(module, name).as_subclass(Named)))
    elif case == "empty":
        layer.args = tuple(x[:0] for x in layer.args)
    return contextlib.nullcontext()


REASONS = {
    "autocast": "autocast",
    "float64": "dtype float64",
    "different dtypes": "different dtypes",
    "subclass": "tensor subclass Named",
    "weight of a subclass": "tensor subclass Named",
    "empty": "shapes that it does not take",
}


@pytest.mark.parametrize("case", REASONS)
def test_other_operands_are_left(case: str, layer: Layer) -> None:
    with change_operands(case, layer):
        try:
            own = layer()
        except RuntimeError:  # by transformers' products
            with contextlib.suppress(RuntimeError):
                assert layer.calls()[1] == 0
            return
        ours, calls, reasons = layer.calls()
    assert (calls, reasons) == (0, {REASONS[case]})
    assert type(ours) is type(own)
    torch.testing.assert_close(ours, own, **(IN_16_BITS if case == "autocast" else {}))


def test_the_policy_fastest_leaves_what_was_not_measured(layer: Layer) -> None:
    with installed("fastest"):
        torch_cubin.report(reset=True)
        layer()
        rows = {row.function: row.reason for row in torch_cubin.report().declined}
    assert rows[layer.name] == "not known to be quicker"


@only(NORM, GATED)
def test_other_arguments_are_transformers_own(layer: Layer) -> None:
    (x,), name = layer.args, "hidden_states" if layer.name == NORM else "x"
    own = layer()
    out, calls, _ = layer.calls(lambda: layer.module(**{name: x}))
    assert calls == 0
    torch.testing.assert_close(out, own)
    for args, options in (((), {}), ((x, x), {}), ((x,), {"other": 1})):
        with installed(), pytest.raises(TypeError):
            layer.module(*args, **options)


class Adapter(nn.Module):
    """As adapters wrap a layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.weight = layer, layer.weight
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + x.sum(-1, keepdim=True)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Subclass(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def add_hook(register: Any, seen: list[object]) -> Callable[[], None]:
    return register(lambda *args: seen.append(args) and None).remove


def change_product(
    case: str, mlp: Any, seen: list[object], patch: pytest.MonkeyPatch
) -> Callable[[], None]:
    """Changes one of the layer's two products; returns what ends the change for all modules."""
    up = mlp.up_proj
    if case == "bias":
        up.bias = nn.Parameter(torch.randn(48))
    elif case == "hook":
        add_hook(up.register_forward_hook, seen)
    elif case == "hook before":
        add_hook(up.register_forward_pre_hook, seen)
    elif case == "hook of gradients":
        add_hook(up.register_full_backward_hook, seen)
    elif case == "hook of all modules":
        return add_hook(nn.modules.module.register_module_forward_hook, seen)
    elif case == "hook before all modules":
        return add_hook(nn.modules.module.register_module_forward_pre_hook, seen)
    elif case == "forward of its own":
        up.forward = lambda x: F.linear(x, up.weight) * 2
    elif case == "adapter":
        mlp.up_proj = Adapter(up)
    elif case == "subclass":
        mlp.up_proj = Subclass(32, 48, bias=False)
    elif case == "parametrized":
        parametrize.register_parametrization(up, "weight", Doubled())
    elif case == "pruned":
        prune.random_unstructured(up, "weight", 0.5)
    elif case == "weight norm":
        nn.utils.weight_norm(up)
    elif case == "no module":
        del mlp.up_proj
        mlp.__dict__["up_proj"] = lambda x: up(x) * 2
    elif case == "nn.Linear.forward":
        patch.setattr(nn.Linear, "forward", lambda self, x: F.linear(x, self.weight) * 2)
    elif case == "F.linear":
        linear = F.linear
        patch.setattr(F, "linear", lambda *args: linear(*args) * 2)
    return lambda: None


PRODUCTS = (
    *("bias", "hook", "hook before", "hook of gradients", "hook of all modules"),
    *("hook before all modules", "forward of its own", "adapter", "subclass", "parametrized"),
    *("pruned", "weight norm", "no module", "nn.Linear.forward", "F.linear"),
)


@only(GATED)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("case", PRODUCTS)
def test_products_that_are_more_than_a_weight_are_left(
    case: str, layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    layer.args[0].requires_grad_()
    end = change_product(case, layer.module, seen, monkeypatch)
    try:

        def call() -> Tensor:
            out = layer()
            out.sum().backward()
            return out

        own, before = call(), len(seen)
        ours, calls, reasons = layer.calls(call)
        assert (calls, len(seen)) == (0, 2 * before)
        assert reasons == {"gate_proj or up_proj is no plain nn.Linear without a bias"}
        torch.testing.assert_close(ours, own)
    finally:
        end()


@only(GATED, EXPERTS)
@pytest.mark.parametrize("case", ["hook", "forward", "another", "function"])
def test_other_activations_are_left(case: str, layer: Layer) -> None:
    seen: list[object] = []
    activation = layer.module.act_fn
    if case == "hook":
        add_hook(activation.register_forward_hook, seen)
    elif case == "forward":
        activation.forward = torch.tanh
    else:
        del layer.module.act_fn
        layer.module.act_fn = nn.Tanh() if case == "another" else torch.tanh
    own = layer()
    ours, calls, reasons = layer.calls()
    assert (calls, len(reasons), len(seen)) == (0, 1, 2 * (case == "hook"))
    torch.testing.assert_close(ours, own)


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh", "relu", "silu"])
@only(GATED, EXPERTS)
def test_activations_that_our_ops_know(name: str, layer: Layer, transformers: Any) -> None:
    layer.module.act_fn = transformers.activations.ACT2FN[name]
    layer.check()


@only(GATED)
def test_a_sparse_weight_is_left(layer: Layer) -> None:
    layer.module.up_proj.weight = nn.Parameter(layer.module.up_proj.weight.to_sparse_coo())
    layer.args = (layer.args[0][0],)
    own = layer()
    ours, calls, reasons = layer.calls()
    assert (calls, reasons) == (0, {"layout sparse_coo"})
    torch.testing.assert_close(ours, own)


@only(GATED)
@pytest.mark.parametrize("grad", [False, True])
def test_few_rows_with_gradients_are_left(
    grad: bool, layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_layers, "_ROWS_WITH_GRADIENTS", 7)
    with torch.set_grad_enabled(grad):
        _, calls, reasons = layer.calls()
        assert (calls, reasons) == (
            not grad,
            {"fewer than 7 rows with gradients"} if grad else set(),
        )
        layer.args = (torch.randn(7, 32),)
        assert layer.calls()[1] == 1


@pytest.mark.parametrize("switch", ["install", "thread"])
def test_batch_invariant_rows_have_the_same_bits_with_few_rows_and_with_gradients(
    switch: str, layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_layers, "_ROWS_WITH_GRADIENTS", 5)
    layer.to(torch.bfloat16)
    args = [x.flatten(0, -2) for x in layer.args]
    with contextlib.ExitStack() as stack:
        stack.enter_context(installed())
        if switch == "install":
            stack.enter_context(torch_cubin.install(batch_invariant=True))
        else:
            stack.enter_context(torch_cubin.batch_invariant())
        many, few = layer.module(*args), layer.module(*(x[:3] for x in args))
        with torch.no_grad():
            without = layer.module(*args)
        left = {row.function for row in torch_cubin.report().declined}
    assert (layer.name in left) == (layer.name == GATED)
    assert torch.equal(many[:3], few)
    assert torch.equal(many, without)


@only(NORM)
def test_an_epsilon_that_is_no_float_is_left(layer: Layer) -> None:
    layer.module.variance_epsilon = torch.tensor(1e-6)
    layer.check(served=0)


@only(EXPERTS)
def test_experts_of_transformers_5_0_have_fewer_attributes(layer: Layer) -> None:
    own = layer()
    del layer.module.has_gate, layer.module.is_concatenated
    ours, calls, _ = layer.calls()
    assert calls == 1
    torch.testing.assert_close(ours, own)


@only(EXPERTS)
@pytest.mark.parametrize("case", ["gate", "interleaved", "biases", "int16", "gate of its own"])
def test_other_experts_are_left(case: str, layer: Layer) -> None:
    module = layer.module
    if case == "int16":
        layer.args = (layer.args[0], layer.args[1].to(torch.int16), layer.args[2])
    elif case == "gate of its own":
        module._apply_gate = lambda rows: rows.chunk(2, -1)[0]
    elif case == "interleaved":
        module.is_concatenated = False
    elif case == "biases":
        module.has_bias = True
        module.gate_up_proj_bias = nn.Parameter(torch.randn(4, 32))
        module.down_proj_bias = nn.Parameter(torch.randn(4, 32))
    else:
        layer.module = module = copy.deepcopy(module)
        module.__class__ = type(
            "Own", (type(module),), {"_apply_gate": lambda self, rows: rows.chunk(2, -1)[1]}
        )
    try:
        own = layer()
    except (RuntimeError, IndexError) as error:
        with pytest.raises(type(error)):
            layer.calls()
        return
    ours, calls, reasons = layer.calls()
    assert (calls, len(reasons)) == (0, 1)
    torch.testing.assert_close(ours, own)


# --- which classes are wrapped ---

WRITTEN = """
import torch
from torch import nn
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(32)), 1e-6
    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)
class Derived(Norm):
    def forward(self, hidden_states):
        return super().forward(hidden_states) * 2
"""
DOCUMENTED = WRITTEN.replace("input_dtype =", '"""Of transformers 4."""\n        input_dtype =')


def module_of(source: str, name: str = "transformers.models.some.modeling_some") -> Any:
    module = types.ModuleType(name)
    exec(source, module.__dict__)
    own = vars(module.Norm)["forward"]
    transformers_layers._wrap_layers(module)
    return module, vars(module.Norm)["forward"] is not own


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("mean(-1", "mean(-2"),
        ("pow(2)", "pow(3)"),
        ("self.weight *", "(1 + self.weight) *"),
        ("torch.rsqrt(", "torch.sqrt("),
        ("torch.float32", "torch.float64"),
        ("(self, hidden_states):\n        input", "(self, *, hidden_states):\n        input"),
        ("(self, hidden_states):\n        input", "(self, hidden_states, *more):\n        input"),
        (
            "    def forward(self, hidden_states):\n        i",
            "    async def forward(self, hidden_states):\n        i",
        ),
        ("import torch\n", "import torch\nown, torch = torch, type('T', (), dict(vars(torch)))\n"),
    ],
)
def test_a_forward_that_computes_something_else_stays(before: str, after: str) -> None:
    assert before in WRITTEN
    assert not module_of(WRITTEN.replace(before, after, 1))[1]


def test_a_class_of_another_module_stays() -> None:
    module = types.ModuleType("transformers.models.some.modeling_some")
    exec(WRITTEN, {"torch": torch, "__name__": "elsewhere"}, module.__dict__)
    own = vars(module.Norm)["forward"]
    transformers_layers._wrap_layers(module)
    assert vars(module.Norm)["forward"] is own


@pytest.mark.parametrize("source", [WRITTEN, DOCUMENTED])
def test_a_derived_layers_forward_calls_ours(source: str) -> None:
    transformers_hooks.add(transformers_layers.HOOKS)
    module, wrapped = module_of(source)
    assert wrapped
    norm, x = module.Derived(), torch.randn(3, 32)
    own = norm(x)
    with installed(), counting() as served:
        torch.testing.assert_close(norm(x), own)
    assert len(served) == 1


def test_a_forward_that_a_program_replaces_is_its_own(transformers: Any) -> None:
    """On the instance, as kernels of the hub do, and on the class."""
    layer = Layer(transformers, NORM)
    layer.module.forward = types.MethodType(lambda self, x: x * 3, layer.module)
    out, calls, _ = layer.calls()
    assert calls == 0
    assert torch.equal(out, layer.args[0] * 3)


def test_experts_of_the_programs_own_are_not_replaced(transformers: Any, monkeypatch: Any) -> None:
    from transformers.integrations import moe

    interface = moe.ALL_EXPERTS_FUNCTIONS
    monkeypatch.setattr(interface, "_local_mapping", {"grouped_mm": print})
    transformers_layers._wrap_experts(moe)
    assert interface.get("grouped_mm") is print
