"""The CUDA half of attention's host code without a GPU: attention_host.cpp runs it on CPU tensors
with the kernels' contract as plain loops, and the CPU reference must agree."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from programs import output_of
from torch.utils import cpp_extension

import torch_cubin  # noqa: F401  (registers the reference)

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
BUILD = ROOT / "build" / "unit"
# What attention_host.cpp includes, and what registers ops.
SKIPPED = {
    "ops/attention/api/cuda.cpp",
    "ops/attention/problem/operands.cpp",
    "ops/attention/portable/backends.cpp",
    "c_api.cpp",
    *(path.name for path in CSRC.glob("ops_*.cpp")),
}
SEEDS = range(300)
TOLERANCES = {
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
    torch.float32: 1e-4,
    torch.float64: 1e-9,
}


def cuda_include() -> Path:
    sys.path.insert(0, str(ROOT / "csrc" / "kernels" / "build"))
    import toolkit

    return toolkit.find_toolkit().include


def units() -> dict[str, list[Path]]:
    """The library's sources by the unit in which setup.py compiles them (write_units)."""
    found: dict[str, list[Path]] = {}
    for path in sorted(CSRC.rglob("*.cpp")):
        folders = path.relative_to(CSRC).parts[:-1]
        found.setdefault("_".join(folders[:2]) or "csrc", []).append(path)
    return found


def unit(name: str, own: list[Path], target: Path) -> Path:
    """Sources in one file, so that they share the headers' time."""
    file = target / f"rest_of_{name}.cpp"
    file.write_text("".join(f'#include "{path.relative_to(CSRC)}"\n' for path in own))
    return file


def parts(target: Path) -> list[Path]:
    """The library's other sources: objects of whole units, where setup.py made some."""
    headers = [*CSRC.rglob("*.h"), *(ROOT / "build" / "generated").rglob("*.h")]
    found = []
    for name, all_sources in units().items():
        own = [path for path in all_sources if str(path.relative_to(CSRC)) not in SKIPPED]
        whole = len(own) == len(all_sources)
        objects = list((ROOT / "build").glob(f"temp*/build/generated/units/all_of_{name}.o"))
        newest = max(path.stat().st_mtime for path in (*own, *headers))
        made = [path for path in objects if whole and path.stat().st_mtime > newest]
        found.append(made[0] if made else unit(name, own, target))
    return found


def digest(command: list[str]) -> str:
    """Of all that the built library depends on."""
    found = hashlib.sha256(repr((command, torch.__version__, sorted(SKIPPED))).encode())
    files = [path for path in CSRC.rglob("*") if path.suffix in (".cpp", ".h")]
    for path in sorted([*files, HERE / "attention_host.cpp"]):
        found.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """torch.ops.cubin_host, built once for its sources, under build/unit/."""
    torch_include = [Path(path) for path in cpp_extension.include_paths()]
    json = Path(importlib.util.find_spec("nlohmann_json").origin).parent / "include"
    own = (CSRC, ROOT / "torch_cubin" / "include", ROOT / "build" / "generated")
    include = [*own, cuda_include(), json, *torch_include]
    command = [os.environ.get("CXX", "g++"), "-O0", "-fPIC", "-shared", "-std=c++17"]
    command += ["-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    command += [f"-I{path}" for path in include]
    library = BUILD / f"attention_host-{digest(command)}.so"
    if not library.exists():
        target = tmp_path_factory.mktemp("host")
        command += [str(HERE / "attention_host.cpp"), *map(str, parts(target))]
        command += [
            f"-L{torch_include[0].parent / 'lib'}",
            "-lc10",
            "-ltorch",
            "-ltorch_cpu",
            "-ldl",
        ]
        output_of([*command, "-o", str(target / library.name)])
        BUILD.mkdir(parents=True, exist_ok=True)
        for old in BUILD.glob("attention_host-*.so"):
            old.unlink(missing_ok=True)
        unfinished = BUILD / f".{library.name}.{os.getpid()}"
        shutil.copy(target / library.name, unfinished)
        unfinished.replace(library)  # whole or not there, whoever builds at the same time
    torch.ops.load_library(str(library))
    return torch.ops.cubin_host


def scattered(rng: random.Random, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers in one of the layouts that callers have."""
    kind = rng.choice(["plain", "plain", "heads last", "gaps", "offset", "columns first"])
    if kind == "heads last" and len(shape) > 2:
        moved = (*shape[:-3], shape[-2], shape[-3], shape[-1])
        return torch.randn(moved).to(dtype).transpose(-2, -3)
    if kind == "gaps":
        return torch.randn(*shape[:-1], shape[-1] + 8).to(dtype)[..., : shape[-1]]
    if kind == "offset":
        return torch.randn(*shape[:-1], shape[-1] + 1).to(dtype)[..., 1:]
    if kind == "columns first":
        return torch.randn(*shape[:-2], shape[-1], shape[-2]).to(dtype).mT
    return torch.randn(shape).to(dtype)


def case(seed: int) -> tuple[tuple, dict]:
    """Arguments of attention_forward."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice([torch.float16, torch.bfloat16, torch.float32, torch.float64])
    rows, columns = rng.choice([1, 1, 3, 17, 40]), rng.choice([1, 5, 33, 70])
    if rows == 1 and rng.random() < 0.5:
        columns = 1200  # enough to be split
    # 64 is more than the kernels here take: composed, as float64 is.
    depth, depth_v = (rng.choice([8, 16, 24, 33, 48, 64]) for _ in range(2))
    named: dict = {"scale": rng.choice([None, None, 0.3, -0.2, 0.0])}
    if rng.random() < 0.2 and dtype != torch.float64 and max(depth, depth_v) <= 48:
        return packed_case(rng, dtype, depth, depth_v, named)
    group, kv_heads = rng.choice([(1, 1), (1, 3), (2, 2), (4, 1)])
    batch = rng.choice([(), (2,), (2, 3), (1, 2), (2, 1, 2)])
    of_keys = tuple(rng.choice([size, size, 1]) for size in batch)
    # Sometimes other numbers of heads for key and value.
    value_heads = kv_heads * group if rng.random() < 0.3 else kv_heads
    q = scattered(rng, *batch, kv_heads * group, rows, depth, dtype=dtype)
    k = scattered(rng, *of_keys, kv_heads, columns, depth, dtype=dtype)
    v = scattered(rng, *of_keys, value_heads, columns, depth_v, dtype=dtype)
    if len(batch) > 1 and rng.random() < 0.5:  # batch dims that do not merge
        k = torch.randn(*reversed(batch), kv_heads, columns, depth).to(dtype)
        k = k.permute(*reversed(range(len(batch))), *range(len(batch), len(batch) + 3))
    named["enable_gqa"] = group > 1
    extras(rng, named, kv_heads * group)
    mask, causal = None, rng.random() < 0.3
    if not causal and rng.random() < 0.5:
        full = (*batch, kv_heads * group, rows, columns)
        cut = full[rng.randrange(len(full) - 1) :]
        shape = tuple(rng.choice([size, size, 1]) for size in cut)
        mask = torch.randn(shape) > -0.7
        if rng.random() < 0.6:
            mask = torch.randn(shape).to(rng.choice([dtype, torch.float32]))
        if rng.random() < 0.3:
            mask = mask.mT.contiguous().mT
    dropout = rng.choice([0.0, 0.0, 0.3])
    number = torch.tensor([rng.randrange(2**62)]) if dropout else None
    return (q, k, v, mask, dropout, causal, number), named


def packed_case(rng, dtype, depth, depth_v, named) -> tuple[tuple, dict]:
    count, heads, group = rng.choice([1, 3]), 2, rng.choice([1, 2])
    lengths = [[rng.choice([0, 1, 9, 30]) for _ in range(count)] for _ in range(2)]
    offsets = [
        torch.tensor([0, *torch.tensor(own).cumsum(0).tolist()], dtype=torch.int32)
        for own in lengths
    ]
    spare = rng.choice([0, 3])  # rows of no sequence
    q, k, v = (
        torch.randn(int(own[-1]) + spare, h, d).to(dtype)
        for own, h, d in (
            (offsets[0], heads * group, depth),
            (offsets[1], heads, depth),
            (offsets[1], heads, depth_v),
        )
    )
    extras(rng, named, heads * group)
    named |= {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1], "enable_gqa": group > 1}
    if rng.random() < 0.5:
        named |= {"max_seqlen_q": max(lengths[0]), "max_seqlen_k": max(lengths[1])}
    return (q, k, v, None, 0.0, rng.random() < 0.5, None), named


def extras(rng: random.Random, named: dict, heads: int) -> None:
    if rng.random() < 0.3:
        named |= {"window_left": rng.choice([-1, 0, 4]), "window_right": rng.choice([-1, 0, 7])}
    named["bottom_right"] = rng.random() < 0.3
    if rng.random() < 0.15:
        named["softcap"] = 1.5
    if rng.random() < 0.15:
        named["alibi_slopes"] = torch.rand(heads)
    if rng.random() < 0.15:
        named["sinks"] = torch.randn(heads)


def text(args: tuple, named: dict) -> str:
    shown = [f"{x.dtype} {tuple(x.shape)} {x.stride()}" if torch.is_tensor(x) else x for x in args]
    return f"{shown} { ({k: v for k, v in named.items() if v is not None}) }"


def close(name: str, ours: torch.Tensor, theirs: torch.Tensor, about: str) -> None:
    assert ours.shape == theirs.shape, f"{name}: {about}"
    assert ours.stride() == theirs.stride(), f"{name}: {about}"
    tolerance = TOLERANCES[ours.dtype]
    torch.testing.assert_close(
        ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=False, msg=lambda m: f"{about} {m}"
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_host_code_agrees_with_the_reference(host, seed) -> None:
    args, named = case(seed)
    about = f"seed {seed}: {text(args, named)}"
    expected = torch.ops.cubin._attention_forward(*args, **named)
    results = host.attention_forward(*args, **named)
    for name, ours, theirs in zip(("out", "logsumexp"), results, expected, strict=True):
        close(name, ours, theirs, about)
    grad = torch.randn_like(expected[0])
    if named["scale"] == 0.0 or args[0].numel() == 0:
        return  # nothing flows, and dq_sum holds dq / scale here
    expected = torch.ops.cubin._attention_backward(grad, *args[:3], *expected, *args[3:], **named)
    results = host.attention_backward(grad, *args[:3], *results, *args[3:], **named)
    for name, ours, theirs in zip(("dq", "dk", "dv"), results, expected, strict=True):
        close(name, ours, theirs, about)


def test_the_cases_run_every_kernel(host) -> None:
    host.launches()
    for seed in SEEDS:
        args, named = case(seed)
        host.attention_forward(*args, **named)
    steps = {name.split("_")[0] for name in host.launches().split()}
    assert steps == {"forward", "decode", "combine"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [5, 17])
def test_the_backward_of_a_dtype_has_its_kernels(host, dtype, rows) -> None:
    q, k, v = (torch.randn(2, 2, rows, 8).to(dtype) for _ in range(3))
    results = host.attention_forward(q, k, v)
    host.launches()
    host.attention_backward(torch.randn_like(q), q, k, v, *results)
    launched = [name.split("_float")[0] for name in host.launches().split()]
    if dtype == torch.float32:
        assert launched == ([] if rows == 5 else ["delta", "gradient_keys", "gradient_queries"])
    else:
        assert launched == ["delta", "backward", "convert"]
