"""Measurement of a product's configs: torch_cubin.tune, and the sweep."""
