"""torch.compile's Inductor: our ops as extern kernels, and products folded with what follows."""
