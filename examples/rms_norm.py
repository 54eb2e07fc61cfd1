"""A fused residual + RMSNorm as an op, and its backward as a second op, from two cubins.

    python examples/rms_norm.py

    hidden = x + residual;  out = hidden / sqrt(mean(hidden^2) + eps) * weight

in one pass over memory, for bfloat16, float16 and float32, with sums in float32. `when` selects a
kernel with 16-byte loads for rows that are multiples of 16 bytes long, and another one for the
rest. Errors against float64 are compared with PyTorch's.
"""

import sys
from functools import partial

import support
import torch

import torch_cubin
from torch_cubin import cdiv, int32, minimum

DTYPES = {"float32": 4, "float16": 8, "bfloat16": 8}  # elements in 16 bytes


def kernels(name, args, grid):
    """One kernel per dtype and load width."""

    def choice(dtype, size):
        return torch_cubin.KernelChoice(
            (support.cubin(name), f"{name}_{dtype}{'' if size > 1 else '_1'}"),
            when=lambda weight, n: (weight.dtype == getattr(torch, dtype)) & (n % size == 0),
            args=args,
            grid=grid,
            block=lambda n: minimum(1024, cdiv(cdiv(n, size), 32) * 32),
        )

    return [choice(dtype, size) for dtype, most in DTYPES.items() for size in (most, 1)]


add_rms_norm = torch_cubin.define_op(
    "examples::add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps=1e-6)"
    " -> (Tensor out, Tensor hidden, Tensor rstd)",
    dtypes={"T": [*DTYPES]},
    tensors={
        "x": "T[m, n]",
        "residual": "T[m, n]",
        "weight": "T[n]",
        "out": "T[m, n]",
        "hidden": "T[m, n]",
        "rstd": "float32[m]",
    },
    kernels=kernels(
        "add_rms_norm",
        args=lambda x, residual, weight, out, hidden, rstd, n, eps: (
            *(x, residual, weight, out, hidden, rstd),
            *(int32(n), torch_cubin.float32(eps)),
        ),
        grid=lambda m: m,
    ),
)

add_rms_norm_backward = torch_cubin.define_op(
    "examples::add_rms_norm_backward(Tensor grad_out, Tensor grad_hidden, Tensor hidden,"
    " Tensor weight, Tensor rstd) -> (Tensor grad_input, Tensor partial)",
    dtypes={"T": [*DTYPES]},
    tensors={
        "grad_out": "T[m, n]",
        "grad_hidden": "T[m, n]",
        "hidden": "T[m, n]",
        "weight": "T[n]",
        "rstd": "float32[m]",
        "grad_input": "T[m, n]",
        "partial": "float32[min(m, 512), n]",
    },
    kernels=kernels(
        "add_rms_norm_backward",
        args=lambda grad_out, grad_hidden, hidden, weight, rstd, grad_input, partial, m, n: (
            *(grad_out, grad_hidden, hidden, weight, rstd, grad_input, partial),
            *(int32(m), int32(n)),
        ),
        grid=lambda m: minimum(m, 512),
    ),
)


def setup_context(ctx, inputs, output):
    _, hidden, rstd = output
    ctx.save_for_backward(hidden, inputs[2], rstd)
    ctx.mark_non_differentiable(rstd)


def backward(ctx, grad_out, grad_hidden, _):
    hidden, weight, rstd = ctx.saved_tensors
    grad_input, partial = add_rms_norm_backward(
        grad_out.contiguous(), grad_hidden.contiguous(), hidden, weight, rstd
    )
    return grad_input, grad_input, partial.sum(0).to(weight.dtype), None


add_rms_norm.register_autograd(backward, setup_context=setup_context)


def reference(x, residual, weight, eps=1e-6):
    """The same function, composed from PyTorch's ops."""
    hidden = x + residual
    return torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], weight, eps), hidden


def results(function, tensors, grads, dtype):
    """Outputs and gradients, computed in `dtype`."""
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
    out, hidden = function(*leaves)[:2]
    gradients = torch.autograd.grad((out, hidden), leaves, [grad.to(dtype) for grad in grads])
    return dict(
        zip(
            ("out", "hidden", "grad_x", "grad_residual", "grad_weight"),
            (out.detach(), hidden.detach(), *gradients),
            strict=True,
        )
    )


def errors_of(m, n, dtype):
    """{what: (our largest error, PyTorch's, half an ulp of the largest value)}."""
    generator = torch.Generator("cuda").manual_seed(m + n)
    shapes = [(m, n), (m, n), (n,), (m, n), (m, n)]
    values = [
        torch.randn(shape, generator=generator, device="cuda", dtype=dtype) for shape in shapes
    ]
    tensors, grads = values[:3], values[3:]
    right = results(reference, tensors, grads, torch.float64)
    ours = results(add_rms_norm, tensors, grads, dtype)
    theirs = results(reference, tensors, grads, dtype)
    return {
        name: (
            (ours[name].double() - value).abs().max().item(),
            (theirs[name].double() - value).abs().max().item(),
            value.abs().max().item() * torch.finfo(dtype).eps / 2,
        )
        for name, value in right.items()
    }


def measure(m, n, dtype):
    """Prints our times and those of PyTorch's two ops."""
    x, residual, grad_out, grad_hidden = (
        torch.randn(m, n, device="cuda", dtype=dtype) for _ in range(4)
    )
    leaves = [x.requires_grad_(), residual.requires_grad_(), x.detach()[0].clone().requires_grad_()]
    times = []
    for function in (add_rms_norm, reference):
        outputs = function(*leaves)[:2]
        gradients = partial(
            torch.autograd.grad, outputs, leaves, (grad_out, grad_hidden), retain_graph=True
        )
        with torch.no_grad():
            times.append(support.microseconds(partial(function, *leaves)))
        times.append(support.microseconds(gradients))
    ours, backward, theirs, their_backward = times
    rate = 4 * x.numel() * x.element_size() / ours / 1e6
    print(f"{m}x{n} {dtype}: {ours:.0f} us ({rate:.2f} TB/s), PyTorch's two ops {theirs:.0f} us")
    print(f"backward: {backward:.0f} us, PyTorch's {their_backward:.0f} us")


def main() -> int:
    print(f"{add_rms_norm}\n{add_rms_norm_backward}")
    support.require_gpu()
    wrong = 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for m, n in ((512, 4096), (3000, 1000), (7, 12_345), (1, 1), (2, 50_000)):
            for what, (ours, theirs, rounding) in errors_of(m, n, dtype).items():
                right = ours <= 2 * theirs + 2 * rounding  # False for NaN
                wrong += not right
                if not right or (m, n) == (512, 4096):
                    found = f"error {ours:.2g}, PyTorch's {theirs:.2g}"
                    print(f"{dtype} {m}x{n} {what}: {found}: {'right' if right else 'WRONG'}")
    measure(8192, 4096, torch.bfloat16)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
