"""Support for torch.compile's Inductor: our ops as extern kernels, and products folded with the ops
that follow them."""
