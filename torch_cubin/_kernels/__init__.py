"""Custom kernels: loading a file, packing the arguments of a launch, launching."""
