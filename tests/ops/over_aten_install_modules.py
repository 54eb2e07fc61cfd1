"""PyTorch's own samples of its modules (module_db, common_nn) give the same with install() as
without."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from installed import installed
from over_aten_install_opinfo import _clone, _compare, _tensors
from torch.testing._internal import common_nn
from torch.testing._internal.common_modules import module_db

import torch_cubin

MOST_SAMPLES = 3


def _samples(info: Any, training: bool) -> list[Any]:
    torch.manual_seed(0)
    samples = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
    )
    return samples[:MOST_SAMPLES]


def _run(info: Any, sample: Any, training: bool) -> Any:
    """The results, and the gradients of inputs and parameters; or the error."""
    torch.manual_seed(0)
    made, given = sample.constructor_input, sample.forward_input
    arguments = [_clone(each) for each in given.args]
    keywords = {name: _clone(value) for name, value in given.kwargs.items()}
    try:
        module = info.module_cls(*made.args, **made.kwargs).train(training)
        results = module(*arguments, **keywords)
    except Exception as error:  # what PyTorch raises without install()
        return type(error).__name__, str(error)
    leaves = [*module.parameters(), *_tensors([arguments, list(keywords.values())])]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    total = sum(each.sum() for each in _tensors(results) if each.requires_grad)
    if not isinstance(total, torch.Tensor) or not leaves:
        return results
    return results, torch.autograd.grad(total, leaves, allow_unused=True)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
def test_a_module_is_the_same(info, training) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, sample in enumerate(_samples(info, training)):
            wanted = _run(info, sample, training)
            with installed():
                own = _run(info, sample, training)
            _compare(own, wanted, f"{info.name}, sample {i}")


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _older_cases(samples: Any = None, kind: Any = common_nn.NewModuleTest) -> Iterator[Any]:
    for sample in samples or (*common_nn.module_tests, *common_nn.get_new_module_tests()):
        options = dict(sample)
        if "constructor" not in options:
            options["constructor"] = getattr(torch.nn, options.pop("module_name"))
        yield kind(**options)


def _older_losses() -> Iterator[Any]:
    return _older_cases(common_nn.criterion_tests, common_nn.CriterionTest)


def _run_older(case: Any, device: str = "cpu") -> Any:
    given = [case._get_input()]  # random numbers at the first call
    if isinstance(case, common_nn.CriterionTest):
        given += [case._get_target(), *case.extra_args]
    inputs = _tensors(_clone(given))
    inputs = [x.detach().to(device) for x in inputs]
    torch.manual_seed(0)
    module = case.constructor(*case.constructor_args).to(device)
    for x in inputs:
        x.requires_grad_(x.is_floating_point())
    results = module(*inputs)
    leaves = [x for x in (*inputs, *module.parameters()) if x.requires_grad]
    total = sum(each.sum() for each in _tensors([results]))
    if not leaves or not total.requires_grad:
        return results
    return results, torch.autograd.grad(total, leaves, allow_unused=True)


@pytest.mark.filterwarnings("ignore")
def test_the_older_samples_are_the_same(float64) -> None:
    served = set()
    for case in (*_older_cases(), *_older_losses()):
        wanted = _run_older(case)
        with installed():
            own = _run_older(case)
            if torch_cubin.report().served:
                served.add(case.get_name())
        _compare(own, wanted, case.get_name())
    assert len(served) > 5, served


def test_modules_of_linear_layers_are_served() -> None:
    (info,) = (info for info in module_db if info.module_cls is torch.nn.LSTMCell)
    with installed():
        _run(info, _samples(info, True)[0], True)
        assert {"aten::addmm", "aten::mm"} <= {row.function for row in torch_cubin.report().served}
