"""The curves that activations follow in 16 bits, against float64."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy
import pytest

HEADER = Path(__file__).parents[2] / "csrc" / "kernels" / "matmul" / "activation_params.h"
EXACT = {
    "kActivationGelu": lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2)),
    "kActivationGeluTanh": lambda x: x
    / (1 + math.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "kActivationSilu": lambda x: x / (1 + math.exp(-x)),
}


def curve_of(name: str) -> numpy.ndarray:
    """The limit and six coefficients, in float32."""
    text = HEADER.read_text()
    number = int(re.search(rf"{name} = (\d)", text)[1])
    table = re.search(r"kActivationCurves\[\] = \{(.*?)\};", text, re.S)[1]
    rows = re.findall(r"\{([^{]*)\{([^}]*)\}\}", table)
    words = ",".join(rows[number]).split(",")
    return numpy.array([w.strip().rstrip("f") for w in words if w.strip()], numpy.float32)


@pytest.mark.parametrize("name", EXACT)
def test_the_curve_is_the_activation(name: str) -> None:
    """Every operation rounds to float32, as follow_curve does (activation.cuh); but exp2 and the
    quotient are exact here."""
    limit, *c = curve_of(name)
    x = numpy.linspace(-20, 20, 200_001).astype(numpy.float32)
    t = numpy.minimum(x * x, limit)
    power = c[5]
    for i in range(4, -1, -1):
        power = power * t + c[i]
    out = x.astype(numpy.float64) / (1 + numpy.exp2((x * power).astype(numpy.float64)))
    exact = numpy.array([EXACT[name](float(value)) for value in x])
    error = numpy.abs(out - exact)
    assert error.max() <= 2e-6
    large = numpy.abs(exact) > 1e-3
    assert (error[large] / numpy.abs(exact[large])).max() <= 1.8e-4
