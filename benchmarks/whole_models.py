"""Whole models (whole_model_cases.py), for bench_models.py --models: stock PyTorch, drop_in() and
install(), eager and compiled.

A cell is a case in a mode. Its contenders alternate; a cell's number is the median over the rounds.
Once install() has registered our kernels, other calls of that process pass through them, so stock
PyTorch runs in a process of its own (stock_process.py).

drop_in() around a compiled function changes what its extern kernels run, so its functions are
compiled outside. Under install() graphs are folded.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import common
import kernel_times
import stock_process
import torch
from served_share import share_of
from stock_process import AGAIN, StockProcess, on_the_same_cores
from torch import Tensor
from whole_model_cases import Case

import torch_cubin

DTYPE = torch.bfloat16
CONTENDERS: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "stock": contextlib.nullcontext,
    AGAIN: contextlib.nullcontext,
    "drop_in": torch_cubin.drop_in,
    "install": torch_cubin.install,
}
ROUNDS = 6
BLOCK_SECONDS = 0.06  # of a contender in a round, but at least one call


@dataclass
class Cell:
    model: str
    what: str  # "infer 8 x 2048"
    mode: str
    contender: str
    tokens_per_second: float
    ratio: float  # stock's time over this one's: the median, least and most of the rounds
    low: float
    high: float
    peak_bytes: int
    error: float  # of the outputs' mean, to the model in float32; nan in training and decoding
    served: float = float("nan")  # the part of the floating-point work that our kernels did
    left: dict[str, float] = field(default_factory=dict)  # the rest, by operator
    launches: int = 0  # of kernels, in a step of decoding


@dataclass
class Facts:
    """Of a contender's calls, before they are timed."""

    count: int  # calls of a block
    peak_bytes: int
    error: float
    served: float = float("nan")
    left: dict[str, float] = field(default_factory=dict)
    launches: int = 0


def process_of_stock(case: Case, device: torch.device, small: bool) -> StockProcess:
    """With a Runner of its own."""
    options = ["--models", "--device", str(device), *(["--small"] if small else [])]
    script = Path(__file__).with_name("bench_models.py")
    return StockProcess(script, *options, "--answer", str(case))


def answer(case: Case, device: torch.device) -> None:
    """What that process does."""
    runner = Runner(case, device)

    def found(do: str, *arguments: Any) -> Any:
        result = getattr(runner, do)(*arguments)
        return asdict(result) if isinstance(result, Facts) else result

    stock_process.answer(found)


def _output(result: Any) -> Tensor:
    if isinstance(result, Tensor):
        return result
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


def launches_of(call: Callable[[], object]) -> int:
    """The kernels of a call, also those of its CUDA graphs."""
    if not torch.cuda.is_available():
        return 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_gpu = [x for x in profile.events() if x.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not event.name.startswith("Mem") for event in on_gpu)


class Runner:
    """One case on one device, as calls without arguments."""

    def __init__(
        self, case: Case, device: torch.device, others: Mapping[str, StockProcess] | None = None
    ) -> None:
        """`others`: the contenders that have a process of their own."""
        torch.manual_seed(0)
        self.case, self.device, self.others = case, device, others or {}
        with device:
            self.model = case.build().to(device).train(case.what == "train")
        self.inputs = case.inputs(case.batch, case.length, device)
        self.reference: Tensor | None = None
        if case.what == "infer":
            self.reference = _output(self._infer()).float()
        self.model.to(DTYPE)
        self.inputs = {
            name: value.to(DTYPE) if isinstance(value, Tensor) and value.is_floating_point()
            else value
            for name, value in self.inputs.items()
        }  # fmt: skip
        self.run: Callable[[], Any] = {
            "infer": self._infer, "train": self._train, "decode": self._infer,
        }[case.what]  # fmt: skip
        if case.what == "decode":
            self._fill_cache()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # of the model in float32: other processes need it
        self._prepared: dict[str, dict[str, Callable[[], Any]]] = {}  # by mode, then contender

    @property
    def tokens(self) -> int:
        return self.case.batch * self.case.tokens_of_each

    def _infer(self) -> Any:
        with torch.no_grad():
            return self.model(**self.inputs)

    def _train(self) -> Any:
        self.model.zero_grad()
        _output(self.model(**self.inputs)).float().square().mean().backward()

    def _fill_cache(self) -> None:
        from transformers import StaticCache

        length = self.case.length
        cache = StaticCache(config=self.model.config, max_cache_len=length + 64)
        with torch.no_grad():
            self.model(input_ids=self.inputs["input_ids"], past_key_values=cache)
        at = torch.tensor([[length]], device=self.device).expand(self.case.batch, 1)
        self.inputs = {
            "input_ids": self.inputs["input_ids"][:, -1:].clone(),
            "past_key_values": cache,
            "position_ids": at,
        }

    def _empty_cache(self) -> None:
        """Forgets the steps after the prompt: a cache has its length in a tensor of each layer,
        which every step increments."""
        if self.case.what == "decode":
            for layer in self.inputs["past_key_values"].layers:
                layer.cumulative_length.fill_(self.case.length)

    def compiled(self, mode: str) -> Callable[[], Any]:
        """The call with the case's layers compiled. Each result of this has its own graphs."""
        from torch._inductor import compile_fx, list_mode_options

        patches = {} if mode == "default" else list_mode_options(mode)

        def backend(graph: Any, inputs: Any) -> Any:
            return compile_fx.compile_fx(graph, inputs, config_patches=patches)

        layers = self.case.layers(self.model)
        forwards = [torch.compile(layer.forward, backend=backend) for layer in layers]

        def call() -> Any:
            for layer, forward in zip(layers, forwards, strict=True):
                layer.forward = forward
            try:
                return self.run()
            finally:
                for layer in layers:
                    del layer.forward

        return call

    def captured(self) -> Callable[[], Any]:
        """A CUDA graph of the eager call."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            result = self.run()

        def call() -> Any:
            graph.replay()
            return result

        return call

    def block(self, call: Callable[[], Any], count: int) -> float:
        """Seconds of a call."""
        finish = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        self._empty_cache()
        call()
        finish()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        finish()
        return (time.perf_counter() - begin) / count

    def prepare(self, mode: str, contenders: list[str]) -> None:
        """Makes the calls that are measured, and compiles what they need."""
        own = [name for name in contenders if name not in self.others]
        waiting = []
        for name in contenders:
            if name in self.others:
                self.others[name].ask("prepare", mode, [name])
                if mode.startswith("max-autotune"):  # its timings, one process after the other
                    self.others[name].answer()
                else:
                    waiting.append(self.others[name])
        try:
            self._prepared[mode] = {name: self._prepared_call(mode, name) for name in own}
        finally:
            for other in waiting:
                other.answer()

    def _prepared_call(self, mode: str, name: str) -> Callable[[], Any]:
        within = name != "drop_in" or mode in ("graph", "reduce-overhead")
        with CONTENDERS[name]() if within else contextlib.nullcontext():
            if mode == "eager":
                call = self.run
            elif mode == "graph":
                call = self.captured()
            else:
                call = self.compiled(mode)
            self._empty_cache()
            call()
            return call

    def facts(self, mode: str, name: str) -> Facts:
        call = self._prepared[mode][name]
        with CONTENDERS[name]():
            self._empty_cache()
            result = call()
            call()  # CUDA graphs of Inductor are recorded at the second call
            error = self._error(result)
            del result
            memory = self._peak(call)
            seconds = self.block(call, 1)
            found = Facts(max(1, min(50, round(BLOCK_SECONDS / seconds))), memory, error)
            if mode == "eager" and name == "install":
                share = share_of(call)
                found.served, found.left = share.served, share.left
            if self.case.what == "decode":
                found.launches = launches_of(call)
            return found

    def seconds(self, mode: str, name: str, count: int) -> float:
        """Of a call, in a block of so many."""
        with CONTENDERS[name](), on_the_same_cores():
            return self.block(self._prepared[mode][name], count)

    def show_kernels(self, mode: str, name: str) -> None:
        with CONTENDERS[name]():
            self._empty_cache()
            title = f"{self.case}, {mode}, {name}"
            kernel_times.print_lines(title, self._prepared[mode][name])

    def forget(self, mode: str) -> None:
        self._prepared.pop(mode, None)

    def _of(self, do: str, mode: str, name: str, *args: Any) -> Any:
        """Of a contender, which may be in another process."""
        if name not in self.others:
            return getattr(self, do)(mode, name, *args)
        self.others[name].ask(do, mode, name, *args)
        return self.others[name].answer()

    def measured(self, mode: str, contenders: list[str], kernels: bool = False) -> Iterator[Cell]:
        if mode not in self._prepared:
            self.prepare(mode, contenders)
        found = {}
        for name in contenders:
            facts = self._of("facts", mode, name)
            found[name] = Facts(**facts) if isinstance(facts, dict) else facts
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(ROUNDS):
            for name in random.sample(contenders, len(contenders)):
                times[name].append(self._of("seconds", mode, name, found[name].count))
        for name, seconds in times.items():
            ratios = [a / b for a, b in zip(times[contenders[0]], seconds, strict=True)]
            case, facts = self.case, found[name]
            yield Cell(
                *(case.model, f"{case.what} {case.batch} x {case.length}", mode, name),
                self.tokens / statistics.median(seconds),
                *(statistics.median(ratios), min(ratios), max(ratios)),
                *(facts.peak_bytes, facts.error, facts.served, facts.left, facts.launches),
            )
        for name in contenders if kernels else ():
            self._of("show_kernels", mode, name)
        self.forget(mode)
        for other in self.others.values():
            other.ask("forget", mode)
            other.answer()

    def _peak(self, call: Callable[[], Any]) -> int:
        if self.device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated()

    def _error(self, result: Any) -> float:
        if self.reference is None:
            return float("nan")
        difference = (_output(result).float() - self.reference).abs().mean()
        return (difference / self.reference.abs().mean()).item()


def print_cells(cells: list[Cell], markdown: bool) -> None:
    rows = [
        [
            *(cell.model, cell.what, cell.mode, cell.contender),
            *(f"{cell.tokens_per_second:,.0f}", f"{cell.ratio:.3f}"),
            f"{cell.low:.2f}-{cell.high:.2f}",
            *(f"{cell.peak_bytes / 2**30:.2f}", f"{cell.error:.1e}", f"{cell.served:.3f}"),
            str(cell.launches or ""),
            ", ".join(f"{name} {part:.3f}" for name, part in cell.left.items()),
        ]
        for cell in cells
    ]
    headers = [
        "model",
        "",
        "mode",
        "",
        "tokens/s",
        "of stock",
        "rounds",
        "GiB",
        "error",
        "served",
        "launches",
    ]
    common.print_table([*headers, "left"], rows, markdown)
