"""Whole models of transformers with random weights, for bench_models.py --models: stock PyTorch,
drop_in() and install(), eager and compiled.

A cell is a model, what it does, and a mode. Contenders are measured one after the other, each twice
in opposite orders, since torch.compile shares its cache between them and is reset in between. The
error is that of the outputs against the same model in float32.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import common
import torch
from torch import Tensor, nn

import torch_cubin

DTYPE = torch.bfloat16
CONTENDERS: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "stock": contextlib.nullcontext,
    "drop_in": torch_cubin.drop_in,
    "install": torch_cubin.install,
}
MODES = ("eager", "default", "reduce-overhead", "max-autotune")
CALLS = 5


@dataclass
class Cell:
    model: str
    what: str  # "infer 8 x 2048", "train 4 x 2048", "decode 16"
    mode: str
    contender: str
    tokens_per_second: float
    ratio: float  # to stock
    peak_bytes: int
    error: float  # relative, in the mean; of inference alone


@dataclass
class Work:
    """A model, what it is called with, and its size."""

    name: str
    build: Callable[[], nn.Module]
    what: str
    batch: int
    length: int
    inputs: Callable[[int, int, torch.device], dict[str, Tensor]]
    tokens: int = 0  # of each element of the batch, where they are not its length

    @property
    def trains(self) -> bool:
        return self.what == "train"


def _ids(vocabulary: int) -> Callable[[int, int, torch.device], dict[str, Tensor]]:
    return lambda batch, length, device: {
        "input_ids": torch.randint(vocabulary, (batch, length), device=device)
    }


def _padded_ids(batch: int, length: int, device: torch.device) -> dict[str, Tensor]:
    lengths = torch.linspace(length // 4, length, batch, device=device).long()
    mask = torch.arange(length, device=device) < lengths[:, None]
    return {**_ids(1000)(batch, length, device), "attention_mask": mask.long()}


def _pixels(batch: int, length: int, device: torch.device) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, length, length, device=device)}


def _sound(batch: int, length: int, device: torch.device) -> dict[str, Tensor]:
    return {"input_features": torch.randn(batch, 80, length, device=device)}


def works(small: bool) -> Iterator[Work]:
    """`small`: for a test without a GPU."""
    import transformers as t

    def sized(**sizes: int) -> dict[str, int]:
        return {name: 32 if small else size for name, size in sizes.items()}

    layers = 1 if small else None
    heads = {"num_attention_heads": 2} if small else {}
    llama = t.LlamaConfig(
        vocab_size=1000 if small else 32000, num_hidden_layers=layers or 16,
        num_attention_heads=2 if small else 32, num_key_value_heads=2 if small else 8,
        **sized(hidden_size=2048, intermediate_size=8192),
    )  # fmt: skip
    bert = t.BertConfig(
        num_hidden_layers=layers or 12, **sized(hidden_size=768, intermediate_size=3072), **heads
    )
    vit = t.ViTConfig(
        num_hidden_layers=layers or 24, num_attention_heads=2 if small else 16,
        **sized(hidden_size=1024, intermediate_size=4096),
    )  # fmt: skip
    whisper = t.WhisperConfig(
        encoder_layers=layers or 12, encoder_attention_heads=2 if small else 12,
        **sized(d_model=768, encoder_ffn_dim=3072),
    )  # fmt: skip
    moe = t.Qwen3MoeConfig(
        num_hidden_layers=layers or 8, num_experts=4 if small else 32, num_experts_per_tok=2,
        num_attention_heads=2 if small else 16, num_key_value_heads=2 if small else 4,
        vocab_size=1000 if small else 32000, head_dim=16 if small else 64,
        **sized(hidden_size=1024, intermediate_size=3072, moe_intermediate_size=768),
    )  # fmt: skip
    long = 16 if small else 2048
    whole = [("infer", 8, long), ("train", 4, long), ("infer", 1, 128), ("train", 1, 128)]
    whole = [(what, 1 if small else batch, min(length, long)) for what, batch, length in whole]
    for what, batch, length in whole:
        build = lambda: t.LlamaForCausalLM(llama)  # noqa: E731
        yield Work("Llama 1 B", build, what, batch, length, _ids(1000))
    for batch in (1,) if small else (1, 16, 64):
        yield Work("Llama 1 B", lambda: t.LlamaForCausalLM(llama), "decode", batch, 8, _ids(1000))
    side, few = 224, 1 if small else 32
    yield Work("BERT-base", lambda: t.BertModel(bert), "infer", few, min(512, long), _padded_ids)
    yield Work("ViT-L", lambda: t.ViTModel(vit), "infer", few, side, _pixels, (side // 16) ** 2 + 1)
    encoder = lambda: t.models.whisper.modeling_whisper.WhisperEncoder(whisper)  # noqa: E731
    yield Work("Whisper", encoder, "infer", 1 if small else 8, 3000, _sound, 1500)
    yield Work("Qwen3-MoE", lambda: t.Qwen3MoeForCausalLM(moe), "infer", few, min(512, long),
               _ids(1000))  # fmt: skip


def _output(result: Any) -> Tensor:
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


class _Runner:
    """One work on one device, as a call without arguments."""

    def __init__(self, work: Work, device: torch.device) -> None:
        torch.manual_seed(0)
        self.work, self.device = work, device
        self.model = work.build().to(device).train(work.trains)
        self.inputs = work.inputs(work.batch, work.length, device)
        self.reference = None if work.trains else _output(self._infer(self.model)).float()
        self.model.to(DTYPE)
        self.inputs = {
            name: value.to(DTYPE) if value.is_floating_point() else value
            for name, value in self.inputs.items()
        }
        of_each = 1 if work.what == "decode" else work.tokens or work.length
        self.tokens = work.batch * of_each

    def _infer(self, function: Callable[..., Any]) -> Any:
        with torch.no_grad():
            return function(**self.inputs)

    def call(self, mode: str) -> Callable[[], Any]:
        """The timed call: a step of training, a forward, or the next token after a prompt."""
        function: Any = self.model
        if mode != "eager":
            function = torch.compile(self.model, mode=None if mode == "default" else mode)
        if self.work.trains:
            return lambda: self._train(function)
        if self.work.what == "decode":
            return self._decode(function)
        return lambda: self._infer(function)

    def _train(self, function: Callable[..., Any]) -> None:
        self.model.zero_grad()
        _output(function(**self.inputs)).float().square().mean().backward()

    def _decode(self, function: Callable[..., Any]) -> Callable[[], Any]:
        from transformers import StaticCache

        cache = StaticCache(config=self.model.config, max_cache_len=64)
        last = self.inputs["input_ids"][:, -1:]
        at = torch.tensor([self.work.length], device=self.device)
        with torch.no_grad():
            self.model(**self.inputs, past_key_values=cache)

        def step() -> Any:
            with torch.no_grad():
                positions = at[None].expand(self.work.batch, 1)
                return function(last, past_key_values=cache, position_ids=positions)

        return step

    def measure(self, mode: str, enter: Callable[..., Any]) -> tuple[float, int, float]:
        """Seconds of a call, the peak of memory, and the error."""
        torch._dynamo.reset()
        cuda = self.device.type == "cuda"
        synchronize = torch.cuda.synchronize if cuda else lambda: None
        with enter():
            call = self.call(mode)
            for _ in range(3):
                result = call()
            error = float("nan")
            if self.reference is not None and self.work.what == "infer":
                difference = (_output(result).float() - self.reference).abs().mean()
                error = (difference / self.reference.abs().mean()).item()
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            times = []
            for _ in range(CALLS):
                synchronize()
                begin = time.perf_counter()
                call()
                synchronize()
                times.append(time.perf_counter() - begin)
            return statistics.median(times), torch.cuda.max_memory_allocated() if cuda else 0, error


def measured(work: Work, modes: list[str], device: torch.device) -> Iterator[Cell]:
    runner = _Runner(work, device)
    what = f"{work.what} {work.batch} x {work.length}"
    for mode in modes:
        order = [*CONTENDERS, *reversed(CONTENDERS)]
        found: dict[str, list[tuple[float, int, float]]] = {name: [] for name in CONTENDERS}
        for name in order:
            found[name].append(runner.measure(mode, CONTENDERS[name]))
        stock = min(seconds for seconds, *_ in found["stock"])
        for name, results in found.items():
            seconds, memory, error = min(results)
            yield Cell(work.name, what, mode, name, runner.tokens / seconds, stock / seconds,
                       memory, error)  # fmt: skip


def print_cells(cells: list[Cell], markdown: bool) -> None:
    rows = [
        [
            *(cell.model, cell.what, cell.mode, cell.contender),
            *(f"{cell.tokens_per_second:,.0f}", f"{cell.ratio:.2f}"),
            *(f"{cell.peak_bytes / 2**30:.2f}", f"{cell.error:.1e}"),
        ]
        for cell in cells
    ]
    headers = ["model", "", "mode", "", "tokens/s", "of stock", "GiB", "error"]
    common.print_table(headers, rows, markdown)
