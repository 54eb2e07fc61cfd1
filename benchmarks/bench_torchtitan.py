"""torchtitan's debug model on several GPUs, FSDP2 and tensor parallel, with and without install().

    pip install torchtitan==0.2.2
    python benchmarks/bench_torchtitan.py --json result.json                 # four GPUs, 2 x 2
    python benchmarks/bench_torchtitan.py --gpus 2 --tensor-parallel 1       # FSDP2 alone

The program is unchanged: TORCH_CUBIN_INSTALL=1 is read through PyTorch's entry point for backends,
for which an installed torch_cubin is put on the path. The tokenizer and the text are made here. The
losses of both runs are compared step by step, and tokens a second of a GPU at the last step. The
file also has what rank 0 served and left to PyTorch, by function.

Without FSDP2, torchtitan trains in float32, whose products the policy "fastest" leaves to PyTorch;
so at least two GPUs must be left for it. The run fails if no call was served.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import common

CONFIG = """
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "{folder}"
[training]
dataset = "c4_test"
dataset_path = "{folder}/text"
local_batch_size = 8
seq_len = 2048
steps = {steps}
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = {tensor_parallel}
[optimizer]
lr = 8e-4
[lr_scheduler]
warmup_steps = 2
[metrics]
log_freq = 1
disable_color_printing = true
[debug]
seed = 0
deterministic = false
"""
# Python imports it at its start: rank 0 prints at its end which calls were served.
SITE = """
import atexit, json, os, sys

def calls():
    cubin = sys.modules.get("torch_cubin")
    if cubin is not None and os.environ.get("RANK") == "0":
        report = cubin.report()
        served = {f"{row.function} {row.dtype}": row.calls for row in report.served}
        left = {f"{row.function}: {row.reason}": row.calls for row in report.declined}
        print("calls:", json.dumps({"served": served, "left": left}), flush=True)

atexit.register(calls)
"""
CALLS = re.compile(r"calls: (\{.*\})")
STEP = re.compile(r"step: +(\d+) .*?loss: +([\d.]+) .*?tps: ([\d,]+)")


def write_assets(folder: Path) -> None:
    """A tokenizer of 2,048 tokens and the text that it was trained on: this project's docs."""
    from tokenizers import ByteLevelBPETokenizer

    texts = [path.read_text() for path in sorted((common.ROOT / "docs").glob("*.md"))]
    tokenizer = ByteLevelBPETokenizer()
    special = ["<s>", "</s>"]
    tokenizer.train_from_iterator(texts, vocab_size=2048, special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": special[0], "eos_token": special[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "text").mkdir()
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    (folder / "text" / "data.json").write_text(lines)


def write_distribution(folder: Path) -> None:
    """The metadata of an installed torch_cubin, by which PyTorch finds its entry point."""
    (folder / "sitecustomize.py").write_text(SITE)
    info = folder / "torch_cubin-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_cubin\nVersion: 0\n")
    entry = "[torch.backends]\ntorch_cubin = torch_cubin_autoload:load\n"
    (info / "entry_points.txt").write_text(entry)


@dataclass
class Run:
    steps: list[tuple[int, float, int]]  # step, loss, tokens a second of a GPU
    served: dict[str, int]  # calls of rank 0
    left: dict[str, int]


def train(folder: Path, gpus: int, install: str, seconds: float) -> Run:
    paths = [str(folder), str(common.ROOT), *filter(None, sys.path)]
    launcher = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={gpus}"]
    with subprocess.Popen(
        [*(sys.executable, "-m", "torch.distributed.run"), *launcher, "--role=rank", "--tee=3",
         "--local-ranks-filter=0", "-m", "torchtitan.train",
         f"--job.config_file={folder}/config.toml", f"--job.dump_folder={folder}/out"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={"NCCL_NVLS_ENABLE": "0", **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
             "PYTHONPATH": os.pathsep.join(paths), "TORCH_CUBIN_INSTALL": install},
    ) as run:  # fmt: skip
        try:
            said, _ = run.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            run.terminate()  # torchrun then ends its processes
            said, _ = run.communicate()
    steps = {
        int(step): (float(loss), int(tps.replace(",", "")))
        for step, loss, tps in STEP.findall(said)
    }
    found = CALLS.search(said)
    calls = json.loads(found[1]) if found else {"served": {}, "left": {}}
    if run.returncode or not steps or (install == "1" and not any(calls["served"].values())):
        raise SystemExit(f"exit status {run.returncode}\n{said[-8000:]}")
    return Run([(step, *values) for step, values in sorted(steps.items())], **calls)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--tensor-parallel", type=int, default=2, help="ranks of each group")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=120, help="at most, of each run")
    options = parser.parse_args()
    common.begin(
        f"torchtitan's debug model on {options.gpus} GPUs, tensor parallel by "
        f"{options.tensor_parallel}, the rest FSDP2"
    )
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_assets(folder)
        write_distribution(folder)
        values = {"steps": options.steps, "tensor_parallel": options.tensor_parallel}
        (folder / "config.toml").write_text(CONFIG.format(folder=folder, **values))
        for contender, install in (("stock", "0"), ("install", "1")):
            results[contender] = train(folder, options.gpus, install, options.seconds)
    apart = max(
        abs(own - stock) / stock
        for (_, stock, _), (_, own, _) in zip(
            results["stock"].steps, results["install"].steps, strict=True
        )
    )
    rows = [
        [
            *(name, f"{run.steps[0][1]:.4f}", f"{run.steps[-1][1]:.4f}", f"{run.steps[-1][2]:,}"),
            *(str(sum(calls.values())) for calls in (run.served, run.left)),
        ]
        for name, run in results.items()
    ]
    headers = ["", "first loss", "last loss", "tokens/s of a GPU", "calls served", "left"]
    common.print_table(headers, rows, markdown=False)
    print(f"losses differ by at most {apart:.1e}")
    common.write_json(options.json, {name: asdict(run) for name, run in results.items()})


if __name__ == "__main__":
    main()
