"""The architectures of this machine's GPUs. Needs neither torch nor a driver."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import cubin_facts
from toolkit import BuildError


def arch_of(capability: str) -> str | None:
    """The architecture to build for a GPU ("9.0"): its own `a` variant, else the nearest below."""
    major, minor = map(int, capability.split("."))
    for below in range(minor, -1, -1):
        # `a` code runs only on its own compute capability, and exists from 9.0 on.
        for suffix in ("a", "") if below == minor and major >= 9 else ("",):
            arch = f"sm_{major}{below}{suffix}"
            try:
                cubin_facts.limits_of(arch)
            except BuildError:
                continue
            return arch
    return None


def gpu_archs(log: Callable[[str], None] = print) -> list[str]:
    """The distinct architectures of the GPUs that nvidia-smi lists."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    capabilities = [line.strip() for line in answer.stdout.splitlines()]
    found = {text: arch_of(text) for text in capabilities if text.replace(".", "").isdigit()}
    for text in [text for text, arch in found.items() if arch is None]:
        log(f"no architecture for a GPU of compute capability {text}")
    return list(dict.fromkeys(arch for arch in found.values() if arch))
