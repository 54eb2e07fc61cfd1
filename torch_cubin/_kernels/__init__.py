"""Kernels of a user's own: loading a file, packing a launch's arguments, launching."""
