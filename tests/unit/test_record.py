"""The record of the last GPU run: what it hashes and when it is stale; and the GPU tests' gate."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpu import record

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small source tree with a fresh record."""
    for folder in record.FOLDERS:
        (tmp_path / folder / "part").mkdir(parents=True)
        (tmp_path / folder / "part" / "file.txt").write_text(folder)
    (tmp_path / "tests" / "gpu").mkdir()
    shutil.copy(ROOT / ".gitignore", tmp_path / ".gitignore")
    content = {"gpu": "G", "torch": "2.11", "date": "today", "passed": 3, "failed": 0, "skipped": 1}
    content["sources"] = record.source_hash(tmp_path)
    (tmp_path / record.RECORD).write_text(json.dumps(content))
    return tmp_path


def test_record_is_current_until_a_source_changes(tree: Path) -> None:
    assert "of these sources: 3 passed, 0 failed, 1 skipped on G" in record.describe(tree)
    (tree / "csrc" / "part" / "file.txt").write_text("changed")
    assert "STALE" in record.describe(tree)


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: (tree / "torch_cubin" / "new.py").write_text(""),
        lambda tree: (tree / "tests" / "part" / "file.txt").unlink(),
        lambda tree: (tree / "csrc" / "part").rename(tree / "csrc" / "other"),
    ],
)
def test_record_is_stale_after_files_come_go_or_move(tree: Path, change) -> None:
    change(tree)
    assert "STALE" in record.describe(tree)


@pytest.mark.parametrize(
    "name",
    [
        *("torch_cubin/_C.so", "torch_cubin/cubins/a.cubin", "tests/__pycache__/a.pyc", "docs/a"),
        *("csrc/README.md", "torch_cubin/ops.pyi", "torch_cubin/py.typed", "tests/ops/test_a.py"),
        *(f"{folder}/a.py" for folder in record.NOT_READ),
        record.OF_SANITIZERS,
    ],
)
def test_record_ignores_build_products_and_other_folders(tree: Path, name: str) -> None:
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    (tree / name).write_text("built")
    assert "of these sources" in record.describe(tree)


def test_record_counts_what_tests_of_the_gpu_read_of_others(tree: Path) -> None:
    """Helpers of tests/ops, through one another; not its other tests."""
    (tree / "tests" / "gpu" / "test_a.py").write_text("from ops import some_cases\n")
    for name, text in {
        "some_cases": "import worker_of_it",
        "worker_of_it": "",
        "other": "",
    }.items():
        (tree / "tests" / "ops").mkdir(exist_ok=True)
        (tree / "tests" / "ops" / f"{name}.py").write_text(text)
    files = record.source_files(tree)
    assert [n for n in files if n.startswith("tests/ops/")] == [
        "tests/ops/some_cases.py",
        "tests/ops/worker_of_it.py",
    ]


def test_record_counts_what_the_gpu_tests_of_this_tree_read() -> None:
    files = record.source_files(ROOT)
    for name in ("ops/kv_cache_cases.py", "ops/context_parallel_worker.py", "conftest.py"):
        assert f"tests/{name}" in files
    assert "examples/rms_norm.py" in files
    assert "setup.py" in files
    assert "tests/ops/test_attention_host.py" not in files


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"passed": 1}'])
def test_record_that_cannot_be_read_says_so(tree: Path, content: str) -> None:
    (tree / record.RECORD).write_text(content)
    assert "cannot be read" in record.describe(tree)
    (tree / record.RECORD).unlink()
    assert "none" in record.describe(tree)


@pytest.mark.parametrize("order", [(2, 1), (1, 2)])
def test_the_newest_run_on_each_number_of_gpus_is_kept(
    tree: Path, monkeypatch, order: tuple[int, int]
) -> None:
    gpus = 0
    properties = SimpleNamespace(name="G", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for gpus in order:
        record.write(tree, {"passed": 9 if gpus == 2 else 7})
    text = record.describe(tree)
    assert text.count("of these sources") == 2
    assert "9 passed, 0 failed, 0 skipped on G" in text
    assert "7 passed, 0 failed, 0 skipped on G" in text
    assert text.count(", 2 GPUs") == 1
    (tree / "csrc" / "part" / "file.txt").write_text("changed")
    gpus = 2
    for passed in (5, 6):
        record.write(tree, {"passed": passed})
    text = record.describe(tree)
    assert "of these sources: 6 passed" in text
    assert "STALE (the sources have changed since): 7 passed" in text
    assert len(re.findall(r"[0-9]+ passed", text)) == 2


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"gpus": 2}'])
def test_a_record_that_cannot_be_read_is_replaced(tree: Path, monkeypatch, content: str) -> None:
    properties = SimpleNamespace(name="G", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (tree / record.RECORD).write_text(content)
    record.write(tree, {"passed": 9})
    assert "of these sources: 9 passed" in record.describe(tree)


def test_a_run_that_is_ended_while_it_writes_leaves_the_record_as_it_was(
    tree: Path, monkeypatch
) -> None:
    properties = SimpleNamespace(name="G", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def end(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", end)
        record.write(tree, {"passed": 9})
    assert "of these sources: 3 passed" in record.describe(tree)
    record.write(tree, {"passed": 9})
    assert "of these sources: 9 passed" in record.describe(tree)


def test_record_hashes_what_git_would_track() -> None:
    command = [
        "git",
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        *record.FOLDERS,
    ]
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = {
        n
        for n in set(listed.splitlines())
        if (ROOT / n).exists()
        and n not in (record.RECORD, record.OF_SANITIZERS)
        and not n.startswith(tuple(f"{folder}/" for folder in record.NOT_READ))
        and not n.endswith(record.FOR_READERS)
    }
    found = set(record.source_files(ROOT))
    assert found - tracked == set(record.FILES)
    assert {Path(n).parent.as_posix() for n in tracked - found} == {record.CPU_TESTS}


def test_no_test_of_the_gpu_imports_files_that_the_record_skips() -> None:
    names = "|".join(folder.removeprefix("tests/") for folder in record.NOT_READ)
    reads = re.compile(rf"^\s*(?:from|import) (?:{names})\b", re.MULTILINE)
    hashed = [ROOT / name for name in record.source_files(ROOT) if name.startswith("tests/")]
    found = [
        str(file) for file in hashed if file.suffix == ".py" and reads.search(file.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(("required", "outcome"), [("", "1 skipped"), ("1", "1 error")])
def test_gpu_gate_skips_and_counts_or_fails(
    tmp_path: Path, torch_python, required: str, outcome: str
) -> None:
    (tmp_path / "test_x.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_x(): pass\n")
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_CUBIN_REQUIRE_GPU": required,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    arguments = ["-p", "conftest", "-p", "no:cacheprovider", "-q"]
    arguments += ["--rootdir", str(tmp_path), str(tmp_path)]
    code = f"import sys, pytest; sys.exit(pytest.main({arguments!r}))"
    path = [str(TESTS), *sys.path]
    result = torch_python.run(code, env=environment, cwd=tmp_path, path=path, timeout=120)
    assert outcome in result.stdout
    assert "needs 1 CUDA device, found 0" in result.stdout
    assert "GPU record:" in result.stdout
    assert ("GPU tests not run: 1" in result.stdout) == (not required)
    assert (result.returncode == 0) == (not required)


@pytest.mark.parametrize(("workers", "threads"), [("", "none"), ("12", "1"), ("4", "4")])
def test_processes_side_by_side_share_the_processors(workers: str, threads: str) -> None:
    names = ("PYTEST_XDIST_WORKER_COUNT", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    if workers:
        environment["PYTEST_XDIST_WORKER_COUNT"] = workers
    code = "import os; os.cpu_count = lambda: 16; import conftest; "
    code += "print(os.environ.get('OMP_NUM_THREADS', 'none'))"
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, env=environment, cwd=TESTS, capture_output=True, text=True)
    assert answer.stdout.split() == [threads], answer.stderr
