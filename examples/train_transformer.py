"""Trains a small transformer on Python sources, with stock PyTorch and with kernels from cubins.

    python examples/train_transformer.py                     # on the GPU if there is one
    python examples/train_transformer.py --size large        # 200 million parameters, half a minute
    python examples/train_transformer.py --size long         # with 16,384 characters, heads of 64
    python examples/train_transformer.py --dtype float32
    python examples/train_transformer.py --optimizer muon    # torch.optim.Muon for the matrices
    python examples/train_transformer.py --json FILE         # both curves and the times
    python examples/train_transformer.py --float8            # layers of torch_cubin.float8
    python examples/train_transformer.py --device cpu        # a smaller model, half a minute

The same model (nn.Linear, F.scaled_dot_product_attention, no torch_cubin) is trained twice from the
same seed on the same batches, interleaved, once inside `torch_cubin.drop_in()`: every product and
attention, forward and backward, then runs through torch.ops.cubin. The program prints both losses
and speeds, plots both losses, and lists the served calls. Small models are bound by the host; use
`--size large` to see the speed of the kernels. The text is the source of a few modules of Python's
standard library. The exit status says whether the curves agree: means of ten steps within 1% in
float32 and 3% in bfloat16, whose rounding errors grow in training. With --float8 the second model's
blocks multiply 8-bit floats, forward and backward, and the curves agree within 5%.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import inspect
import json
import platform
import statistics
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# The checkout's torch_cubin, unless one is installed.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch_cubin

TEXT = (argparse, difflib, inspect, statistics, textwrap)  # modules; about 350,000 characters
PLOT = Path(__file__).resolve().parents[1] / ".cache" / "train_transformer.png"
WITHIN = {torch.float32: 0.01, torch.bfloat16: 0.03}  # fraction of the stock loss
WITHIN_FLOAT8 = 0.05
BLOCK = 10  # steps
ATTENTION = "scaled_dot_product"  # a part of the names of F's function and of aten's


@dataclasses.dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    context: int  # characters
    batch: int
    steps: int
    rate: float = 2e-3

    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.context


SIZES = {
    "cuda": Size(4, 256, 4, 256, 32, 400),
    "cpu": Size(2, 64, 2, 64, 8, 200),
    "large": Size(4, 2048, 16, 8192, 2, 60, rate=2e-4),
    "long": Size(4, 2048, 32, 16384, 1, 60, rate=2e-4),
}


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # (batch, heads, rows, dim)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


class Transformer(nn.Module):
    """Logits of the next character at each position."""

    def __init__(self, characters: int, size: Size) -> None:
        super().__init__()
        self.what = nn.Embedding(characters, size.width)
        self.where = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, characters)

    def forward(self, text: Tensor) -> Tensor:
        x = self.what(text) + self.where.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def corpus() -> tuple[Tensor, int]:
    """The text as character indices, and the number of different characters."""
    text = "".join(map(inspect.getsource, TEXT))
    characters = sorted(set(text))
    number = {character: i for i, character in enumerate(characters)}
    return torch.tensor([number[character] for character in text]), len(characters)


class Timer:
    """Milliseconds from its construction to stop(), on the GPU if the device is one."""

    def __init__(self, device: str) -> None:
        self._events: list[torch.cuda.Event] = []
        if device.startswith("cuda"):
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()
        self._seconds = time.perf_counter()

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._seconds
        if self._events:
            self._events[1].record()

    def milliseconds(self) -> float:
        if self._events:
            return self._events[0].elapsed_time(self._events[1])
        return self._seconds * 1e3


def optimizers_of(model: Transformer, name: str, rate: float) -> list[torch.optim.Optimizer]:
    """AdamW; or Muon for the matrices of the blocks, and AdamW for the rest."""
    if name == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=rate)]
    matrices = [x for x in model.blocks.parameters() if x.ndim == 2]
    taken = set(map(id, matrices))
    rest = [x for x in model.parameters() if id(x) not in taken]
    muon = torch.optim.Muon(matrices, lr=rate, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=rate)]


class Training:
    """A model and its training steps. All random numbers come from one seed, on the CPU."""

    def __init__(self, size: Size, device: str, dtype: torch.dtype, optimizer: str) -> None:
        torch.manual_seed(0)
        text, characters = corpus()
        self.size, self.device = size, device
        self.text = text.to(device)
        self.window = torch.arange(size.context + 1)
        self.draw = torch.Generator().manual_seed(1)
        self.model = Transformer(characters, size).to(device)
        self.optimizers = optimizers_of(self.model, optimizer, size.rate)
        self.optimizer_times: list[Timer] = []
        self.lowered = torch.autocast(
            torch.device(device).type, dtype, enabled=dtype != torch.float32
        )
        self.losses: list[Tensor] = []  # read at the end, to avoid synchronization
        self.block_times: list[float] = []  # milliseconds a step

    def run(self, steps: int) -> None:
        """Runs one block of `steps` steps."""
        _finish(self.device)
        begin = time.perf_counter()
        for _ in range(steps):
            self.losses.append(self.step())
        _finish(self.device)
        self.block_times.append((time.perf_counter() - begin) * 1e3 / steps)

    def step(self) -> Tensor:
        size = self.size
        starts = torch.randint(len(self.text) - size.context, (size.batch, 1), generator=self.draw)
        batch = self.text[(starts + self.window).to(self.device)]
        with self.lowered:
            logits = self.model(batch[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        self.model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer_times.append(Timer(self.device))
        for optimizer in self.optimizers:
            optimizer.step()
        self.optimizer_times[-1].stop()
        return loss.detach()

    def curve(self) -> list[float]:
        return torch.stack(self.losses).tolist()

    def milliseconds(self) -> float:
        """Milliseconds per step: the median over the blocks, without the first."""
        return statistics.median(self.block_times[1:] or self.block_times)

    def optimizer_milliseconds(self) -> float:
        """Milliseconds of the optimizers in a step: the median, without the first block."""
        times = [timer.milliseconds() for timer in self.optimizer_times]
        return statistics.median(times[BLOCK:] or times)


def train_interleaved(
    size: Size, device: str, dtype: torch.dtype, optimizer: str, float8: bool = False
) -> tuple[Training, Training, list[torch_cubin.Report]]:
    """Alternates ten steps of stock PyTorch and of drop_in(), because a warm GPU gets slower.

    Also returns the report of each block of drop_in().
    """
    stock, served = (Training(size, device, dtype, optimizer) for _ in range(2))
    if float8:  # its layers share their parameters with the optimizers
        torch_cubin.float8(served.model.blocks, training=True)
    reports = []
    left = size.steps
    while left > 0:
        steps = min(BLOCK, left)
        stock.run(steps)
        with torch_cubin.drop_in():
            served.run(steps)
        reports.append(torch_cubin.report())
        left -= steps
    return stock, served, reports


@contextlib.contextmanager
def _threads_for(device: str) -> Iterator[None]:
    """One thread on the CPU: layers this small do not gain from a second one."""
    before = torch.get_num_threads()
    if not device.startswith("cuda"):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _finish(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def largest_difference(stock: list[float], served: list[float], mean: int) -> float:
    """Difference between the curves' means over `mean` steps, as a fraction of the stock loss."""
    count = max(len(stock) // mean, 1)
    parts = [slice(i * mean, (i + 1) * mean) for i in range(count)]
    pairs = [(statistics.mean(stock[part]), statistics.mean(served[part])) for part in parts]
    return max(abs(a - b) / a for a, b in pairs)


def text_plot(curves: dict[str, list[float]], width: int = 76, height: int = 18) -> str:
    """Both curves in characters; `#` where they overlap."""
    top, bottom = (f(map(f, curves.values())) for f in (max, min))
    canvas = [[" "] * width for _ in range(height)]
    for mark, losses in zip("o+", curves.values(), strict=True):
        for column in range(width):
            loss = losses[column * len(losses) // width]
            row = round((top - loss) / max(top - bottom, 1e-9) * (height - 1))
            canvas[row][column] = mark if canvas[row][column] == " " else "#"
    lines = ["".join(row).rstrip() for row in canvas]
    lines[0] = f"{top:7.3f} |{lines[0]}"
    lines[-1] = f"{bottom:7.3f} |{lines[-1]}"
    lines[1:-1] = [f"{'':7} |{line}" for line in lines[1:-1]]
    names = ", ".join(f"{mark} {name}" for mark, name in zip("o+", curves, strict=True))
    return "\n".join([*lines, f"{'':8} loss by step: {names}, # both"])


def plot(curves: dict[str, list[float]], path: Path) -> None:
    """Writes a PNG if matplotlib is installed; prints a plot of characters in any case."""
    print(f"\n{text_plot(curves)}\n")
    with contextlib.suppress(ImportError):
        import matplotlib.figure

        figure = matplotlib.figure.Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        for (name, losses), style in zip(curves.items(), ("-", "--"), strict=True):
            axes.plot(losses, style, label=name)
        axes.set(xlabel="step", ylabel="loss")
        axes.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        print(f"The plot: {path}\n")


def write_json(path: Path, options: argparse.Namespace, stock: Training, served: Training) -> None:
    """Both curves, and times as ratios: above 1, drop_in() is faster."""
    kind = torch.device(options.device).type
    device = torch.cuda.get_device_name() if kind == "cuda" else platform.machine()
    times = {
        "step of the optimizer": [x.optimizer_milliseconds() for x in (stock, served)],
        "whole step": [x.milliseconds() for x in (stock, served)],
    }
    results = [
        {
            "group": f"training with {options.optimizer}",
            "case": f"{case}, {options.size} model",
            "value": own / ours,
            "first_us": own * 1e3,
            "second_us": ours * 1e3,
        }
        for case, (own, ours) in times.items()
    ]
    content = {
        "machine": {
            "GPU": device,
            "torch": torch.__version__,
            "torch_cubin": torch_cubin.__version__,
            "python": platform.python_version(),
        },
        "command": sys.argv,
        "results": results,
        "losses": {"stock PyTorch": stock.curve(), "drop_in()": served.curve()},
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="bfloat16 on a GPU")
    parser.add_argument("--steps", type=int, help="of each of the two trainings")
    parser.add_argument("--plot", type=Path, default=PLOT, help="where matplotlib writes a PNG")
    parser.add_argument("--json", type=Path, help="where to write both curves and the times")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--float8", action="store_true", help="of the model inside drop_in()")
    parser.add_argument("--size", choices=["small", "large", "long"], default="small")
    options = parser.parse_args(arguments)

    kind = torch.device(options.device).type
    size = SIZES[kind if options.size == "small" else options.size]
    if options.steps:
        size = dataclasses.replace(size, steps=options.steps)
    dtype = getattr(torch, options.dtype or ("bfloat16" if kind == "cuda" else "float32"))
    print(f"{size.layers} layers, width {size.width}, {size.batch} x {size.context} characters,")
    print(f"{size.steps} steps in {dtype} on {options.device}, torch {torch.__version__}\n")

    with _threads_for(options.device):
        stock, served, reports = train_interleaved(
            size, options.device, dtype, options.optimizer, options.float8
        )
    curves = {"stock PyTorch": stock.curve(), "drop_in()": served.curve()}
    if options.json:
        write_json(options.json, options, stock, served)

    for name, run in (("stock PyTorch", stock), ("inside drop_in()", served)):
        losses = run.curve()
        first, last = losses[0], statistics.mean(losses[-10:])
        speed = size.tokens() / run.milliseconds() * 1e3
        print(f"{name:<17} loss {first:.4f} -> {last:.4f}", end="")
        print(f"   {run.milliseconds():.2f} ms a step, {speed:,.0f} tokens/s", end="")
        print(f"   {options.optimizer} {run.optimizer_milliseconds():.2f} ms")
    print(f"drop_in() is {stock.milliseconds() / served.milliseconds():.3f} times as fast", end="")
    faster = stock.optimizer_milliseconds() / served.optimizer_milliseconds()
    print(f", in the optimizer {faster:.3f}")
    single, smooth = (largest_difference(*curves.values(), mean) for mean in (1, 10))
    print(f"largest difference: {single:.2e} of the loss; of means of ten steps {smooth:.2e}")
    plot(curves, options.plot)
    print(f"The last of {len(reports)} blocks:\n{reports[-1]}")
    attended = all(any(ATTENTION in row.function for row in x.served) for x in reports)
    declined = any(x.declined for x in reports)
    within = WITHIN_FLOAT8 if options.float8 else WITHIN[dtype]
    return 0 if attended and not declined and smooth <= within else 1


if __name__ == "__main__":
    sys.exit(main())
