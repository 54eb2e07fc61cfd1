"""The schemas, and torch's own check that an op is registered as it should be."""

from __future__ import annotations

import pytest
import torch
from ops.samples import LINEAR_SHAPES, MATMUL_SHAPES, ids, make_all

CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)

SCHEMAS = {
    "matmul": "(Tensor self, Tensor other) -> Tensor",
    "linear": "(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor",
    "addmm": (
        "(Tensor input, Tensor mat1, Tensor mat2, *, float beta=1., float alpha=1.) -> Tensor"
    ),
}
PUBLIC = {
    "linear": (
        '(Tensor input, Tensor weight, Tensor? bias=None, *, str activation="none") -> Tensor'
    ),
}


@pytest.mark.parametrize("family", SCHEMAS)
def test_schemas(family):
    for name in (family, f"_{family}", f"_{family}_autograd"):
        op = getattr(torch.ops.cubin, name)
        others = {"addmm": ["dtype"], f"_{family}": ["out"]}
        assert op.overloads() == ["default", *others.get(name, [])]
        schema = PUBLIC.get(name, SCHEMAS[family])
        assert str(op.default._schema) == f"cubin::{name}{schema}"


# Every rank case once; zero sizes once.
MATMUL = [MATMUL_SHAPES[i] for i in (0, 2, 3, 4, 6, 10, 14, 17, 21)]
LINEAR = [LINEAR_SHAPES[i] for i in (0, 1, 2, 4, 8, 13)]


@pytest.mark.parametrize("suffix", ["public", "raw", "autograd"])
@pytest.mark.parametrize(
    ("family", "shapes"),
    [("matmul", s) for s in MATMUL] + [("linear", s) for s in LINEAR],
    ids=lambda value: value if isinstance(value, str) else ",".join(map(ids, value)),
)
def test_opcheck(family, shapes, suffix, device):
    name = {"public": family, "raw": f"_{family}", "autograd": f"_{family}_autograd"}[suffix]
    requires_grad = suffix != "raw"  # it has no derivative, by design
    args = tuple(make_all(shapes, device, requires_grad=requires_grad))
    torch.library.opcheck(getattr(torch.ops.cubin, name).default, args, test_utils=CHECKS)


@pytest.mark.parametrize("suffix", ["", "_autograd"])
def test_opcheck_of_layouts_and_dtypes(suffix, device):
    op = getattr(torch.ops.cubin, f"_matmul{suffix}" if suffix else "matmul").default
    a = torch.randn(3, 4, device=device).t().requires_grad_()
    b = torch.randn(3, 10, device=device)[:, ::2]
    torch.library.opcheck(op, (a, b), test_utils=CHECKS)
    half = a.detach().bfloat16().expand(2, 4, 3).requires_grad_()
    torch.library.opcheck(op, (half, b.bfloat16()), test_utils=CHECKS)
