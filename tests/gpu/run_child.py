"""Runs a scenario of child.py or of a *_child.py in a process of its own.

Whatever needs a fresh process (first use, import, fork, torch's precision switches) or may poison
one (a bad catalog, sanitizers) runs there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attention_steps import step_of, tile_of
from gpu import sanitized

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 420  # seconds; the slowest, memcheck, needs one or two minutes


@dataclass(frozen=True)
class Result:
    """What a child did. `answer` is the JSON object that it printed last."""

    returncode: int = 0
    answer: dict = field(default_factory=dict)
    output: str = ""
    kernels: tuple[str, ...] = ()  # of the package, that it launched
    missing: str = ""  # why it could not be tried at all

    def check(self) -> dict:
        """The answer of a child that ended well; fails with its output otherwise."""
        # The first report of a sanitizer says most, the last lines are a backtrace of Python's.
        output = self.output
        if len(output) > 8000:
            output = f"{output[:4000]}\n[...]\n{output[-4000:]}"
        assert self.returncode == 0, f"exit status {self.returncode}\n{output}"
        assert self.answer, f"no answer\n{output}"
        return self.answer


def _package() -> Path:
    """The folder of the built-in kernels."""
    import torch_cubin

    return Path(torch_cubin.__file__).resolve().parent / "cubins"


def _manifest() -> dict:
    return json.loads((_package() / "manifest.json").read_text())


def kernel_names() -> set[str]:
    """Of the built-in kernels."""
    return {kernel["name"] for kernel in _manifest()["kernels"]}


def broken_catalog(kind: str, folder: Path) -> Path:
    """A copy of the built-in package with one thing wrong with all of it."""
    import torch

    package = folder / kind
    if kind == "no_folder":
        return package
    shutil.copytree(_package(), package)
    path = package / "manifest.json"
    manifest = json.loads(path.read_text())
    if kind == "other_arch":  # the kernels of one architecture, all said to be another one's
        kept = manifest["kernels"][0]["arch"]
        manifest["kernels"] = [k for k in manifest["kernels"] if k["arch"] == kept]
    for name in {kernel["file"] for kernel in manifest["kernels"]}:
        image = package / name
        content = bytearray(image.read_bytes())
        if kind == "flipped":
            content[len(content) // 2] ^= 1
        elif kind == "truncated":
            content = content[: len(content) * 6 // 10]
        image.write_bytes(content)
        if kind == "missing_image":
            image.unlink()
    for kernel in manifest["kernels"]:
        if kind == "truncated":
            kernel["sha256"] = hashlib.sha256((package / kernel["file"]).read_bytes()).hexdigest()
        elif kind == "other_arch":
            major = torch.cuda.get_device_capability()[0]
            kernel["arch"] = "sm_120a" if major != 12 else "sm_90a"
        elif kind == "wrong_parameters":
            kernel["params"] = [{"index": 0, "offset": 0, "size": 8}]
        elif kind == "other_struct":
            kernel["params_digest"] = "0" * 64
    path.write_text("{ broken" if kind == "bad_manifest" else json.dumps(manifest))
    if kind == "no_manifest":
        path.unlink()
    return package


def _catalog_of(manifest: dict, folder: Path) -> Path:
    """A package in `folder` with these kernels of the built-in one."""
    package = folder / "catalog"
    package.mkdir()
    for arch in {kernel["arch"] for kernel in manifest["kernels"]}:
        (package / arch).symlink_to(_package() / arch)
    (package / "manifest.json").write_text(json.dumps(manifest))
    return package


def tile_catalog(family: str, kind: str, tile: str, folder: Path) -> Path:
    """A catalog of this GPU's kernels of one kind and tile only, so that the chosen kernel is
    known. `tile` is "128x256", or "128x128x64" if its last size matters; those of attention are
    step_of() and tile_of(). Among these with different features, those for plain calls are used if
    there are any."""
    import torch

    arch = "sm_" + "".join(map(str, torch.cuda.get_device_capability()))
    manifest = _manifest()

    def is_wanted(kernel: dict) -> bool:
        if family == "attention":
            return (step_of(kernel), tile_of(kernel)) == (kind, tile)
        sizes = kernel["tile"][: tile.count("x") + 1]
        return (kernel["kind"], "x".join(map(str, sizes))) == (kind, tile)

    manifest["kernels"] = [
        kernel
        for kernel in manifest["kernels"]
        if kernel["family"] == family and kernel["arch"].rstrip("a") == arch and is_wanted(kernel)
    ]
    plain = [k for k in manifest["kernels"] if "plain" in k.get("takes", ["plain"])]
    manifest["kernels"] = plain or manifest["kernels"]
    return _catalog_of(manifest, folder)


def catalog_without_pairs(folder: Path) -> Path:
    """A catalog without the kernels of attention's backward whose blocks work in pairs, as if this
    GPU had no capacity for clusters of two, and with the others preferred, as below."""
    manifest = _manifest()
    manifest["kernels"] = [
        kernel
        for kernel in manifest["kernels"]
        if kernel["family"] != "attention"
        or (kernel["kind"], kernel["cluster"]) != ("backward", [2, 1, 1])
    ]
    _favour(manifest)
    return _catalog_of(manifest, folder)


def _favour(manifest: dict) -> None:
    """Makes the kernels for Hopper's attention a thousand times as quick, by what they cost."""
    for kernel in manifest["kernels"]:
        if kernel["family"] == "attention" and step_of(kernel).startswith("sm90"):
            kernel["cost"] = {name: cost / 1000 for name, cost in kernel["cost"].items()}


def turned_catalog(turn: int, folder: Path) -> Path:
    """A catalog that has one of the kernels of attention for the same dtype, width and options: in
    turns each of them."""
    manifest = _manifest()
    alike: dict[tuple[Any, ...], list[str]] = {}
    for kernel in manifest["kernels"]:
        if kernel["family"] == "attention" and "takes" in kernel:
            rows, _, width = kernel["tile"]
            key = kernel["dtype"], kernel["kind"], kernel.get("of"), width, kernel["takes"][0]
            # Some serve batch_invariant() alone; pairs of blocks for e4m3 many keys alone.
            some = kernel["kind"] == "forward" and rows < 64
            some = some or (kernel["dtype"] == "float8_e4m3fn" and kernel["cluster"][0] > 1)
            alike.setdefault((*key, some), []).append(kernel["name"])
    others = {x for names in alike.values() for x in names if x != names[turn % len(names)]}
    manifest["kernels"] = [k for k in manifest["kernels"] if k["name"] not in others]
    return _catalog_of(manifest, folder)


def favoured_catalog(folder: Path) -> Path:
    """A catalog whose kernels for Hopper's attention are the quickest wherever they can compute a
    call at all."""
    manifest = _manifest()
    _favour(manifest)
    return _catalog_of(manifest, folder)


def sanitizer() -> str | None:
    """compute-sanitizer's path, or None."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    folders = [home, f"{home}/bin", f"{home}/compute-sanitizer", "/usr/local/cuda/bin"]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(folders)
    )


def sanitizer_version() -> str:
    """What compute-sanitizer says of itself."""
    done = subprocess.run([sanitizer(), "--version"], capture_output=True, text=True, check=True)
    return done.stdout.split("Version")[-1].split()[0] if "Version" in done.stdout else done.stdout


@contextmanager
def _no_other_large() -> Iterator[None]:
    """Waits until no other process of this machine has synccheck track 65,536 mbarriers, which
    takes 60 GB of the GPU's memory: two at once leave none for the other tests."""
    with (Path(tempfile.gettempdir()) / "torch_cubin_synccheck.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(
    scenario: str,
    *arguments: str,
    seconds: float = TIMEOUT,
    variables: dict[str, str] | None = None,
    watched: Iterable[str] = (),
) -> Result:
    """Runs one scenario, with more variables in its environment; a sanitizer sees the kernels whose
    names contain one of `watched`, if there are any. 'catalog KIND', '...sanitize
    TOOL', and 'tile', 'order', 'unaligned' and 'attention_tile', each with KIND TILE,
    'attention_options' and 'attention_alone' prepare what a child cannot."""
    environment = {**os.environ, **(variables or {})}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    script = "child.py"
    for prefix in ("attention", "experts", "fault", "layers", "rows"):
        if scenario.startswith(f"{prefix}_"):
            script = f"{prefix}_child.py"
    if scenario.startswith("attention_") and scenario.endswith("_sanitize"):
        script = "attention_sanitized.py"
    command = [sys.executable, str(ROOT / "tests/gpu" / script), scenario, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        if scenario == "catalog":
            environment["TORCH_CUBIN_CATALOG"] = str(broken_catalog(arguments[0], Path(folder)))
        if scenario in ("tile", "order", "unaligned", "attention_tile"):
            family = "attention" if scenario.startswith("attention_") else "matmul"
            path = tile_catalog(family, *arguments, Path(folder))
            environment["TORCH_CUBIN_CATALOG"] = str(path)
        if scenario == "attention_options":
            environment["TORCH_CUBIN_CATALOG"] = str(favoured_catalog(Path(folder)))
        if scenario == "attention_turns_sanitize":
            path = turned_catalog(int(arguments[2]), Path(folder))
            environment["TORCH_CUBIN_CATALOG"] = str(path)
        if scenario == "attention_alone":
            environment["TORCH_CUBIN_CATALOG"] = str(catalog_without_pairs(Path(folder)))
        if scenario.endswith("sanitize"):
            tool = sanitizer()
            if tool is None:
                return Result(missing="compute-sanitizer is not installed")
            # Every tensor is its own allocation: a read past its end faults.
            if arguments[0] != "racecheck":  # of shared memory
                environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
            options = ["--tool", arguments[0], "--error-exitcode", "86", "--show-backtrace", "no"]
            options += ["--print-limit", str(sanitized.PRINTED)]
            if arguments[0] == "initcheck":
                # It does not follow what the TMA writes, so it would report copies to the host,
                # which compare whole results.
                options += ["--check-api-memory-access", "no"]
            if arguments[0] == "synccheck":
                # It counts mbarriers by itself, too few where kernels over rows copy by them, and
                # then waits forever. With 1,024 it loses count of these and reports right ones,
                # with 1,048,576 it writes out of bounds. More take more of the GPU's memory: with
                # 65,536 in every scenario, the suite beside it had none left (2025.3.1).
                barriers = "65536" if scenario == "rows_sanitize" else "1024"
                options += ["--num-cuda-barriers", barriers]
            if names := sanitized.UNTRACKED.get(arguments[0]):
                options += ["--kernel-name-exclude", ",".join(f"kns={name}" for name in names)]
            for name in watched:  # the others run at their full speed
                options += ["--kernel-name", f"kns={name}"]
            command = [tool, *options, *command]
        is_large = scenario == "rows_sanitize" and arguments[0] == "synccheck"
        try:
            with _no_other_large() if is_large else nullcontext():
                done = subprocess.run(
                    command,
                    env=environment,
                    cwd=ROOT,
                    capture_output=True,
                    text=True,
                    timeout=seconds,
                )
        except subprocess.TimeoutExpired as error:
            text = b"".join(part for part in (error.stdout, error.stderr) if part).decode()
            return Result(returncode=124, output=f"no end within {seconds} s\n{text}")
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    answer = json.loads(answers[-1]) if answers else {}
    kernels = tuple(answer.pop("kernels_launched", ()))
    return Result(done.returncode, answer, done.stdout + done.stderr, kernels)
