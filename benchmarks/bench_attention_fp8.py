"""flash_attention of float8_e4m3fn compared with cuDNN's attention of the same type.

    pip install nvidia-cudnn-frontend==1.16.0
    python benchmarks/bench_attention_fp8.py [--json FILE]

16,384 tokens, heads * head_dim = 2,048, laid out as (batch, rows, heads, head_dim); every factor is
1. cuDNN's result is float8_e4m3fn (below cuDNN 9.13 it has no other), ours bfloat16, and ours
includes the kernel that transposes the values. Both are compared with float64 at 1,024 rows, and
alternate (common.py); a ratio above 1 means that torch_cubin is faster.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bench_attention
import common
import torch

E4M3 = torch.float8_e4m3fn
SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
CHECKED = 1024  # rows


@dataclass(frozen=True)
class Row:
    head_dim: int
    length: int
    causal: bool
    cudnn_us: float
    cubin_us: float
    ratio: float
    cudnn_rate: float  # TFLOP/s
    cubin_rate: float


def load_cudnn() -> Any:
    """The Python API of cuDNN's graphs, on the cuDNN that PyTorch brings."""
    import nvidia.cudnn

    for library in sorted((Path(nvidia.cudnn.__path__[0]) / "lib").glob("libcudnn*.so*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import cudnn

    return cudnn


def cudnn_call(
    cudnn: Any, operands: list[torch.Tensor], causal: bool
) -> Callable[[], torch.Tensor]:
    """A call on (batch, heads, rows, head_dim)."""
    types = cudnn.data_type
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(
        io_data_type=types.FP8_E4M3,
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        handle=handle,
    )

    def described(like: torch.Tensor, data_type: Any) -> Any:
        return graph.tensor(dim=list(like.shape), stride=list(like.stride()), data_type=data_type)

    one = torch.ones(1, 1, 1, 1, device="cuda")
    inputs = [described(x, types.FP8_E4M3) for x in operands]
    scales = {name: described(one, types.FLOAT) for name in SCALES}
    out, _, *largest = graph.sdpa_fp8(
        *inputs,
        **scales,
        is_inference=True,
        attn_scale=operands[0].shape[-1] ** -0.5,
        use_causal_mask=causal,
    )
    result = torch.empty_like(operands[0])

    def written(tensor: Any, memory: torch.Tensor, data_type: Any) -> None:
        tensor.set_output(True).set_dim(list(memory.shape)).set_stride(list(memory.stride()))
        tensor.set_data_type(data_type)

    written(out, result, types.FP8_E4M3)
    for tensor in largest:
        written(tensor, one, types.FLOAT)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(max(1, graph.get_workspace_size()), device="cuda", dtype=torch.uint8)
    memory = dict(zip(inputs, operands, strict=True)) | dict.fromkeys(scales.values(), one)
    memory |= {out: result} | {x: torch.zeros_like(one) for x in largest}

    def call() -> torch.Tensor:
        cudnn.set_stream(handle, torch.cuda.current_stream().cuda_stream)
        graph.execute(memory, workspace, handle=handle)
        return result

    return call


def check(what: str, result: torch.Tensor, operands: list[torch.Tensor], causal: bool) -> None:
    q, k, v = (x[:1, :2].double() for x in operands)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    error = ((result[:1, :2].double() - want).norm() / want.norm()).item()
    if not error < 6e-2:  # weights and results of 4 significant bits
        raise AssertionError(f"{what}: differs by {error:.3g} of its norm")


def measured(cudnn: Any, head_dim: int, length: int, causal: bool, budget_ms: float) -> Row:
    tokens, columns = bench_attention.TOKENS, bench_attention.COLUMNS
    shape = (tokens // length, length, columns // head_dim, head_dim)
    rows_first = [torch.randn(shape, device="cuda").to(E4M3) for _ in "qkv"]
    operands = [x.transpose(1, 2) for x in rows_first]
    peer = cudnn_call(cudnn, operands, causal)

    def ours() -> torch.Tensor:
        return torch.ops.cubin.flash_attention(*rows_first, is_causal=causal)

    if length == CHECKED:
        check(f"cuDNN {shape}", peer(), operands, causal)
        check(f"cubin {shape}", ours().transpose(1, 2), operands, causal)
    timed = common.alternate(peer, ours, 1, budget_ms)
    rates = [
        bench_attention.tflops(length, causal, False, us)
        for us in (timed.first_us, timed.second_us)
    ]
    return Row(head_dim, length, causal, timed.first_us, timed.second_us, timed.ratio, *rates)


def main() -> None:
    parser = common.parser(__doc__, markdown=True)
    parser.add_argument("--budget", type=float, default=40, help="milliseconds a line (40)")
    options = parser.parse_args()
    common.begin("torch.ops.cubin.flash_attention of float8_e4m3fn beside cuDNN's")
    torch.manual_seed(0)
    cudnn = load_cudnn()
    print(f"cuDNN {cudnn.backend_version()}")
    bench_attention.warm_up()
    with torch.no_grad():
        rows = [
            measured(cudnn, *case, options.budget)
            for case in itertools.product((64, 128, 256), LENGTHS, (False, True))
        ]
    table = [
        [f"d{x.head_dim} s{x.length}{' causal' if x.causal else ''}", f"{x.cudnn_us:.1f}",
         f"{x.cubin_us:.1f}", f"{x.cudnn_rate:.0f}", f"{x.cubin_rate:.0f}", f"{x.ratio:.3f}"]
        for x in rows
    ]  # fmt: skip
    headers = ["case", "cuDNN us", "cubin us", "TFLOP/s", "TFLOP/s", "ratio"]
    common.print_table(headers, table, options.markdown)
    print(f"geometric mean {common.geometric_mean([x.ratio for x in rows]):.3f}")
    common.write_json(options.json, [asdict(x) for x in rows])


if __name__ == "__main__":
    main()
