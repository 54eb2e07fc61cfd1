"""Uses of PyTorch's private names and layouts."""
