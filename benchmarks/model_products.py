"""The products of models, forward and both gradients, compared with torch: in context and back to
back.

In context, each product reads the output of a preceding layer norm, as in a model: short products
then run at full clocks, with operands in the cache. The ratio compares the time of norms and
products minus the time of the norms alone. Back to back, long products run at the power limit.

A line is the median of the ratios of short rounds, with its interval (common.py). Lines whose
interval contains the goal's limit are measured for more rounds.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import bench_goals
import common
import numerics
import torch
import torch.nn.functional as F
from goals import MODELS as GOALS
from models import ModelProduct

from torch_cubin._tuning import measure
from torch_cubin._tuning.products import Product

# "dW, db": with the gradient of the bias, for which torch reads the incoming gradient again.
DIRECTIONS = ("forward", "dX", "dW", "dW, db")
CONTEXTS = ("in context", "back to back")
EFFORT = measure.Effort(settle_ms=20, rounds=20)
MORE, MOST_ROUNDS = measure.Effort(settle_ms=5, rounds=20), 80
ROTATED_BYTES = 240e6  # of all operand sets together: several times the L2 cache

Function = Callable[[torch.Tensor, torch.Tensor], Any]


@dataclass(frozen=True)
class Operands:
    """One set of operands. `incoming` is written by the norm before the product."""

    incoming: torch.Tensor
    other: torch.Tensor


@dataclass(frozen=True)
class Line:
    group: str
    case: str
    value: float  # torch's time over ours
    rate: float  # our TFLOP/s
    low: float  # the interval of the median
    high: float
    cubin_us: float
    torch_us: float
    config: str  # the planner's choice
    library: str  # the kernels that torch ran
    rounds: int


def shape_of(x: ModelProduct, direction: str) -> Product:
    """M, N, K and layout of the product."""
    sizes = {
        "forward": (x.tokens, x.outputs, x.inputs, "nt"),
        "dX": (x.tokens, x.inputs, x.outputs, "nn"),
        "dW": (x.outputs, x.inputs, x.tokens, "tn"),
    }
    m, n, k, layout = sizes[direction.split(",")[0]]
    return Product.of_layout(m, n, k, layout, "bfloat16")


def distinct(found: Sequence[ModelProduct], direction: str) -> list[ModelProduct]:
    """Products without duplicates; a bias only matters for the forward."""
    kept: dict[tuple[Product, bool], ModelProduct] = {}
    for x in found:
        if direction != "dW, db" or x.bias:
            kept.setdefault((shape_of(x, direction), x.bias and direction == "forward"), x)
    return list(kept.values())


def operand_sets(x: ModelProduct, direction: str) -> list[Operands]:
    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device="cuda", dtype=torch.bfloat16)

    sizes = {
        "forward": ((x.tokens, x.inputs), (x.outputs, x.inputs)),
        "dX": ((x.tokens, x.outputs), (x.outputs, x.inputs)),
        "dW": ((x.tokens, x.outputs), (x.tokens, x.inputs)),
    }
    incoming, other = sizes[direction.split(",")[0]]
    each = 2 * (math.prod(incoming) + math.prod(other))
    count = max(2, math.ceil(ROTATED_BYTES / each))
    return [Operands(normal(*incoming), normal(*other)) for _ in range(count)]


def functions_of(direction: str, bias: torch.Tensor | None) -> dict[str, Function]:
    """The functions by contender; the first argument is the norm's output."""
    linear, matmul = torch.ops.cubin.linear.default, torch.ops.cubin.matmul.default
    if direction == "forward":
        return {
            "torch": lambda a, w: F.linear(a, w, bias),
            "cubin": lambda a, w: linear(a, w, bias),
        }
    if direction == "dX":
        return {"torch": torch.matmul, "cubin": matmul}
    if direction == "dW":
        return {
            "torch": lambda g, a: torch.matmul(g.t(), a),
            "cubin": lambda g, a: matmul(g.t(), a),
        }
    both = torch.ops.cubin._weight_and_bias_gradient.default
    return {"torch": lambda g, a: (torch.matmul(g.t(), a), g.sum(0)), "cubin": both}


def library_kernels(function: Function, operands: Operands) -> str:
    """The kernels that a call of torch runs on the GPU."""
    function(operands.incoming, operands.other)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function(operands.incoming, operands.other)
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    events = [event for event in profile.events() if event.device_type == on_gpu]
    return " + ".join(event.name[:120] for event in events if "Activity" not in event.name)


def chosen_config(function: Function, operands: Operands, shape: Product) -> str:
    with measure.watching():
        function(operands.incoming, operands.other)
        return measure.plan_of(shape)["chosen"]


def measured(x: ModelProduct, direction: str, seed: int) -> Iterator[Line]:
    shape = shape_of(x, direction)
    sets = operand_sets(x, direction)
    bias = None
    if direction == "forward" and x.bias:
        bias = torch.randn(x.outputs, device="cuda", dtype=torch.bfloat16)
    functions = functions_of(direction, bias)
    width = sets[0].incoming.shape[-1]

    def norm(operands: Operands) -> torch.Tensor:
        return F.layer_norm(operands.incoming, (width,))

    calls: dict[str, list[Callable[[], Any]]] = {"norms": []}
    about_us = max(5.0, shape.flops / 600e6, shape.bytes / 4e6)
    order = list(itertools.islice(itertools.cycle(sets), repeats_of(about_us, len(sets))))
    calls["norms"] = [lambda s=s: norm(s) for s in order]
    for name, f in functions.items():
        calls[f"{name}, in context"] = [lambda s=s, f=f: f(norm(s), s.other) for s in order]
        calls[f"{name}, back to back"] = [lambda s=s, f=f: f(s.incoming, s.other) for s in order]
    graphs, outputs = {}, {}
    for name, run in calls.items():
        graphs[name], outputs[name] = common.graph_of(run)
    rounds = measure.rounds_of(graphs, len(order), EFFORT, seed)
    for context in CONTEXTS:
        check(direction, context, outputs, order[-1], norm, bias)
    limit = GOALS[f"models: {direction}, {CONTEXTS[0]}"].worst
    while len(rounds["norms"]) < MOST_ROUNDS and any(
        ratio.low < limit < ratio.high for ratio in ratios_of(rounds).values()
    ):
        more = measure.rounds_of(graphs, len(order), MORE, seed + len(rounds["norms"]))
        rounds = {name: times + more[name] for name, times in rounds.items()}
    config = chosen_config(functions["cubin"], sets[0], shape)
    library = library_kernels(functions["torch"], sets[0])
    for context, ratio in ratios_of(rounds).items():
        yield Line(
            *(f"models: {direction}, {context}", str(x), ratio.ratio),
            *(shape.flops / ratio.second_us / 1e6, ratio.low, ratio.high),
            *(ratio.second_us, ratio.first_us, config, library, len(rounds["norms"])),
        )


def ratios_of(rounds: Mapping[str, Sequence[float]]) -> dict[str, common.Ratio]:
    """By context: torch beside ours. The norms are bound by the memory, whose clock does not
    wander, so that one number serves all rounds."""
    norms = statistics.median(rounds["norms"])
    found = {}
    for context in CONTEXTS:
        less = norms if context == "in context" else 0
        pairs = zip(rounds[f"torch, {context}"], rounds[f"cubin, {context}"], strict=True)
        found[context] = common.summarise([(theirs - less, own - less) for theirs, own in pairs])
    return found


def repeats_of(about_us: float, sets: int) -> int:
    return sets * max(1, round(1500 / about_us / sets))


def check(
    direction: str,
    context: str,
    outputs: dict[str, Any],
    operands: Operands,
    norm: Callable[[Operands], torch.Tensor],
    bias: torch.Tensor | None,
) -> None:
    first = norm(operands) if context == "in context" else operands.incoming
    a = first.t() if direction.startswith("dW") else first
    b = operands.other.t() if direction == "forward" else operands.other
    ours, theirs = outputs[f"cubin, {context}"], outputs[f"torch, {context}"]
    if direction == "dW, db":
        numerics.check_close(ours[1], theirs[1], first.double().sum(0), "db")
        ours, theirs = ours[0], theirs[0]
    if bias is not None:
        bench_goals.check_epilogue("bias", ours, bias, a, b)
    else:
        bench_goals.check(ours, theirs, a, b)


def sweep_products(found: Sequence[ModelProduct], directions: Sequence[str]) -> list[Product]:
    """The products that `--sweep` measures: every config of each, the forward without its bias."""
    shapes = {
        shape_of(x, direction): None
        for direction in directions
        if direction != "dW, db"
        for x in found
    }
    return list(shapes)
