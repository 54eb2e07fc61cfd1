"""The built-in ops' rules for PyTorch: checks, fakes, derivatives, vmap, autocast, flops."""
