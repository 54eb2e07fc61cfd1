"""The commands of `python -m torch_cubin`."""
