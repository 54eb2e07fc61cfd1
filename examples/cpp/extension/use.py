"""The op of ops.cpp from Python: eager, and under torch.compile.

python examples/cpp/extension/use.py LIBRARY       (cpp_example_ops.abi3.so)
"""

from __future__ import annotations

import sys

import torch


def load(library: str) -> None:
    torch.ops.load_library(library)
    torch.library.register_fake("cpp_example::scale_add", lambda x, y, scale: torch.empty_like(x))


def main() -> int:
    load(sys.argv[1])
    scale_add = torch.ops.cpp_example.scale_add
    x, y = (torch.randn(1000, 1001, device="cuda") for _ in range(2))

    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return scale_add(x.relu(), y, 0.5).sum(dim=0)

    expected = (x.relu() * 0.5 + y).sum(dim=0)
    torch.testing.assert_close(model(x, y), expected)
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(x, y), expected)
    torch.library.opcheck(scale_add.default, (x, y, 0.5))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.testing.assert_close(scale_add(x, y, 2.0), x * 2 + y)
    print("cpp_example::scale_add: eager, compiled, on a stream of its own: right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
