"""Cost model of the kernels: predicts the fastest tile, cluster and split of a product.

csrc/ops/matmul/sm90_cost.cpp is this model with corrections; here it selects configs for bench.py.

The time of a k block is the maximum of three: the tensor cores (4096 FLOP per cycle), shared memory
(128 bytes per cycle: writes of the TMA and reads of wgmma), and the block's share of L2 bandwidth.
"""

from __future__ import annotations

from harness import How, cdiv

L2_BYTES = 64.7  # per cycle and multiprocessor, measured with small tiles
CLOCK = 1816.0  # cycles per microsecond
POWER = 750e6  # FLOP per microsecond at the power limit
DRAM = 3.8e6  # bytes per microsecond
FIXED = 1.84  # us: launch, first loads, last stores
EXCHANGE = 0.0
EXCHANGE_BYTES = 15.0
SHARP = 4.73
JOIN = 14.8
STREAM = 10.5
TILE = 300  # cycles between two tiles of a block that the other warpgroup does not hide


def k_block(bm: int, bn: int, cluster: str) -> float:
    compute = bm * bn / 32
    shared = (bm + bn) + bm / 64 * (64 + bn)
    a = bm / 2 if cluster == "n" else bm
    b = bn / 2 if cluster == "m" else bn
    return (compute**SHARP + shared**SHARP + ((a + b) * 128 / L2_BYTES) ** SHARP) ** (1 / SHARP)


def predict(facts: dict, how: How, m: int, n: int, k: int, batch: int = 1) -> float:
    bm, bn = facts["tile"]
    per = 2 if how.cluster else 1
    cm, cn = (2 if how.cluster == "m" else 1), (2 if how.cluster == "n" else 1)
    tiles = cdiv(cdiv(m, bm), cm) * cdiv(cdiv(n, bn), cn) * batch
    k_blocks = cdiv(k, 64)
    slots = 132 // per
    one = k_block(bm, bn, how.cluster)
    extra = 0.0
    if how.cluster == "k":
        units = cdiv(k_blocks, 2) * cdiv(tiles, slots)
        extra = EXCHANGE + bm * bn * 4 / EXCHANGE_BYTES / CLOCK
    elif how.stream:
        whole, rest = divmod(tiles, slots)
        units = whole * k_blocks
        if rest:
            parts = how.parts or slots / rest
            units += k_blocks / parts
            # One part is written, parts - 1 are read.
            extra = bm * bn * 4 * parts / JOIN / CLOCK + STREAM
    else:
        units = cdiv(tiles, slots) * k_blocks
    waves = max(1.0, tiles / slots)
    us = (units * one + waves * TILE) / CLOCK + extra
    flops, size = 2.0 * m * n * k * batch, 2.0 * batch * (m * k + k * n + m * n)
    # A smooth maximum of the bounds: when two bounds are close, both cost time.
    return sum(x**SHARP for x in (us, flops / POWER, size / DRAM)) ** (1 / SHARP) + FIXED


def candidates(kernels: dict, prefix: str, m: int, n: int, k: int, batch: int = 1):
    """(predicted us, kernel, how) of each config, best first."""
    found = []
    for name, kernel in kernels.items():
        if not name.startswith(prefix):
            continue
        facts = kernel.facts if hasattr(kernel, "facts") else kernel
        bm, bn = facts["tile"]
        blocks = 132
        for cluster in ("", "m", "n", "k"):
            if (cluster == "m" and m <= bm) or (cluster == "n" and n <= bn):
                continue
            tiles = cdiv(m, bm) * cdiv(n, bn) * batch
            hows = [How(cluster, blocks, pdl=True)]
            if cluster == "k":
                if tiles * 2 > blocks or k < 512 or not facts["pairs"]:
                    continue
            elif facts["streams"] and tiles >= 2 * blocks:
                hows.append(How(cluster, blocks, stream=True, pdl=True))
            found += [(predict(facts, how, m, n, k, batch), name, how) for how in hows]
    return sorted(found, key=lambda x: x[0])
