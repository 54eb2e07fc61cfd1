"""Fixtures of the GPU tests: the library, strict torch settings, child processes."""

from __future__ import annotations

import concurrent.futures
import faulthandler
import gc
import itertools
import os

import pytest
import torch
from _pytest.skipping import evaluate_skip_marks
from gpu import answers, fresh_memory, run_child

# Seconds for a test: a kernel that hangs would hold the run, and its machine, for ever.
_LIMIT = float(os.environ.get("TORCH_CUBIN_TEST_LIMIT", "240"))

# Of each process of the run: the children of all share the GPU's memory.
_CHILDREN_AT_ONCE = min(16, max(2, (os.cpu_count() or 4) // 2))
_pool = concurrent.futures.ThreadPoolExecutor(max_workers=_CHILDREN_AT_ONCE)
_children: dict[tuple[str, ...], concurrent.futures.Future[run_child.Result]] = {}

# Files that take longest, by their set-up or their child processes: with several processes they are
# begun first.
_SLOW_FILES = (
    *("sanitizer", "attention_tiles", "attention_tiles_portable", "attention_repeats_backward"),
    *("attention_repeats", "examples", "cpp", "attention_sm90_options", "attention_sm90_added"),
    *("producers", "aoti", "define_op_torch", "attention_options", "precision", "sm90"),
    *("numerics", "attention_sm90_packed", "attention_differential", "capture", "loading"),
    *("tuning", "unaligned", "attention_numerics", "attention_semantics", "epilogue"),
    *("install_opinfo", "kv_cache", "faults", "torch", "attention_determinism", "batch_invariant"),
    *("define_op", "sm90_skinny"),
)


def _is_worker(config: pytest.Config) -> bool:
    """Whether this is one of several processes that pytest-xdist runs tests in, a file each."""
    return hasattr(config, "workerinput")


def _begins(item: pytest.Item) -> int:
    name = item.path.stem.removeprefix("test_cuda_")
    return _SLOW_FILES.index(name) if name in _SLOW_FILES else len(_SLOW_FILES)


def _waits(item: pytest.Item) -> bool:
    return item.get_closest_marker("child") is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the tests in the order in which little waits.

    Tests that wait for child processes come late: the children run while the others do. In several
    processes every file's children are started with its first test, and come before its last two
    other tests: with two tests left a process is given its next file, which waits for them.
    """
    if not _is_worker(config):
        items.sort(key=_waits)
        return
    items.sort(key=_begins)
    for _, tests in itertools.groupby(list(items), key=lambda item: item.path):
        tests = list(tests)
        others = [test for test in tests if not _waits(test)]
        waiting = [test for test in tests if _waits(test)]
        at = items.index(tests[0])
        items[at : at + len(tests)] = [*others[:-2], *waiting, *others[-2:]]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """Ends the run where a kernel has faulted: after that, every call of the process fails."""
    report = yield
    if report.failed and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            item.session.shouldstop = f"{item.nodeid}: the CUDA context is lost: {error}"
    return report


@pytest.fixture(scope="session")
def _stderr(request: pytest.FixtureRequest):
    """The real one, which pytest does not capture."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        file = os.fdopen(os.dup(2), "w")
    with file:
        yield file


@pytest.fixture(autouse=True)
def _time_limit(_stderr):
    """Ends the process, and says where it stands, after a test that takes too long."""
    faulthandler.dump_traceback_later(_LIMIT, exit=True, file=_stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session", autouse=True)
def library() -> None:
    """Loads torch_cubin once for the session."""
    import torch_cubin  # noqa: F401


@pytest.fixture(autouse=True)
def _report_of_this_test() -> None:
    """Without the graphs that other tests traced, which report() lists even after a reset."""
    from torch_cubin._drop_in import report

    report.clear(graphs=True)


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
    """Fills fresh memory with NaN, unless TORCH_CUBIN_TEST_FILL=0 forbids it (fresh_memory.py)."""
    if fresh_memory.wanted() == "0":
        yield
        return
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    fresh_memory.fill()
    yield
    torch.use_deterministic_algorithms(deterministic, warn_only=warns)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.fixture(autouse=fresh_memory.wanted() == "1")
def filled_memory(nan_memory) -> None:
    """For every test, also after one that has ended deterministic mode."""


_KEPT = 1 << 30  # bytes of free memory that a process may hold between two tests


@pytest.fixture(autouse=True)
def _shared_memory():
    """Gives back what the largest tests took: up to fourteen processes share the GPU's memory.

    The rest stays: memory that other work has used exposes reads of unwritten memory."""
    yield
    if torch.cuda.is_initialized():
        free = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if free > _KEPT:
            torch.cuda.empty_cache()


@pytest.fixture
def freed_memory():
    """Gives what a test took back to the device, before the next test and to other processes."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    """A CUDA generator whose seed depends on the test alone."""
    return torch.Generator("cuda").manual_seed(sum(request.node.nodeid.encode()))


def _start_children(items: list[pytest.Item]) -> None:
    """Starts the child processes of these tests; each takes seconds, most of it for imports.

    Not for skipped tests: under a sanitizer they take minutes.
    """
    for item in items:
        if evaluate_skip_marks(item) is not None:
            continue
        for marker in item.iter_markers("child"):
            if marker.args not in _children:
                _children[marker.args] = _pool.submit(run_child.run, *marker.args)


@pytest.fixture(scope="module", autouse=True)
def _early_children(request: pytest.FixtureRequest, library: None) -> None:
    """Starts them before the first test: of all files; in a worker, of this one."""
    items = request.session.items
    if _is_worker(request.config):
        items = [item for item in items if item.path == request.path]
    _start_children(items)


@pytest.fixture
def child(request: pytest.FixtureRequest) -> run_child.Result:
    """The result of the scenario that the test's `child` marker names."""
    marker = request.node.get_closest_marker("child")
    result = _children[marker.args].result()
    if result.missing:
        pytest.skip(result.missing)
    request.node.user_properties.append(("kernels", list(result.kernels)))
    return result


@pytest.fixture(scope="module")
def _latest_test() -> dict[str, pytest.Item]:
    """The test that ran last; after the file's last one, its report gets what they all launched."""
    latest: dict[str, pytest.Item] = {}
    yield latest
    if latest:
        launched = answers.kernels_launched()
        latest["test"].user_properties.append(("kernels", launched))


@pytest.fixture(autouse=True)
def _note_the_test(request: pytest.FixtureRequest, _latest_test: dict) -> None:
    _latest_test["test"] = request.node
