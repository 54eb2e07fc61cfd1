"""A cubin's kernel as a torch op: eager, compiled, checked in every call, differentiable.

python examples/vec_add_op.py
"""

import sys

import support
import torch

import torch_cubin

CUBINS = sorted((support.ROOT / "tests" / "data").glob("vec_add.*.cubin"))  # one per architecture

vec_add = torch_cubin.define_op(
    "examples::vec_add(Tensor x, Tensor y) -> Tensor",
    kernel=(CUBINS, "vec_add"),
    tensors={"x": "float32[*s]", "y": "float32[*s]", "out": "float32[*s]"},
    args=lambda x, y, out: (x, y, out, torch_cubin.int32(x.numel())),
    grid=lambda x: torch_cubin.cdiv(x.numel(), 256),
    block=256,
)
vec_add.register_autograd(lambda ctx, grad: (grad, grad))


def main() -> int:
    print(vec_add)
    support.require_gpu()
    x, y = (torch.randn(300, 1001, device="cuda") for _ in range(2))
    wrong = support.compare("vec_add(x, y)", torch.ops.examples.vec_add(x, y), x + y)

    @torch.compile(fullgraph=True)
    def model(x, y):
        return torch.relu(vec_add(x, y)) * 2

    wrong += support.compare("torch.compile", model(x, y), torch.relu(x + y) * 2)
    x.requires_grad_()
    vec_add(x, y).square().sum().backward()
    wrong += support.compare("gradient", x.grad, 2 * (x + y).detach())
    for what, call in {
        "another dtype": lambda: vec_add(x.half(), y),
        "another shape": lambda: vec_add(x, y[1:]),
        "strides": lambda: vec_add(x.t(), y.t()),
    }.items():
        try:
            call()
            wrong += 1
        except RuntimeError as error:  # as from every PyTorch op; the text begins with the tag
            print(f"\nA call with {what} is refused:\n{error}")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
