"""cuTile's kernels as ops: what torch_cubin.producers.tile is made of."""
