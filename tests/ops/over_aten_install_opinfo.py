"""PyTorch's own samples of its operators (op_db) give the same with install() as without."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from installed import installed
from torch.testing._internal.common_methods_invocations import op_db

import torch_cubin

# The entries whose samples come to our products, forward or backward: several samples of each. The
# others do not multiply matrices on this path (LAPACK's own products, convolutions, norms); some
# come to our aten::sum.
PRODUCTS = (
    *("mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm", "matmul", "__rmatmul__", "einsum"),
    *("tensordot", "addr", "chain_matmul", "matrix_exp", "cov", "corrcoef"),
    *("linalg.multi_dot", "linalg.matrix_power"),
    *("nn.functional.linear", "nn.functional.bilinear"),
    *("nn.functional.multi_head_attention_forward", "nn.functional.scaled_dot_product_attention"),
)
DECOMPOSITIONS = (
    *("cholesky", "cholesky_inverse", "cholesky_solve", "lu", "lu_solve", "norm", "ormqr"),
    *("pca_lowrank", "pinverse", "qr", "svd", "svd_lowrank", "triangular_solve"),
    *("linalg.cholesky", "linalg.cholesky_ex", "linalg.cond", "linalg.eigh", "linalg.eigvalsh"),
    *("linalg.householder_product", "linalg.inv", "linalg.inv_ex", "linalg.lstsq", "linalg.lu"),
    *("linalg.lu_factor", "linalg.lu_factor_ex", "linalg.lu_solve", "linalg.matrix_norm"),
    *("linalg.norm", "linalg.pinv", "linalg.qr", "linalg.solve", "linalg.solve_ex", "linalg.svd"),
    *("linalg.solve_triangular", "linalg.svdvals", "linalg.tensorinv", "linalg.tensorsolve"),
    *("nn.functional.linear_cross_entropy", "nn.functional.linear_cross_entropy_chunked"),
)
OPS = [op for op in op_db if op.name in PRODUCTS + DECOMPOSITIONS]
UNINITIALISED = ("empty", "empty_like", "empty_permuted", "empty_strided")
UNINITIALISED += ("new_empty", "new_empty_strided")
# Its sample's results are past e4m3's range. PyTorch's CPU makes them NaN or 448, as the operands'
# types and the processor have it.
OVERFLOWING = ("torch._scaled_mm",)
DTYPES = (torch.float32, torch.bfloat16, torch.complex64)  # decompositions: the first
MOST_SAMPLES = {**dict.fromkeys(PRODUCTS, 4), **dict.fromkeys(DECOMPOSITIONS, 2)}


def _results(call: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """The results, or the type and the text of the error."""
    try:
        return call(*arguments, **keywords)
    except Exception as error:  # what PyTorch raises without install()
        return type(error).__name__, str(error)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _clone(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, (list, tuple)):
        return type(value)(_clone(each) for each in value)
    return value


def _run(op: Any, sample: Any, call: Any = None) -> Any:
    arguments = (_clone(sample.input), *_clone(sample.args))
    keywords = {name: _clone(value) for name, value in sample.kwargs.items()}
    torch.default_generator.manual_seed(0)  # torch.manual_seed() asks for a stack trace, 1 ms
    results = _results(call or op, arguments, keywords)
    if call is None:
        differentiable = [
            t for t in _tensors(results) if t.requires_grad and t.dtype.is_floating_point
        ]
        leaves = [t for t in _tensors([arguments, list(keywords.values())]) if t.requires_grad]
        if differentiable and leaves:
            total = sum(tensor.sum() for tensor in differentiable)
            return results, torch.autograd.grad(total, leaves, allow_unused=True)
    return results


def _compare(own: Any, wanted: Any, where: str) -> None:
    if isinstance(wanted, torch.Tensor):
        if wanted.layout == torch.strided:
            assert own.stride() == wanted.stride() or not wanted.numel(), where
        loose = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
        loose |= dict.fromkeys((torch.float32, torch.complex64), 1e-4)
        loose |= dict.fromkeys((torch.float64, torch.complex128), 1e-12)  # the order of sums
        tolerance = loose.get(wanted.dtype, 0)
        torch.testing.assert_close(
            own,
            wanted,
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda m: f"{where}: {m}",
        )
    elif isinstance(wanted, (list, tuple)):
        assert type(own) is type(wanted), (where, own, wanted)
        assert len(own) == len(wanted), (where, own, wanted)
        for each, other in zip(own, wanted, strict=True):
            _compare(each, other, where)
    else:
        assert own == wanted, where


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.formatted_name)
def test_samples_give_the_same_without_install(op) -> None:
    for dtype in DTYPES if op.name in PRODUCTS else DTYPES[:1]:
        if dtype not in op.supported_dtypes("cpu"):
            continue
        gradients = op.supports_autograd and dtype.is_floating_point
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samples = list(op.sample_inputs("cpu", dtype, requires_grad=gradients))
            step = max(1, len(samples) // MOST_SAMPLES[op.name])
            for number, sample in enumerate(samples[::step]):
                calls = [None]
                if op.inplace_variant is not None and not gradients:
                    calls.append(op.inplace_variant)
                for call in calls:
                    wanted = _run(op, sample, call)
                    with installed():
                        own = _run(op, sample, call)
                    _compare(own, wanted, f"{op.formatted_name} {dtype} sample {number} {sample}")


@pytest.mark.filterwarnings("ignore")
def test_all_other_operators_give_the_same() -> None:
    skipped = {id(op) for op in OPS}  # to compare two entries takes 50 us
    for op in op_db:
        dtypes = sorted(
            op.supported_dtypes("cpu"), key=lambda dtype: (dtype != DTYPES[0], str(dtype))
        )
        if id(op) in skipped or op.name in UNINITIALISED + OVERFLOWING or not dtypes:
            continue
        gradients = op.supports_autograd and dtypes[0].is_floating_point
        # Not op.sample_inputs(), which looks for the test's name in all frames for each sample.
        sample = next(iter(op.sample_inputs_func(op, "cpu", dtypes[0], gradients)))
        wanted = _run(op, sample)
        with installed():
            own = _run(op, sample)
        _compare(own, wanted, f"{op.formatted_name} {sample}")


@pytest.mark.parametrize(
    "op", [op for op in OPS if op.error_inputs_func is not None], ids=lambda op: op.formatted_name
)
def test_errors_are_the_same_without_install(op) -> None:
    for number, wrong in enumerate(op.error_inputs("cpu")):
        wanted = _run(op, wrong.sample_input)
        with installed():
            own = _run(op, wrong.sample_input)
        _compare(own, wanted, f"{op.formatted_name} error {number}")


def test_the_samples_reach_our_kernels() -> None:
    """Else the tests above would compare PyTorch with itself."""
    wanted = {"mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm", "matmul"}
    wanted |= {"nn.functional.linear", "linalg.multi_dot"}
    reached = set()
    for op in (op for op in OPS if op.name in wanted):
        with installed():
            for sample in list(op.sample_inputs("cpu", torch.float32))[:3]:
                _run(op, sample)
            if torch_cubin.report().served:
                reached.add(op.name)
    assert reached == wanted
