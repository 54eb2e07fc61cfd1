"""Measuring which way of running a product is quickest: torch_cubin.tune, and the sweep."""
