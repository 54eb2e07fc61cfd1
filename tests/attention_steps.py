"""What the kernels of attention compute, for tests that choose or name them."""

from __future__ import annotations


def step_of(kernel: dict) -> str:
    """ "forward", "sm90 e4m3 backward", "gradient of keys", ...: the kind of a manifest's entry,
    behind "sm90" and "e4m3" where they apply, and what it is of."""
    hopper = kernel["params_header"].startswith("attention/sm90/")
    e4m3 = kernel["dtype"] == "float8_e4m3fn"
    of = ["of", kernel["of"]] if "of" in kernel else []
    return " ".join([*["sm90"] * hopper, *["e4m3"] * e4m3, kernel["kind"], *of])


def tile_of(kernel: dict) -> str:
    """ "128x128x64": rows, columns and head_dim of its tiles; "2x128x128x64" in blocks of two teams
    with a tile each."""
    teams = kernel.get("cost", {}).get("teams", 1)
    return "x".join(map(str, ([teams] if teams > 1 else []) + kernel["tile"]))
