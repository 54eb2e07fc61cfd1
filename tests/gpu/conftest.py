"""Fixtures of the GPU tests: the library, strict torch settings, child processes."""

from __future__ import annotations

import concurrent.futures
import os

import pytest
import torch
from gpu import run_child

_pool = concurrent.futures.ThreadPoolExecutor(max_workers=max(2, (os.cpu_count() or 4) // 4))
_children: dict[tuple[str, ...], concurrent.futures.Future[run_child.Result]] = {}


@pytest.fixture(scope="session", autouse=True)
def library() -> None:
    """Loads torch_cubin once for the session."""
    import torch_cubin  # noqa: F401


@pytest.fixture(autouse=True)
def torch_settings():
    """PyTorch at its most exact, and every setting back as it was.

    Reduced-precision reductions would make PyTorch's own error, our yardstick, larger.
    """
    matmul = torch.backends.cuda.matmul
    names = (
        "allow_tf32",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    )
    before = {name: getattr(matmul, name) for name in names}
    for name in names:
        setattr(matmul, name, False)
    yield
    for name, value in before.items():
        setattr(matmul, name, value)


@pytest.fixture
def nan_memory():
    """Fills fresh memory with NaN, as torch.empty does under deterministic algorithms."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    """A CUDA generator whose seed depends on the test alone."""
    return torch.Generator("cuda").manual_seed(sum(request.node.nodeid.encode()))


@pytest.fixture(scope="session", autouse=True)
def _start_children(request: pytest.FixtureRequest, library: None) -> None:
    """Starts the child processes of all collected tests: each costs seconds, most of it import."""
    for item in request.session.items:
        for marker in item.iter_markers("child"):
            if marker.args not in _children:
                _children[marker.args] = _pool.submit(run_child.run, *marker.args)


@pytest.fixture
def child(request: pytest.FixtureRequest) -> run_child.Result:
    """The result of the scenario that the test's `child` marker names."""
    marker = request.node.get_closest_marker("child")
    result = _children[marker.args].result()
    if result.missing:
        pytest.skip(result.missing)
    return result
