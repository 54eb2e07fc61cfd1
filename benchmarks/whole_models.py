"""Whole models (whole_model_cases.py), for bench_models.py --models: stock PyTorch, drop_in() and
install(), eager and compiled.

A cell is a case in a mode. Each contender has processes of its own (benchmark_process.py), which
take turns in a random order. Short calls, which the host bounds, have three each; of a process its
quickest block counts, and the number is the median of the three. Others have one, and the number is
the median of its blocks, the ratio that of the rounds' ratios: a round's blocks run on one core.
How far stock PyTorch differs from itself stands in its own row.

drop_in() around a compiled function changes what its extern kernels run, so its functions are
compiled outside. Under install() graphs are folded.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import benchmark_process
import common
import kernel_times
import torch
from benchmark_process import BenchmarkProcess, on_cores_of
from served_share import share_of
from torch import Tensor
from whole_model_cases import Case

import torch_cubin

DTYPE = torch.bfloat16
CONTENDERS: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "stock": contextlib.nullcontext,
    "drop_in": torch_cubin.drop_in,
    "install": torch_cubin.install,
}
ROUNDS = 12
BLOCK_SECONDS = 0.06  # of a process in a round, but at least one call
SHORT_TOKENS = 128  # a call of no more is short
SHORT_PROCESSES, SHORT_ROUNDS, SHORT_BLOCK_SECONDS = 3, 16, 0.02


@dataclass
class Cell:
    model: str
    what: str  # "infer 8 x 2048"
    mode: str
    contender: str
    tokens_per_second: float
    ratio: float  # stock's time over this one's, and the least and most of any two numbers of them
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


def is_short(case: Case) -> bool:
    return case.batch * case.tokens_of_each <= SHORT_TOKENS


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

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, device
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
        self._prepared: dict[str, Callable[[], Any]] = {}  # by mode

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
        for _ in range(max(1, count // 2)):
            call()
        finish()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        finish()
        return (time.perf_counter() - begin) / count

    def prepare(self, mode: str, name: str) -> None:
        """Makes the call that is measured, and compiles what it needs."""
        self._prepared[mode] = self._prepared_call(mode, name)

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
            if self.device.type == "cuda" and mode in ("eager", "default"):
                torch.cuda.empty_cache()  # for other processes
            return call

    def facts(self, mode: str, name: str) -> Facts:
        call = self._prepared[mode]
        with CONTENDERS[name]():
            self._empty_cache()
            result = call()
            call()  # CUDA graphs of Inductor are recorded at the second call
            error = self._error(result)
            del result
            memory = self._peak(call)
            seconds = self.block(call, 1)
            wanted = SHORT_BLOCK_SECONDS if is_short(self.case) else BLOCK_SECONDS
            found = Facts(max(1, min(50, round(wanted / seconds))), memory, error)
            if mode in ("eager", "default") and name == "install":
                share = share_of(call)
                found.served, found.left = share.served, share.left
            if self.case.what == "decode":
                found.launches = launches_of(call)
            return found

    def seconds(self, mode: str, name: str, count: int, turn: int) -> float:
        """Of a call, in a block of so many."""
        with CONTENDERS[name](), on_cores_of(turn):
            return self.block(self._prepared[mode], count)

    def show_kernels(self, mode: str, name: str) -> dict[str, float]:
        with CONTENDERS[name]():
            self._empty_cache()
            title = f"{self.case}, {mode}, {name}"
            return kernel_times.print_lines(title, self._prepared[mode])

    def forget(self, mode: str, name: str) -> None:
        self._prepared.pop(mode, None)

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


def answer(case: Case, device: torch.device) -> None:
    """What a process of a contender does."""
    runner = Runner(case, device)

    def found(do: str, *arguments: Any) -> Any:
        result = getattr(runner, do)(*arguments)
        return asdict(result) if isinstance(result, Facts) else result

    benchmark_process.answer(found)


class Processes:
    """Those of a case's contenders, each with a Runner."""

    def __init__(
        self, case: Case, device: torch.device, small: bool, contenders: list[str]
    ) -> None:
        self.case = case
        self.tokens = case.batch * case.tokens_of_each
        self._short = is_short(case)
        options = ["--models", "--device", str(device), *(["--small"] if small else [])]
        script = Path(__file__).with_name("bench_models.py")
        self._of = {
            name: [
                BenchmarkProcess(script, *options, "--answer", str(case))
                for _ in range(SHORT_PROCESSES if self._short else 1)
            ]
            for name in contenders
        }

    def _each(self) -> list[tuple[str, BenchmarkProcess]]:
        return [(name, process) for name, those in self._of.items() for process in those]

    def prepare(self, mode: str) -> None:
        """At the same time, but for max-autotune: its timings, one process after the other. Of a
        contender's processes the first compiles, and the others read Inductor's cache."""
        if mode.startswith("max-autotune"):
            for name, process in self._each():
                process.get("prepare", mode, name)
            return
        firsts = [(name, those[0]) for name, those in self._of.items()]
        others = [pair for pair in self._each() if pair not in firsts]
        failures = []
        for together in (firsts, others):
            for name, process in together:
                process.ask("prepare", mode, name)
            for _, process in together:
                try:
                    process.answer()
                except RuntimeError as error:
                    failures.append(error)
        if failures:
            raise failures[0]

    def measured(self, mode: str, kernels: bool = False) -> Iterator[Cell]:
        """`prepare()` must have been called."""
        facts = {
            name: Facts(**processes[0].get("facts", mode, name))
            for name, processes in self._of.items()
        }
        blocks: dict[BenchmarkProcess, list[float]] = {p: [] for _, p in self._each()}
        for turn in range(SHORT_ROUNDS if self._short else ROUNDS):
            for name, process in random.sample(self._each(), len(blocks)):
                count = facts[name].count
                blocks[process].append(process.get("seconds", mode, name, count, turn))
        numbers = {
            name: [min(blocks[p]) for p in those] if self._short else blocks[those[0]]
            for name, those in self._of.items()
        }
        stock = next(iter(numbers.values()))
        for name, seconds in numbers.items():
            yield Cell(
                *(self.case.model, f"{self.case.what} {self.case.batch} x {self.case.length}"),
                *(mode, name, self.tokens / statistics.median(seconds)),
                self._ratio(stock, seconds),
                *(min(stock) / max(seconds), max(stock) / min(seconds)),
                **{key: value for key, value in asdict(facts[name]).items() if key != "count"},
            )
        if kernels:
            first, *others = (
                processes[0].get("show_kernels", mode, name) for name, processes in self._of.items()
            )
            for times in others:
                kernel_times.print_bounds(first, times)
        for name, process in self._each():
            process.get("forget", mode, name)

    def _ratio(self, stock: list[float], seconds: list[float]) -> float:
        if self._short:
            return statistics.median(stock) / statistics.median(seconds)
        return statistics.median(s / own for s, own in zip(stock, seconds, strict=True))

    def close(self) -> None:
        for _, process in self._each():
            process.close()


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
