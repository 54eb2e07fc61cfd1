"""Speed of torch.ops.cubin.scaled_dot_product_attention compared with PyTorch's own kernels.

    python benchmarks/bench_attention.py                      # everything, under 5 minutes
    python benchmarks/bench_attention.py --quick              # a third of it, under a minute
    python benchmarks/bench_attention.py --only forward,decode --check
    python benchmarks/bench_attention.py --markdown --json result.json

Sections, each with its peer:
    forward, backward    bf16, compared with SDPBackend.FLASH_ATTENTION and with cuDNN
    fp32, fp32_backward  compared with EFFICIENT_ATTENTION
    decode               one query, compared with cuDNN, in GB/s of keys and values
    host                 CPU cost of a small call
    kvcache              flash_attention_with_kvcache with lengths on the device, compared with the
                         best of cuDNN and flash on keys and values of exactly that length
    paged                the same in pages of 16 and 64, compared with our contiguous cache
    e4m3                 caches of float8_e4m3fn, contiguous and paged, compared with our bfloat16
    forward_e4m3         flash_attention of float8_e4m3fn, including the kernel that transposes its
                         values, compared with our bfloat16 and with cuDNN's
    backward_e4m3        attention_backward_e4m3, all four kernels, compared with our bfloat16
Random normal data of 16,384 tokens and heads * head_dim = 2,048, as (batch, heads, rows, head_dim).
The inputs of decode rotate over sets of three times the L2 cache, in a CUDA graph. "copy" is the
fraction of a copy's bandwidth, measured in the same process. Outputs are checked. Ratios above 1
mean that torch_cubin is faster; the floor is the project's promise on an H200, and --check exits
with a failure if a row is below it. Over 500 lines: the sections share inputs, peers and rows.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import bench_overhead
import common
import numerics
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS, COLUMNS = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128, 256)
DECODES = [(1, 8192), (16, 8192), (64, 4096), (128, 2048)]  # batch, keys
CACHES = [*DECODES, (32, 8192), (1, 32768), (1, 131072)]
PAGED = [(16, 8192, 16), (16, 8192, 64), (64, 4096, 16), (64, 4096, 64), (1, 32768, 16)]
E4M3 = [*((*case, 0) for case in CACHES), (16, 8192, 16), (64, 4096, 64)]
SECTIONS = ("forward", "forward_e4m3", "backward", "fp32", "fp32_backward", "decode")
SECTIONS += ("backward_e4m3", "kvcache", "paged", "e4m3", "host")
FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
EFFICIENT = SDPBackend.EFFICIENT_ATTENTION
HOST_FLOOR = 1 / 0.9  # at most 0.9 of the cost of PyTorch's call


@dataclass(frozen=True)
class Row:
    """One measured line. `unit` is the unit of the rates: TFLOP/s, GB/s or calls."""

    section: str
    case: str
    head_dim: int
    length: int
    causal: bool
    peer: str
    peer_us: float
    cubin_us: float
    ratio: float
    low: float
    high: float
    unit: str
    peer_rate: float
    cubin_rate: float
    cudnn_rate: float | None = None
    cudnn_ratio: float | None = None  # our rate over cuDNN's, if cuDNN is not the peer
    floor: float = 0.0
    copy: float | None = None  # fraction of the copy bandwidth

    @property
    def under(self) -> bool:
        """Whether the ratio is below the floor; NaN counts as below."""
        return not (self.ratio >= self.floor)


def timings(timed: common.Ratio) -> dict[str, float]:
    """Those of a Row's fields."""
    return {
        "peer_us": timed.first_us, "cubin_us": timed.second_us, "ratio": timed.ratio,
        "low": timed.low, "high": timed.high,
    }  # fmt: skip


def row_of_tokens(
    section: str, head_dim: int, length: int, causal: bool, peer: str, timed: common.Ratio,
    **fields: float | None,
) -> Row:  # fmt: skip
    """A line whose rates are TFLOP/s."""
    backward = "backward" in section
    rates = [tflops(length, causal, backward, us) for us in (timed.first_us, timed.second_us)]
    return Row(
        section=section,
        case=f"d{head_dim} s{length} b{TOKENS // length}",
        head_dim=head_dim,
        length=length,
        causal=causal,
        peer=peer,
        **timings(timed),
        unit="TFLOP/s",
        peer_rate=rates[0],
        cubin_rate=rates[1],
        **fields,
    )


def cubin(*args, **options) -> torch.Tensor:
    return torch.ops.cubin.scaled_dot_product_attention(*args, **options)


def stock(backend: SDPBackend) -> Callable[..., torch.Tensor]:
    """F.scaled_dot_product_attention restricted to this backend."""

    def call(*args, **options) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*args, **options)

    return call


def tensors(head_dim: int, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Makes query, key, value and a gradient of the output."""
    shape = (TOKENS // length, COLUMNS // head_dim, length, head_dim)
    return [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(4)]


def check_forward(ours, own, q, k, v, causal: bool) -> None:
    """Checks 128 rows of one head by the rule of tests/numerics.py."""
    b, h = q.shape[0] - 1, q.shape[1] // 2
    rows = torch.randint(q.shape[2], (128,), device="cuda")
    scores = q[b, h, rows].double() @ k[b, h].double().t() / math.sqrt(q.shape[-1])
    if causal:
        columns = torch.arange(k.shape[2], device="cuda")
        scores = scores.masked_fill(columns > rows[:, None], -math.inf)
    reference = torch.softmax(scores, -1) @ v[b, h].double()
    numerics.check_close(ours[b, h, rows], own[b, h, rows], reference, f"out {tuple(q.shape)}")


def check_gradients(ours, own, limit: float) -> None:
    """Checks that the gradients of both kernels agree; the tests compare them with float64."""
    for name, mine, theirs in zip(("dq", "dk", "dv"), ours, own, strict=True):
        difference = (mine.float() - theirs.float()).square().mean().sqrt()
        error = float(difference / theirs.float().square().mean().sqrt())
        if numerics.exceeds(error, limit):
            raise AssertionError(f"{name} {tuple(mine.shape)}: relative difference {error:.2e}")


def gradients_of(function, q, k, v, grad, causal: bool) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Returns a function that runs only the backward of one forward."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        out = function(*leaves, is_causal=causal)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def tflops(length: int, causal: bool, backward: bool, microseconds: float) -> float:
    """Counts two products forward and five backward, by convention; causal counts half."""
    work = 4 * TOKENS * length * COLUMNS * (2.5 if backward else 1) * (0.5 if causal else 1)
    return work / microseconds / 1e6


def floor_of(section: str, length: int) -> float:
    if section == "forward":
        return 1.0 if length >= 2048 else 0.9
    return 0.9 if section == "backward" else 0.8


def measure(section: str, head_dim: int, length: int, causal: bool, budget_ms: float) -> Row:
    """Measures a line of forward, backward, fp32 or fp32_backward."""
    single, backward = section.startswith("fp32"), section.endswith("backward")
    dtype, peer = (torch.float32, EFFICIENT) if single else (torch.bfloat16, FLASH)
    q, k, v, grad = tensors(head_dim, length, dtype)
    contenders = [stock(peer), cubin] + ([] if single else [stock(CUDNN)])
    if backward:
        runs = [gradients_of(f, q, k, v, grad, causal) for f in contenders[:2]]
        check_gradients(runs[1](), runs[0](), 1e-4 if single else 2e-2)
    else:
        runs = [lambda f=f: f(q, k, v, is_causal=causal) for f in contenders[:2]]
        check_forward(runs[1](), runs[0](), q, k, v, causal)
    timed = common.alternate(runs[0], runs[1], 1, budget_ms)
    cudnn_rate = cudnn_ratio = None
    if len(contenders) == 3:
        try:
            third = (
                gradients_of(contenders[2], q, k, v, grad, causal)
                if backward
                else lambda: contenders[2](q, k, v, is_causal=causal)
            )
            beside = common.alternate(third, runs[1], 1, budget_ms)
            cudnn_rate = tflops(length, causal, backward, beside.first_us)
            cudnn_ratio = beside.ratio
        except RuntimeError:  # this cuDNN has no kernel for the case: the column stays empty
            cudnn_rate = cudnn_ratio = None
    name = peer.name.lower().split("_")[0]
    return row_of_tokens(
        section, head_dim, length, causal, name, timed,
        cudnn_rate=cudnn_rate, cudnn_ratio=cudnn_ratio, floor=floor_of(section, length),
    )  # fmt: skip


def measure_e4m3(head_dim: int, length: int, causal: bool, budget_ms: float) -> Row:
    """Measures flash_attention of float8_e4m3fn and of the same values widened to bfloat16."""
    shape = (TOKENS // length, length, COLUMNS // head_dim, head_dim)
    narrow = [torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for _ in "qkv"]
    wide = [x.bfloat16() for x in narrow]
    heads_first = [x.transpose(1, 2) for x in wide]
    flash = torch.ops.cubin.flash_attention
    runs = [lambda x=x: flash(*x, is_causal=causal) for x in (wide, narrow)]
    own, ours = (run().double() for run in runs)
    error = ((own - ours).norm() / own.norm()).item()
    if numerics.exceeds(error, 4.5e-2):  # e4m3 softmax weights have 4 significant bits
        raise AssertionError(f"forward_e4m3 {shape}: relative difference {error:.2e}")
    del own, ours
    timed = common.alternate(runs[0], runs[1], 1, budget_ms)
    beside = common.alternate(
        lambda: stock(CUDNN)(*heads_first, is_causal=causal), runs[1], 1, budget_ms
    )
    return row_of_tokens(
        "forward_e4m3", head_dim, length, causal, "bfloat16", timed,
        cudnn_rate=tflops(length, causal, False, beside.first_us), cudnn_ratio=beside.ratio,
    )  # fmt: skip


def decode_peer(q, k, v) -> torch.Tensor:
    """cuDNN's attention of one query per head, the 4 heads of a group as 4 rows of one problem."""
    batch, heads, _, head_dim = q.shape
    rows = q.view(batch, k.shape[1], heads // k.shape[1], head_dim)
    return stock(CUDNN)(rows, k, v).reshape(q.shape)


def decode_peer_gqa(q, k, v) -> torch.Tensor:
    return stock(CUDNN)(q, k, v, enable_gqa=True)


def measure_decode(batch: int, length: int, budget_ms: float) -> Row:
    """32 heads of query, 8 of key and value, head_dim 128, bf16, one query."""
    shape = (batch, 8, length, 128)
    size = 2 * math.prod(shape) * 2
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    sets = []
    for _ in range(max(2, math.ceil(3 * cache / size))):
        q = torch.randn(batch, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        sets.append((q, k, v))
    calls = len(sets) * max(1, round(2000 / max(size / 4e6, 10) / len(sets)))
    order = [sets[i % len(sets)] for i in range(calls)]

    def replay_of(function):
        return common.graph_of([lambda s=s: function(*s) for s in order])

    graph, out = replay_of(lambda *s: cubin(*s, enable_gqa=True))
    # The peer is the faster of cuDNN's two formulations.
    peers = []
    for function in (decode_peer_gqa, decode_peer):
        try:
            peers.append(replay_of(function))
        except RuntimeError:  # cuDNN refuses this formulation
            torch.cuda.synchronize()
    timed = [common.alternate(g.replay, graph.replay, calls, budget_ms) for g, _ in peers]
    best = min(range(len(timed)), key=lambda i: timed[i].first_us)
    result = timed[best]
    torch.cuda.synchronize()
    q, k, v = order[-1]
    wide = [x[-1:].double().repeat_interleave(4, 1) for x in (k, v)]
    reference = F.scaled_dot_product_attention(q[-1:].double(), *wide)
    numerics.check_close(out[-1:], peers[best][1][-1:], reference, f"decode {shape}")
    return Row(
        section="decode",
        case=f"b{batch} s{length} 32/8 heads d128",
        head_dim=128,
        length=length,
        causal=False,
        peer="cudnn",
        **timings(result),
        unit="GB/s",
        peer_rate=size / result.first_us / 1e3,
        cubin_rate=size / result.second_us / 1e3,
        cudnn_rate=size / result.first_us / 1e3,
        floor=0.8,
    )


def copy_rate() -> float:
    """GB/s of a copy, counting the bytes read and written."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    to = torch.empty_like(source)
    timed = common.alternate(lambda: to.copy_(source), lambda: to.copy_(source), 1, 100)
    return 2 * source.numel() / min(timed.first_us, timed.second_us) / 1e3


def cache_sets(
    batch: int, length: int, page_size: int, dtype: torch.dtype
) -> list[tuple[torch.Tensor, ...]]:
    """Sets of q, k_cache, v_cache, lengths and block table, three times the size of the L2."""
    size = 2 * batch * length * 8 * 128 * dtype.itemsize
    sets = []
    for _ in range(max(2, math.ceil(3 * torch.cuda.get_device_properties(0).L2_cache_size / size))):
        q = torch.randn(batch, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
        shape = (batch, length, 8, 128)
        table = None
        if page_size:
            pages = batch * length // page_size
            shape = (pages, page_size, 8, 128)
            table = torch.randperm(pages, device="cuda").int().view(batch, length // page_size)
        k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in "kv")
        lengths = torch.full((batch,), length, device="cuda", dtype=torch.int32)
        sets.append((q, k, v, lengths, table))
    return sets


def cached(q, k, v, lengths, table) -> torch.Tensor:
    return torch.ops.cubin.flash_attention_with_kvcache(
        q, k, v, cache_seqlens=lengths, block_table=table, causal=True
    )


def peers_of_cache(q, k, v) -> dict[str, Callable[[], torch.Tensor]]:
    """PyTorch's equivalents, on whole sequences laid out as (batch, heads, rows, head_dim)."""
    batch, _, heads, head_dim = q.shape
    q = q.transpose(1, 2)
    rows = q.reshape(batch, k.shape[1], heads // k.shape[1], head_dim)
    peers = {}
    for backend, name in ((CUDNN, "cudnn"), (FLASH, "flash")):
        attend = stock(backend)
        peers[name] = lambda attend=attend: attend(q, k, v, enable_gqa=True).transpose(1, 2)
        peers[f"{name} rows"] = lambda attend=attend: attend(rows, k, v).view(
            batch, 1, heads, head_dim
        )
    return peers


def measure_cache(
    section: str, batch: int, length: int, page_size: int, copies: float, budget_ms: float
) -> Row:
    """32 heads of query, 8 of key and value, head_dim 128, bf16, one query."""
    dtype = torch.float8_e4m3fn if section == "e4m3" else torch.bfloat16
    size = 2 * batch * length * 8 * 128 * dtype.itemsize
    sets = cache_sets(batch, length, page_size, dtype)
    order = [sets[i % len(sets)] for i in range(len(sets) * max(1, round(50 / len(sets))))]
    graph, out = common.graph_of([lambda s=s: cached(*s) for s in order])
    candidates = {}
    if section == "e4m3":
        wide = [(q, k.bfloat16(), v.bfloat16(), n, t) for q, k, v, n, t in sets]
        order = [wide[i % len(wide)] for i in range(len(order))]
        candidates["bfloat16"] = common.graph_of([lambda s=s: cached(*s) for s in order])
    elif page_size:
        whole = [(q, *(x[t.long()].flatten(1, 2) for x in (k, v)), n, None)
                 for q, k, v, n, t in sets]  # fmt: skip
        order = [whole[i % len(whole)] for i in range(len(order))]
        candidates["contiguous"] = common.graph_of([lambda s=s: cached(*s) for s in order])
    else:
        peers = [peers_of_cache(q, *(x.transpose(1, 2).contiguous() for x in (k, v)))
                 for q, k, v, *_ in sets]  # fmt: skip
        for name in peers[0]:
            try:
                calls = [peers[i % len(peers)][name] for i in range(len(order))]
                candidates[name] = common.graph_of(calls)
            except RuntimeError:  # this peer refuses the case
                torch.cuda.synchronize()
    timed = {
        name: common.alternate(g.replay, graph.replay, len(order), budget_ms)
        for name, (g, _) in candidates.items()
    }
    best = min(timed, key=lambda name: timed[name].first_us)
    result = timed[best]
    graph.replay()
    candidates[best][0].replay()
    torch.cuda.synchronize()
    difference = (out.double() - candidates[best][1].double()).abs().max().item()
    if numerics.exceeds(difference, 2e-2):
        raise AssertionError(f"{section} b{batch} s{length}: difference to {best} {difference:.2e}")
    rate = size / result.second_us / 1e3
    return Row(
        section=section,
        case=f"b{batch} s{length}" + (f" pages of {page_size}" if page_size else ""),
        head_dim=128,
        length=length,
        causal=True,
        peer=best,
        **timings(result),
        unit="GB/s",
        peer_rate=size / dtype.itemsize * 2 / result.first_us / 1e3,
        cubin_rate=rate,
        floor=1.0 if section == "e4m3" else 0.9,
        copy=rate / copies,
    )


def measure_host(rounds: int) -> list[Row]:
    """Host cost of a small call (bench_overhead.py), PyTorch's time over ours."""
    times = bench_overhead.measure(bench_overhead.attention_contenders(), rounds)
    rows = []
    names = list(times)
    for theirs, ours in zip(names[::2], names[1::2], strict=True):
        setting = theirs.split(": ")[0]
        pairs = list(zip(times[theirs], times[ours], strict=True))
        timed = common.summarise(pairs)
        low, _, high = statistics.quantiles([a / b for a, b in pairs], n=4)
        rows.append(
            Row(
                section="host",
                case=setting,
                head_dim=64,
                length=64,
                causal=False,
                peer="F.sdpa",
                peer_us=timed.first_us,
                cubin_us=timed.second_us,
                ratio=timed.first_us / timed.second_us,
                low=low,
                high=high,
                unit="kcalls/s",
                peer_rate=1e3 / timed.first_us,
                cubin_rate=1e3 / timed.second_us,
                floor=HOST_FLOOR if setting == "no_grad" else 0.0,
            )
        )
    return rows


def measure_backward_e4m3(head_dim: int, length: int, causal: bool, budget_ms: float) -> Row:
    """Measures the gradients for tensors of float8_e4m3fn and for the same values in bfloat16."""
    ops = torch.ops.cubin
    *operands, grad = tensors(head_dim, length, torch.bfloat16)
    narrow = [x.to(torch.float8_e4m3fn) for x in operands]
    wide = [x.bfloat16() for x in narrow]
    out, sums = ops.attention_forward(*wide, is_causal=causal)
    out8, sums8 = ops.attention_forward_e4m3(*narrow, is_causal=causal)
    runs = [
        lambda: ops.attention_backward(grad, *wide, out, sums, is_causal=causal),
        lambda: ops.attention_backward_e4m3(grad, *narrow, out8, sums8, is_causal=causal),
    ]
    check_gradients(runs[1](), runs[0](), 8e-2)  # dS has 3 significant bits for dq
    timed = common.alternate(runs[0], runs[1], 1, budget_ms)
    return row_of_tokens("backward_e4m3", head_dim, length, causal, "bfloat16", timed)


MEASURES_E4M3 = {"forward_e4m3": measure_e4m3, "backward_e4m3": measure_backward_e4m3}


def plan(options: argparse.Namespace, section: str) -> list[tuple[int, int, bool]]:
    """(head_dim, length, causal) of each line of a section."""
    if section.startswith("fp32"):
        lengths = (2048,) if options.quick else (512, 2048, 8192)
        head_dims = (64, 128)
    else:
        lengths = (1024, 4096) if options.quick else LENGTHS
        head_dims = HEAD_DIMS[:2] if section == "backward_e4m3" else HEAD_DIMS
    if options.head_dim:
        head_dims = (options.head_dim,)
    return list(itertools.product(head_dims, lengths, (False, True)))


HEADERS = ["section", "case", "mask", "peer", "peer us", "cubin us", "ratio", "spread", "floor",
           "peer rate", "cubin rate", "cuDNN rate", "to cuDNN", "unit", "copy"]  # fmt: skip


def cells(row: Row) -> list[str]:
    mask = "causal" if row.causal else "full" if row.section not in ("decode", "host") else ""
    floor = f"{row.floor:.2f}{' UNDER' if row.under else ''}" if row.floor else ""
    cudnn = "" if row.cudnn_rate is None else f"{row.cudnn_rate:.0f}"
    to_cudnn = "" if row.cudnn_ratio is None else f"{row.cudnn_ratio:.3f}"
    return [
        row.section, row.case, mask, row.peer, f"{row.peer_us:.1f}", f"{row.cubin_us:.1f}",
        f"{row.ratio:.3f}", f"{row.low:.2f}-{row.high:.2f}", floor, f"{row.peer_rate:.0f}",
        f"{row.cubin_rate:.0f}", cudnn, to_cudnn, row.unit,
        "" if row.copy is None else f"{row.copy:.3f}",
    ]  # fmt: skip


def print_summary(rows: list[Row]) -> None:
    print("\nratio to the peer (above 1: faster), geometric mean, worst, lines under the floor:")
    for section in SECTIONS:
        group = [row for row in rows if row.section == section]
        if not group:
            continue
        worst = min(group, key=lambda row: row.ratio)
        under = [row for row in group if row.under]
        mean = common.geometric_mean([row.ratio for row in group])
        print(
            f"  {section:14} {mean:.3f}   worst {worst.ratio:.3f} ({worst.case}"
            f"{' causal' if worst.causal else ''})   {len(under)} of {len(group)} under"
        )
        beside = [(row.cudnn_ratio, row) for row in group if row.cudnn_ratio is not None]
        if beside:
            low, worst = min(beside, key=lambda x: x[0])
            mean = common.geometric_mean([ratio for ratio, _ in beside])
            print(
                f"  {'':14} {mean:.3f}   worst {low:.3f} ({worst.case}"
                f"{' causal' if worst.causal else ''})   to cuDNN"
            )


def warm_up() -> None:
    """Runs for about a second, until clocks and temperature settle."""
    warm = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(500):
        torch.mm(warm, warm)
    torch.cuda.synchronize()


def run(options: argparse.Namespace, sections: list[str]) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    failures: list[str] = []

    def attempt(label: str, work: Callable[[], list[Row]]) -> None:
        try:
            rows.extend(work())
        except Exception as error:  # keep the numbers of the other lines
            failures.append(f"{label}: {type(error).__name__}: {error}")
        torch.cuda.empty_cache()

    budget = options.budget
    for section in sections:
        if section == "decode":
            for batch, length in DECODES:
                attempt(
                    f"decode b{batch} s{length}",
                    lambda b=batch, s=length: [measure_decode(b, s, budget)],
                )
        elif section in ("kvcache", "paged", "e4m3"):
            copies = copy_rate()
            cases = {"paged": PAGED, "e4m3": E4M3}.get(section, [(*case, 0) for case in CACHES])
            for case in cases:
                attempt(
                    f"{section} {case}",
                    lambda s=section, c=case, r=copies: [measure_cache(s, *c, r, budget)],
                )
        elif section == "host":
            attempt("host", lambda: measure_host(15 if options.quick else 40))
        else:
            for head_dim, length, causal in plan(options, section):
                case = (head_dim, length, causal, budget)
                attempt(
                    f"{section} d{head_dim} s{length} causal {causal}",
                    lambda s=section, c=case: [
                        MEASURES_E4M3[s](*c) if s in MEASURES_E4M3 else measure(s, *c)
                    ],
                )
    return rows, failures


def main() -> None:
    parser = common.parser(__doc__, markdown=True)
    parser.add_argument("--quick", action="store_true", help="two lengths instead of six")
    parser.add_argument("--only", metavar="SECTION,...", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--head-dim", type=int, help="this one alone")
    parser.add_argument("--budget", type=float, help="milliseconds a line (300; --quick: 150)")
    parser.add_argument("--check", action="store_true", help="exit status 1 if a floor is broken")
    options = parser.parse_args()
    options.budget = options.budget or (150 if options.quick else 300)
    sections = options.only.split(",") if options.only else list(SECTIONS)
    if not set(sections) <= set(SECTIONS):
        parser.error(f"--only takes {', '.join(SECTIONS)}")
    common.begin("torch.ops.cubin.scaled_dot_product_attention beside PyTorch's kernels")
    torch.manual_seed(0)
    with torch.no_grad():
        warm_up()
        rows, failures = run(options, sections)
    common.print_table(HEADERS, [cells(row) for row in rows], options.markdown)
    if rows:
        print_summary(rows)
    common.write_json(options.json, [asdict(row) for row in rows])
    for failure in failures:
        print(f"FAILED {failure}")
    if failures or (options.check and any(row.under for row in rows)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
