"""Random calls end in the same result or error, through the extension and through Python alone."""

from __future__ import annotations

import math
import random

import pytest
import torch
from faults.forked import error_of

import torch_cubin
from torch_cubin._native import launcher


class Index:
    """An int by its __index__ alone."""

    def __index__(self) -> int:
        return 3


class Handle(int):
    """An int of another class."""


x, wide = torch.zeros(64), torch.zeros(8, 8)
VALUES = [
    *(x, x[3:], wide, wide.t(), wide[:, :1], wide[:1], wide[0], torch.zeros(()), torch.zeros(0)),
    *(torch.nn.Parameter(x.clone()), torch.zeros(2, dtype=torch.complex64), wide[::2, ::2]),
    *(torch.zeros(2, dtype=torch.complex64).imag, torch.zeros(3, device="meta"), None),
    *(torch.zeros(1, dtype=torch.complex64).conj().imag, x.as_strided((1, 4), (9, 1))),
    *(torch.ones((), dtype=torch.complex64).conj().imag[None], torch._neg_view(x)),
    *(torch.zeros(3, dtype=torch.complex64).conj(), torch.zeros(2, 0, 3), True, False, Index()),
    *(0, 1, -1, 127, 128, 255, 256, -128, -129, 2**15, 2**16 - 1, 2**16, -(2**15) - 1, 2**31),
    *(2**32 - 1, 2**32, -(2**31) - 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1),
    *(0.0, -0.0, 1.5, 1e-50, 3.4028234e38, 3.4028235e38, 3.5e38, 1e39, math.inf, math.nan),
    *(torch_cubin.int32(5), torch_cubin.float16(1), b"\0", b"12345678", Handle(7), "text", [1]),
]
SHAPES = [
    1,
    2,
    0,
    -1,
    1024,
    1025,
    (1,),
    (2, 3),
    (1, 1, 64),
    (1, 1, 65),
    (),
    (1, 1, 1, 1),
    [4],
    None,
]
SHAPES += [
    2**31,
    2**63,
    2**70,
    True,
    1.0,
    (1, True),
    Index(),
    (1, 2.0),
    Handle(2),
    65536,
    (1, 65536),
]
KEYWORDS = {
    "shared_memory": [0, 100, -1, 49152, 49153, 232448, 232449, 2**70, True, 1.0, None],
    "stream": [None, 0, 5, -1, 2**64, "text"],
    "cluster": [None, 1, 2, (2, 1, 1), 0],
    "cooperative": [True, False],
    "priority": [None, 0, -5, 5],
    "unknown": [1],
}


def test_direct_and_plain_launches_agree_on_random_calls(driver, several):
    if launcher.Launcher is launcher.PlainLauncher:
        pytest.skip("the extension module is not in use")
    r = random.Random(20261121)
    kernels = [several[name] for name in ("vec_add", "small", "structs", "static_shared")]
    launched = 0
    for call in range(6000):
        kernel = r.choice(kernels)
        size = len(kernel.info.params) + (r.random() < 0.05)
        # Mostly values that fit, so that whole calls do.
        arguments = [
            r.choice(VALUES) if r.random() < 0.3 else fitting(r, kernel, index)
            for index in range(size)
        ]
        keywords = {"grid": r.choice(SHAPES) if r.random() < 0.2 else 4, "block": 32}
        if r.random() < 0.2:
            keywords["block"] = r.choice(SHAPES)
        for name, values in KEYWORDS.items():
            if r.random() < 0.06:
                keywords[name] = r.choice(values)
        keywords = dict(r.sample(list(keywords.items()), len(keywords)))
        outcomes = []
        for launch in (kernel, kernel._launch_plainly):
            driver.reset()
            outcomes.append((error_of(lambda: launch(*arguments, **keywords)), driver.launches()))  # noqa: B023
        assert outcomes[0] == outcomes[1], (call, kernel, arguments, keywords)
        launched += len(outcomes[0][1])
    assert 1500 < launched < 4500


def fitting(r: random.Random, kernel, index: int):
    params = kernel.info.params
    size = params[index].size if index < len(params) else 8
    if size == 8:
        return r.choice([x, None, 5]) if index else x
    return r.choice([True, 5, 1.5 if size == 4 else 7]) if size in (1, 2, 4) else bytes(size)
