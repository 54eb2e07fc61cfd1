"""The record of the last whole run of the suite on a GPU: tests/gpu/last_run.json.

It holds the GPU, the versions, the counts, the package's kernels that no test ran, and a hash of
the sources of that run, so that a reader without a GPU can tell whether these very sources were
tested on one. Written by tests/conftest.py after such a run. `python tests/gpu/record.py` says in
one line whether it is up to date.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
import re
import subprocess
from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from pathlib import Path

RECORD = "tests/gpu/last_run.json"
OF_SANITIZERS = "tests/gpu/last_sanitized.json"  # sanitized.py
# Sources of the build, and all that a run on a GPU imports, runs or reads; setup.py has the
# compiler options.
FOLDERS = ("csrc", "torch_cubin", "tests", "examples")
FILES = ("setup.py", "docs/your_own_kernel.md")  # the tutorial, whose steps a test runs
# No run on a GPU reads these: they test on the CPU or on the stand-in driver; or they are for
# people, editors and type checkers.
NOT_READ = tuple(f"tests/{name}" for name in ("fake_driver", "faults", "fuzz", "threads", "unit"))
FOR_READERS = (".md", ".pyi", ".typed")
CPU_TESTS = "tests/ops"  # of which those of tests/gpu read some


def _ignored_patterns(root: Path) -> list[str]:
    """The patterns of .gitignore. NOTE: no `**`, and a negation is of files alone: a test compares
    with git itself.

    Read here, not asked of git, because the hash must come out the same in a copy of the tree
    that has no .git folder (the GPU machine, a source archive).
    """
    lines = (root / ".gitignore").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _is_ignored(path: str, is_folder: bool, patterns: list[str]) -> bool:
    ignored = False
    for pattern in patterns:  # the last one that matches decides
        if pattern.endswith("/") and not is_folder:
            continue
        wanted = pattern.removeprefix("!").rstrip("/")
        anchored = "/" in wanted
        name = path if anchored else path.rsplit("/", 1)[-1]
        if fnmatch(name, wanted.lstrip("/")):
            ignored = not pattern.startswith("!")
    return ignored


def _read_of_cpu_tests(root: Path) -> set[str]:
    """The files of tests/ops that tests/gpu names, itself or through one another."""
    files = {path.stem: path for path in (root / CPU_TESTS).glob("*.*") if path.stem != "conftest"}
    waiting = [*(root / "tests").glob("*.py"), *(root / "tests" / "gpu").glob("*.py")]
    found = set()
    while waiting:
        words = set(re.findall(r"\w+", waiting.pop().read_text(errors="replace")))
        for stem in words & files.keys():
            path = files.pop(stem)
            found.add(path.relative_to(root).as_posix())
            waiting.append(path)
    return found


def source_files(root: Path) -> list[str]:
    """What a run on a GPU reads, of what git would track, sorted; without the record itself."""
    patterns = _ignored_patterns(root)
    of_cpu_tests = _read_of_cpu_tests(root)

    def walk(folder: Path) -> Iterator[str]:
        for path in folder.iterdir():
            name = path.relative_to(root).as_posix()
            if name in NOT_READ or _is_ignored(name, path.is_dir(), patterns):
                continue
            if path.is_dir():
                yield from walk(path)
            elif name in (RECORD, OF_SANITIZERS) or path.suffix in FOR_READERS:
                continue
            elif not name.startswith(f"{CPU_TESTS}/") or name in of_cpu_tests:
                yield name

    listed = [
        name for folder in FOLDERS if (root / folder).is_dir() for name in walk(root / folder)
    ]
    return sorted([*listed, *(name for name in FILES if (root / name).is_file())])


def source_hash(root: Path) -> str:
    """sha256 over the names and contents of source_files()."""
    digest = hashlib.sha256()
    for name in source_files(root):
        content = hashlib.sha256((root / name).read_bytes()).hexdigest()
        digest.update(f"{name}\0{content}\n".encode())
    return digest.hexdigest()


def driver_version() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.splitlines()[0].strip()


def kernels_of(root: Path, sm: int, ran: Collection[str]) -> dict:
    """Of the package's kernels for a GPU, how many the tests ran, and which they did not."""
    try:
        manifest = json.loads((root / "torch_cubin" / "cubins" / "manifest.json").read_text())
        entries = [(kernel["name"], kernel["arch"]) for kernel in manifest["kernels"]]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    names = {name for name, arch in entries if arch.rstrip("af") == f"sm_{sm}"}
    return {"built": len(names), "not_run": sorted(names - set(ran))} if names else {}


def _previous(path: Path) -> dict:
    try:
        before = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return before if isinstance(before, dict) else {}


def _joined(before: dict, content: dict) -> dict:
    """The newest run, and under "others" the newest on each other number of GPUs."""
    others = {**before.get("others", {}), str(before.get("gpus", 1)): before}
    others = {
        gpus: {name: value for name, value in run.items() if name != "others"}
        for gpus, run in sorted(others.items())
        if gpus != str(content["gpus"]) and "sources" in run
    }
    return {**content, "others": others} if others else content


def write(
    root: Path,
    counts: dict[str, int],
    fault_cases: dict[int, int] | None = None,
    kernels: Collection[str] = (),
) -> Path:
    """Writes the record of a run on this machine's GPU.

    The newest run on each other number of GPUs stays in the record. `fault_cases`: of each case of
    faults/cases.py, how many tests passed that show it. `kernels`: the names of the package's
    kernels that the tests or their child processes have launched.
    """
    import torch

    properties = torch.cuda.get_device_properties(0)
    content = {
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "driver": driver_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "sources": source_hash(root),
        **{name: counts.get(name, 0) for name in ("passed", "failed", "skipped")},
        "fault_cases": {str(case): count for case, count in sorted((fault_cases or {}).items())},
        "kernels": kernels_of(root, 10 * properties.major + properties.minor, kernels),
    }
    path = root / RECORD
    content = _joined(_previous(path), content)
    # At once, so that a run that is ended here leaves the old record or the new one.
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=2) + "\n")
    unfinished.replace(path)
    return path


def _summary(run: dict, sources: str) -> str:
    """What a run found, and whether it was of these sources."""
    state = (
        "of these sources"
        if run["sources"] == sources
        else "STALE (the sources have changed since)"
    )
    result = (
        f"{state}: {run['passed']} passed, {run['failed']} failed, {run['skipped']} skipped "
        f"on {run['gpu']}, torch {run['torch']}, {run['date']}"
    )
    if run.get("gpus", 1) > 1:
        result += f", {run['gpus']} GPUs"
    if kernels := run.get("kernels"):
        ran = kernels["built"] - len(kernels["not_run"])
        result += f", {ran} of the package's {kernels['built']} kernels run"
    return result


def describe(root: Path) -> str:
    """One line: what the record says, and whether it is of these sources."""
    try:
        content = json.loads((root / RECORD).read_text())
        sources = source_hash(root)
        runs = [content, *content.get("others", {}).values()]
        results = "; ".join(_summary(run, sources) for run in runs)
    except FileNotFoundError:
        return f"GPU record: none ({RECORD}): run the tests on a machine with a GPU"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"GPU record: {RECORD} cannot be read ({error!r}): run the tests on a GPU again"
    return f"GPU record: {results}"


if __name__ == "__main__":
    print(describe(Path(__file__).resolve().parents[2]))
