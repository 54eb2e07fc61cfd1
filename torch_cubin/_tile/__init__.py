"""cuTile's kernels as ops: the implementation of torch_cubin.producers.tile."""
