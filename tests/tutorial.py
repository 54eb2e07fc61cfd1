"""Runs the steps of docs/your_own_kernel.md: every block of Python and of shell, in their order.

An info string says where a block belongs: `python`, `python gpu` (needs a GPU), `python file=NAME`
(is written to that file), `sh`. Shared by tests/unit (no GPU) and tests/gpu.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "your_own_kernel.md"
KERNEL = ROOT / "examples" / "kernels" / "silu"
_BLOCK = re.compile(r"^```(\w+)(?: ([^\n]*))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def steps() -> list[tuple[str, str, str]]:
    """(language, what follows it, text) of each block of the tutorial, the reference omitted."""
    tutorial = PAGE.read_text().split("\n# Reference")[0]
    return [(match[1], match[2] or "", match[3]) for match in _BLOCK.finditer(tutorial)]


def run(folder: Path, gpu: bool) -> dict[str, int]:
    """Runs them in `folder`; how many of each kind. Skips those for a GPU without `gpu`."""
    counts: dict[str, int] = {}
    namespace: dict[str, object] = {"__name__": "tutorial"}
    before = Path.cwd()
    os.chdir(folder)
    try:
        for language, more, text in steps():
            kind = f"{language} {more.partition('=')[0]}".strip()
            if kind == "python gpu" and not gpu:
                continue
            counts[kind] = counts.get(kind, 0) + 1
            if language == "cuda":
                Path("silu.cu").write_text(text)
            elif kind == "python file":
                path = Path(more.partition("=")[2])
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
            elif language == "python":
                source = f"<block {sum(counts.values())} of {PAGE.name}>"
                exec(compile(text, source, "exec"), namespace)
            else:
                _shell(text)
    finally:
        os.chdir(before)
    return counts


def _shell(text: str) -> None:
    if "nvcc " in text and (shutil.which("nvcc") is None or not _is_committed_arch()):
        # The committed file was made by the same command from the same source.
        shutil.copy(f"{KERNEL}.sm_90a.cubin", "silu.cubin")
        text = "\n".join(line for line in text.splitlines() if not line.startswith("nvcc "))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    this_python = 'python() { "$PYTHON" "$@"; }\n'
    done = subprocess.run(
        ["bash", "-euc", this_python + text],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"


def _is_committed_arch() -> bool:
    """Whether `-arch=sm_90a`, which the page says, suits the GPU that is here, if any."""
    import torch

    return not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0)
