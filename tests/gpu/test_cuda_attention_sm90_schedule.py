"""The order of tiles in the forward for Hopper: keys that a second tile finds in shared memory, and
rounds that leave no block idle."""

import numerics
import pytest
import torch
from gpu import attention_cases as ac
from gpu import attention_reference as ar
from gpu import cases, hopper

pytestmark = hopper.for_kernels


def check(what: str, batch: int, heads: tuple, rows: int, keys: int, head_dim: int, **options):
    g = ac.generator(what)
    shapes = ((heads[0], rows), (heads[1], keys), (heads[1], keys))
    # Rows of keys begin within sectors, else no tile is scheduled to find its keys.
    layout = cases.Layout(pad=8 if head_dim % 16 == 0 else 0)
    q, k, v = (ac.draw((batch, h, n, head_dim), torch.bfloat16, g, layout) for h, n in shapes)
    options["enable_gqa"] = True
    ours = torch.ops.cubin.attention_forward(q, k, v, **options)
    want = ar.reference(q, k, v, **options)
    ar.check("bfloat16", what, [ours[0]], want, ours[1])
    again = torch.ops.cubin.attention_forward(q, k, v, **options)
    for x, y in zip(ours, again, strict=True):
        numerics.check_bits(x, y)


@pytest.mark.parametrize(
    ("head_dim", "keys"), [(64, 256), (64, 384), (72, 256), (128, 200), (192, 160), (256, 160)]
)
def test_a_second_tile_with_the_same_keys(head_dim: int, keys: int, nan_memory) -> None:
    """Keys that fill the ring: of two tiles of a head, of more, and of heads that share keys."""
    for kv_heads, rows in ((8, 256), (2, 256), (8, 384), (8, 1000)):
        what = f"{head_dim} {keys} {kv_heads} {rows}"
        check(what, 66, (8, kv_heads), rows, keys, head_dim)


@pytest.mark.parametrize(
    ("batch", "heads", "rows", "head_dim"),
    [
        (8, (9, 3), 1100, 64),
        (8, (25, 25), 520, 64),
        (1, (28, 4), 1024, 128),
        (3, (50, 50), 300, 256),
    ],
)
def test_rounds_back_and_forth(batch: int, heads: tuple, rows: int, head_dim: int, nan_memory):
    """So many causal tiles that pairs would leave blocks idle; the last round is not full."""
    check(f"{heads} {rows}", batch, heads, rows, rows, head_dim, is_causal=True)


@pytest.mark.parametrize("rows", [385, 400, 700, 1000])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_partial_tiles_in_front(head_dim: int, rows: int, nan_memory) -> None:
    """Causal rows of which the first tile has fewer than the others, with as many keys and with
    more, of which the last row sees all."""
    check(f"{head_dim} {rows}", 4, (32, 8), rows, rows, head_dim, is_causal=True)
    shifted = {"is_causal": True, "bottom_right": True}
    check(f"{head_dim} {rows} more", 4, (16, 8), rows, rows + 333, head_dim, **shifted)
