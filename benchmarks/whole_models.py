"""Whole models (whole_model_cases.py), for bench_models.py --models: stock PyTorch, drop_in() and
install(), eager and compiled.

A cell is a case in a mode. Its contenders alternate in one process; a cell's number is the median
over the rounds. Once install() has registered our kernels, stock's calls pass through them, at some
tenths of a microsecond a call (`--contenders stock` measures stock without that).

drop_in() around a compiled function changes what its extern kernels run, so stock and drop_in()
share one compiled function. Under install() graphs are folded, so it has its own.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import common
import torch
from served_share import Share, share_of
from torch import Tensor
from whole_model_cases import Case

import torch_cubin

DTYPE = torch.bfloat16
CONTENDERS: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "stock": contextlib.nullcontext,
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

    def calls(self, mode: str, contenders: list[str]) -> dict[str, Callable[[], Any]]:
        if mode == "eager":
            return dict.fromkeys(contenders, self.run)
        calls: dict[str, Callable[[], Any]] = {}
        for name in contenders:
            with CONTENDERS[name]():
                if mode == "graph":
                    calls[name] = self.captured()
                elif name == "drop_in" and "stock" in calls and not mode.startswith("reduce"):
                    calls[name] = calls["stock"]
                else:
                    calls[name] = self.compiled(mode)
        return calls

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
        """Compiles what measured() calls."""
        calls = self._prepared[mode] = self.calls(mode, contenders)
        for name, call in calls.items():
            with CONTENDERS[name]():
                self._empty_cache()
                call()

    def measured(
        self,
        mode: str,
        contenders: list[str],
        inspect: Callable[[str, Callable[[], object]], None] | None = None,
    ) -> Iterator[Cell]:
        """The cells; then calls `inspect` with each contender, entered, and its call."""
        if mode not in self._prepared:
            self.prepare(mode, contenders)
        calls = self._prepared.pop(mode)
        counts, memory, errors, shares, launches = {}, {}, {}, {}, {}
        for name, call in calls.items():
            with CONTENDERS[name]():
                self._empty_cache()
                result = call()
                call()  # CUDA graphs of Inductor are recorded at the second call
                errors[name] = self._error(result)
                del result
                memory[name] = self._peak(call)
                seconds = self.block(call, 1)
                counts[name] = max(1, min(50, round(BLOCK_SECONDS / seconds)))
                if mode == "eager" and name == "install":
                    shares[name] = share_of(call)
                launches[name] = launches_of(call) if self.case.what == "decode" else 0
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name in random.sample(list(calls), len(calls)):
                with CONTENDERS[name]():
                    times[name].append(self.block(calls[name], counts[name]))
        for name, seconds in times.items():
            ratios = [a / b for a, b in zip(times[contenders[0]], seconds, strict=True)]
            share = shares.get(name, Share(float("nan"), {}))
            case = self.case
            yield Cell(
                *(case.model, f"{case.what} {case.batch} x {case.length}", mode, name),
                self.tokens / statistics.median(seconds),
                *(statistics.median(ratios), min(ratios), max(ratios)),
                memory[name],
                errors[name],
                share.served,
                share.left,
                launches[name],
            )
        for name, call in calls.items() if inspect else ():
            with CONTENDERS[name]():
                self._empty_cache()
                inspect(name, call)

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
