"""torch.utils.flop_counter counts as many operations as for torch.matmul, each call once."""

from __future__ import annotations

import pytest
import torch
from ops.samples import (
    LINEAR_SHAPES,
    MATMUL_SHAPES,
    ids,
    linear,
    make_all,
    matmul,
    reference_linear,
)
from torch.utils.flop_counter import FlopCounterMode

CASES = [(matmul, torch.matmul, shapes) for shapes in MATMUL_SHAPES]
CASES += [(linear, reference_linear, shapes) for shapes in LINEAR_SHAPES]


def case_id(case) -> str:
    return f"{case[1].__name__}-{','.join(map(ids, case[2]))}"


def count(f) -> int:
    with FlopCounterMode(display=False) as mode:
        f()
    return mode.get_total_flops()


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_count_equals_torchs_in_every_grad_mode(case, device):
    op, stock, shapes = case
    for requires_grad in (False, True):
        args = make_all(shapes, device, requires_grad=requires_grad)
        expected = count(lambda: stock(*args))  # noqa: B023
        assert count(lambda: op(*args)) == expected  # noqa: B023
        with torch.no_grad():
            assert count(lambda: op(*args)) == expected  # noqa: B023
        with torch.inference_mode():
            assert count(lambda: op(*args)) == expected  # noqa: B023


# An outer product, which the gradient of a vector is, is elementwise here and an mm in torch.
@pytest.mark.parametrize(
    "case", [case for case in CASES if 1 not in map(len, case[2][:2])], ids=case_id
)
def test_count_of_forward_and_backward(case, device):
    op, stock, shapes = case
    args = make_all(shapes, device, requires_grad=True)
    assert count(lambda: op(*args).sum().backward()) == count(lambda: stock(*args).sum().backward())


def test_raw_ops_are_counted(device):
    a, b = make_all(((2, 3), (3, 4)), device)
    for name in ("_matmul", "_matmul_autograd"):
        assert count(lambda: getattr(torch.ops.cubin, name)(a, b)) == 48  # noqa: B023
    for name in ("_linear", "_linear_autograd"):
        assert count(lambda: getattr(torch.ops.cubin, name)(a, b.t())) == 48  # noqa: B023


def test_fake_tensors_are_counted():
    a, b = make_all(((2, 3), (3, 4)), "meta")
    assert count(lambda: matmul(a, b)) == 48


IMPORTS = {
    "before": "import torch.utils.flop_counter, torch_cubin",
    "after": """
import torch_cubin
assert "torch.utils.flop_counter" not in sys.modules
import torch.utils.flop_counter
""",
    "after a search": """
import importlib.util, torch_cubin
for _ in range(2):
    assert importlib.util.find_spec("torch.utils.flop_counter") is not None
assert "torch.utils.flop_counter" not in sys.modules
""",
    "through another finder": """
import importlib.util, torch_cubin

class Other:
    busy = False

    def find_spec(self, name, path=None, target=None):
        if name != "torch.utils.flop_counter" or self.busy:
            return None
        self.busy = True
        try:
            return importlib.util.find_spec(name)
        finally:
            self.busy = False

sys.meta_path.insert({where}, Other())
""",
    "reloaded": """
import importlib, torch_cubin, torch.utils.flop_counter
importlib.reload(torch.utils.flop_counter)
""",
    "before and reloaded": """
import importlib, torch.utils.flop_counter, torch_cubin
importlib.reload(torch.utils.flop_counter)
""",
}
finder = IMPORTS.pop("through another finder")
IMPORTS["through a finder before"] = finder.replace("{where}", "0")
IMPORTS["through a finder behind"] = finder.replace("{where}", "1")


@pytest.mark.parametrize("order", IMPORTS)
def test_counter_imported_before_or_after(order, fresh_python):
    code = f"""
import sys
import torch
assert "torch.utils.flop_counter" not in sys.modules
{IMPORTS[order]}
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as mode:
    torch.ops.cubin.matmul(torch.ones(2, 3), torch.ones(3, 4))
print(mode.get_total_flops())
"""
    done = fresh_python.run(code)
    assert done.stdout.strip() == "48", done.stderr
