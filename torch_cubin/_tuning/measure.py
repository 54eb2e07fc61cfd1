"""Times the configs of a product beside one another, on this GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from torch_cubin import errors
from torch_cubin._native import library
from torch_cubin._tuning.products import Operands, Product

TORCH = "torch.matmul"


RUN_MS = 1.5  # of a contender in a round


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long all contenders run before they are measured, and how often each is measured."""

    settle_ms: float = 20
    rounds: int = 15
    # A config is measured if its predicted time is at most `near` times the best, up to
    # `most_configs`.
    near: float = 1.6
    most_configs: int = 12


@dataclasses.dataclass(frozen=True)
class Times:
    """Microseconds of a product, a number for each round, by contender."""

    product: Product
    rounds: dict[str, list[float]]
    predicted: dict[str, float]
    chosen: str  # the library's default choice
    tuned: str = ""  # the choice of a tuned table

    def median(self, name: str) -> float:
        """Of the rounds, without what was slower or faster in a round for all contenders."""
        means = [
            statistics.geometric_mean(times) for times in zip(*self.rounds.values(), strict=True)
        ]
        own = zip(self.rounds[name], means, strict=True)
        return statistics.median(time / mean for time, mean in own) * statistics.median(means)

    def ratio(self, name: str, reference: str) -> float:
        """Speed of one contender over another's: the median of the rounds' ratios."""
        pairs = zip(self.rounds[reference], self.rounds[name], strict=True)
        return statistics.median(theirs / own for theirs, own in pairs)

    def best(self, least_gain: float = 0.01) -> str:
        """The quickest config; `chosen` unless another one is that much quicker in most rounds."""
        configs = [name for name in self.rounds if name != TORCH]
        if self.chosen not in configs:
            return min(configs, key=self.median)
        best = max(configs, key=lambda name: self.ratio(name, self.chosen))
        return best if self.ratio(best, self.chosen) > 1 + least_gain else self.chosen


@contextlib.contextmanager
def watching() -> Iterator[None]:
    library.watch_plans(True)
    try:
        yield
    finally:
        library.force_config("")
        library.watch_plans(False)


@contextlib.contextmanager
def float32_math(product: Product) -> Iterator[None]:
    """PyTorch's setting for float32 products, as the product was planned with."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = product.math == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# PyTorch's settings for sums of 16-bit products in fewer bits than float32; those of a reduction
# have a second part since 2.9, whether K may be split.
_NARROW_SUMS = (
    *("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"),
    "allow_fp16_accumulation",
)


@contextlib.contextmanager
def sums_in_float32() -> Iterator[None]:
    """PyTorch's products add in float32, in the whole process."""
    settings = torch.backends.cuda.matmul
    before: dict[str, Any] = {}
    for name in _NARROW_SUMS:
        if hasattr(settings, name):
            split_k = getattr(settings, f"{name}_split_k", None)
            value = getattr(settings, name)
            before[name] = value if split_k is None else (value, split_k)
    try:
        for name in before:
            setattr(settings, name, False)
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


def contenders(plan: dict[str, Any], effort: Effort) -> list[str]:
    """The configs of a recorded plan that are worth measuring."""
    configs = sorted(plan["configs"], key=lambda config: config["microseconds"])
    limit = effort.near * configs[0]["microseconds"]
    names = [config["name"] for config in configs if config["microseconds"] <= limit]
    names = names[: effort.most_configs]
    # Predictions of different kernels may not be comparable: the best config of each takes part.
    first_of: dict[str, str] = {}
    for config in configs:
        first_of.setdefault(config["name"].split(" ")[0], config["name"])
    for name in (*first_of.values(), plan["chosen"]):
        if name not in names:
            names.append(name)
    return names


def measure(
    product: Product, operands: Operands, effort: Effort, beside_torch: bool, seed: int = 0
) -> Times:
    """Times each contender as a CUDA graph over operands that together exceed the L2 cache. In each
    round they are interleaved in a random order."""
    with float32_math(product), watching(), torch.cuda.device(operands.device):
        sets = operands.sets(product)
        first = torch.ops.cubin.matmul(*sets[0])
        plan = plan_of(product)
        names = contenders(plan, effort)
        about = min(config["microseconds"] for config in plan["configs"])
        repeats = len(sets) * max(1, round(1500 / about / len(sets)))
        reference = reference_of(*sets[(repeats - 1) % len(sets)])
        graphs: dict[str, torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()  # of all: outputs of a vocabulary take gigabytes
        if beside_torch:
            graphs[TORCH], _ = _graph(torch.matmul, sets, repeats, pool)
        for name in names:
            library.force_config(name)
            graphs[name], last = _graph(torch.ops.cubin.matmul.default, sets, repeats, pool)
            library.force_config("")
            graphs[name].replay()
            if plan_of(product)["chosen"] != name:
                raise errors.fault("internal", f"product {product}", f"was not run by '{name}'")
            _check(product, name, last, reference)
        del first
        rounds = rounds_of(graphs, repeats, effort, seed)
        predicted = {config["name"]: config["microseconds"] for config in plan["configs"]}
        return Times(product, rounds, predicted, plan["chosen"], plan["tuned"])


def plan_of(product: Product) -> dict[str, Any]:
    """While watching(): of the plans so far, this product's."""
    for plan in library.watched_plans():
        if Product.of_plan(plan).line() == product.line():
            return plan
    raise errors.fault("internal", f"product {product}", "was planned as another product")


def _graph(
    function: Callable[..., torch.Tensor],
    sets: Sequence[tuple[Any, ...]],
    repeats: int,
    pool: Any = None,
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    function(*sets[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        outputs: list[torch.Tensor] = []
        for i in range(repeats):  # several outputs are alive: a single one would stay in the cache
            outputs = [*outputs[-min(4, len(sets)) :], function(*sets[i % len(sets)])]
    return graph, outputs[-1]


def reference_of(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """PyTorch's product with float32 sums. By default cuBLAS may round parts of K before it adds
    them: of 4096 x 768 x 50257 in bfloat16 that took the error from 0.009 x sqrt(K), which is that
    of rounding the result, to 0.036 and, of other data, past what _check() allows (H200)."""
    with sums_in_float32():
        return torch.matmul(a, b)


def _check(product: Product, name: str, out: torch.Tensor, reference: torch.Tensor) -> None:
    """Compares with PyTorch's product, so that no table names a kernel that is plainly wrong."""
    scale = math.sqrt(product.k)  # for normal data
    worst = (out.float() - reference.float()).abs().amax().item() / scale
    limit = {"16_bit": 0.05, "tf32": 0.01}.get(product.math, 1e-4)
    if not worst <= limit:
        raise errors.fault(
            *("internal", f"product {product}", f"is wrong when run by '{name}'"),
            expected=f"a difference of at most {limit} x sqrt(k)",
            got=f"{worst:.3g}",
        )


_Name = TypeVar("_Name")
_Events = tuple[torch.cuda.Event, torch.cuda.Event]


def rounds_of(
    graphs: dict[_Name, torch.cuda.CUDAGraph], repeats: int, effort: Effort, seed: int
) -> dict[_Name, list[float]]:
    """Microseconds of one of a graph's `repeats`, a number for each round, by contender.

    At the power limit the clocks wander by 10% and more within tens of milliseconds. A round is
    short, so that its contenders, in a random order, find the same clocks: compare within rounds.
    """
    once = {name: min(_milliseconds(graph, 1) for _ in range(2)) for name, graph in graphs.items()}
    counts = {name: max(1, round(RUN_MS / time)) for name, time in once.items()}
    of_round = sum(counts[name] * time for name, time in once.items())
    order = list(graphs)
    shuffle = random.Random(seed)
    events: dict[_Name, list[_Events]] = {name: [] for name in graphs}
    # Nothing waits between the rounds, so that the GPU is never idle.
    for number in range(-math.ceil(effort.settle_ms / of_round), effort.rounds):
        shuffle.shuffle(order)
        for name in order:
            recorded = _recorded(graphs[name], counts[name])
            if number >= 0:
                events[name].append(recorded)
    torch.cuda.synchronize()
    return {
        name: [
            start.elapsed_time(end) / counts[name] / repeats * 1e3 for start, end in events[name]
        ]
        for name in graphs
    }


def _recorded(graph: torch.cuda.CUDAGraph, count: int) -> _Events:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    return start, end


def _milliseconds(graph: torch.cuda.CUDAGraph, count: int) -> float:
    start, end = _recorded(graph, count)
    end.synchronize()
    return start.elapsed_time(end)
