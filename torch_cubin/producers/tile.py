"""cuTile's kernels as ops: docs/producers.md.

    import torch_cubin.producers.tile as tile

    op = tile.define_op(
        "mylib::add(Tensor x, Tensor y) -> Tensor", "add.sm_90.cubin",
        tensors=dict(x="float32[n]", y="float32[n]", out="float32[n]"),
        args=("x", "y", "out", 1024), grid=lambda n: torch_cubin.cdiv(n, 1024))

Importing this needs no cuTile, nor do cubins that it exported; compiling does.
"""

from torch_cubin._tile.op import compile, define_op
from torch_cubin._tile.symbol import TileSignature, parse

__all__ = ["TileSignature", "compile", "define_op", "parse"]
