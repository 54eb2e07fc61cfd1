"""Measuring which config of a product is quickest: torch_cubin.tune, and the sweep."""
