"""Triton kernels without Triton: an autotuned matmul and flash attention.

    python examples/triton_kernels.py

triton_ahead_of_time/export.py compiled them, without a GPU, for sm_80 and sm_90a, and wrote the
package in triton_ahead_of_time/package. Importing Triton raises here. The matmul has all of its
configs; torch_cubin.tune finds the fastest one for a shape on this GPU. Our results and PyTorch's
are compared with the formula in float64.
"""

import os
import sys
import tempfile

sys.modules["triton"] = None  # importing it raises

import support  # noqa: E402
import torch  # noqa: E402

import torch_cubin  # noqa: E402

PACKAGE = support.ROOT / "examples" / "triton_ahead_of_time" / "package"
OPS = torch_cubin.load_package(PACKAGE)
matmul = OPS["triton_example::matmul"]
attention = OPS["triton_example::attention"]


def formula(q, k, v, causal, scale):
    """Attention in the dtype of its arguments; the last query sees the last key."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = q @ k.mT * scale
    if causal:
        rows, keys = q.shape[2], k.shape[2]
        hidden = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu(1 + keys - rows)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v


def compare(what, found, torch_s, exact) -> bool:
    """Whether the error is at most twice PyTorch's, plus one ulp of the exact result."""
    ulp = torch.finfo(found.dtype).eps * exact.abs().max().item()
    ours, theirs = ((x.double() - exact).abs().max().item() for x in (found, torch_s))
    right = ours <= 2 * theirs + ulp
    print(f"{what}: error {ours:.2e}, PyTorch's {theirs:.2e}  {'right' if right else 'WRONG'}")
    return right


def main() -> int:
    try:
        import triton  # noqa: F401
    except ImportError:
        print("Triton cannot be imported here")
    support.require_gpu(8)
    device, right = torch.device("cuda"), True
    random = torch.Generator(device).manual_seed(0)

    def draw(*shape, dtype):
        return torch.randn(*shape, generator=random, device=device).to(dtype)

    for m, n, k in ((512, 512, 512), (1000, 768, 1040), (1, 4096, 4096), (4096, 4096, 4096)):
        a, b = draw(m, k, dtype=torch.float16), draw(k, n, dtype=torch.float16)
        right &= compare(f"matmul {m}x{n}x{k}", matmul(a, b), a @ b, a.double() @ b.double())
    for b, h, h_kv, rows, keys, d, causal in (
        (2, 8, 8, 1024, 1024, 64, True),
        (2, 8, 2, 1000, 1000, 128, True),
        (1, 4, 4, 77, 333, 64, False),
        (1, 6, 3, 100, 700, 128, True),
    ):
        q = draw(b, h, rows, d, dtype=torch.bfloat16)
        k, v = (draw(b, h_kv, keys, d, dtype=torch.bfloat16) for _ in range(2))
        out, plain = attention(q, k, v, causal, d**-0.5), formula(q, k, v, causal, d**-0.5)
        exact = formula(q.double(), k.double(), v.double(), causal, d**-0.5)
        name = f"attention {b}x{h}/{h_kv}x{rows}x{keys}x{d}{' causal' if causal else ''}"
        right &= compare(name, out, plain, exact)

    # Refused; Triton's launcher would compile another kernel.
    try:
        matmul(draw(8, 24, dtype=torch.float16), draw(24, 40, dtype=torch.float16))
    except torch_cubin.errors.InputError as error:
        print(error)

    a, b = draw(512, 4096, dtype=torch.float16), draw(4096, 4096, dtype=torch.float16)
    tuning = torch_cubin.tune(matmul, (a, b))
    print(tuning)
    best = tuning.calls[0]
    right &= compare("tuned matmul", matmul(a, b), a @ b, a.double() @ b.double())
    print(f"{best.names[best.best]} is {1 + best.gain(best.best):.2f} times as fast as the first")
    return 0 if right else 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TORCH_CUBIN_CACHE", folder)  # keeps a value that the user has set
        sys.exit(main())
