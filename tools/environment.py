"""Makes .venv, the environment that every `make` target runs in. Standard library only.

    python3 tools/environment.py          (make does it, once)

If the calling interpreter has a new enough torch, .venv shares its packages and adds only missing
ones. Otherwise the pinned torch is installed. The packages are those of requirements-dev.txt; the
CUDA compiler comes from PyPI if csrc/kernels/build/toolkit.py finds none. Packages that cannot be
installed beside the machine's own torch (without a network, for example) are reported and skipped.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
READY = VENV / "ready"  # make's stamp: newer than requirements-dev.txt and this file
REQUIREMENTS = ROOT / "requirements-dev.txt"
TORCH = "2.13.0"
PYTHON_MIN = (3, 11)  # of the pinned packages; the library itself runs on 3.10 too
# Their output depends on their version, so another version on the machine is not used.
EXACT = {"ruff", "clang-format", "clang-tidy", "mypy", "torch-abi-audit", "deflate"}


def say(text: str) -> None:
    print(f"environment: {text}", flush=True)


def fail(text: str) -> None:
    raise SystemExit(f"environment: {text}")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    return {normal(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.M)}


def torch_min() -> tuple[int, ...]:
    text = (ROOT / "setup.py").read_text()
    return tuple(map(int, re.search(r"^TORCH_MIN = \((\d+), (\d+)\)", text, re.M).groups()))


def machine_torch() -> str | None:
    """The version of the calling interpreter's own torch, if it is new enough to build against."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    if tuple(map(int, re.findall(r"\d+", version)[:2])) >= torch_min():
        return version
    wanted = ".".join(map(str, torch_min()))
    say(f"torch {version} of {sys.executable} is older than {wanted}: not used")
    return None


def create(share_packages: bool) -> None:
    say(f"creating {VENV.name} with {sys.executable}")
    try:
        venv.create(VENV, with_pip=True, symlinks=True)
    except (subprocess.CalledProcessError, ImportError):
        # Debian without python3-venv: sufficient if no package must be installed.
        venv.create(VENV, with_pip=False, symlinks=True, clear=True)
    if not share_packages:
        return
    # NOTE: not --system-site-packages: if the calling interpreter is in a virtual environment, that
    # option would share the packages of its base interpreter.
    folders = [entry for entry in sys.path if entry.endswith("-packages")]
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in folders]
    purelib = sysconfig.get_path("purelib", vars={"base": str(VENV)})
    (Path(purelib) / "packages_of_this_machine.pth").write_text("".join(lines))


def installed() -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json;"
        "print(json.dumps([(d.metadata['Name'], d.version) for d in m.distributions()][::-1]))"
    )
    answer = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    # The first on sys.path wins, hence the reversed list.
    return {normal(name): version for name, version in json.loads(answer.stdout) if name}


def pip_install(*arguments: str) -> bool:
    # --no-compile: imports compile byte code on demand, instead of all of torch's 10,000 files.
    command = [str(PYTHON), "-m", "pip", "install", "-qq", "--no-compile"]
    environment = {"PIP_RETRIES": "2", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **os.environ}
    return subprocess.run([*command, *arguments], env=environment).returncode == 0


def install_packages(shared: str | None) -> bool:
    """Installs requirements-dev.txt into .venv; False if a package could not be installed."""
    wanted, have = pins(REQUIREMENTS.read_text()), installed()
    missing = [
        f"{name}=={version}"
        for name, version in wanted.items()
        if have.get(name) != version and (name in EXACT or not shared or name not in have)
    ]
    if not missing:
        return True
    say(f"installing {len(missing)} pinned packages")
    if pip_install("--no-deps", *missing):
        return True
    if not shared:
        fail(f"could not install the packages of {REQUIREMENTS.name}; see above")
    say(f"going on without {' '.join(missing)}: what needs them will say so")
    return False


def install_compiler() -> bool:
    toolkit = [str(PYTHON), str(ROOT / "csrc" / "kernels" / "build" / "toolkit.py")]
    if subprocess.run(toolkit, capture_output=True).returncode == 0:
        return True
    answer = subprocess.run(
        [*toolkit, "--requirements"], capture_output=True, text=True, check=True
    )
    say("no CUDA toolkit on this machine: installing the compiler from PyPI (about 310 MB)")
    if pip_install("--no-deps", *answer.stdout.split()):
        return True
    say("the CUDA compiler could not be installed: the build will say what it needs")
    return False


def main() -> None:
    start = time.monotonic()
    if sys.version_info < PYTHON_MIN:
        wanted = ".".join(map(str, PYTHON_MIN))
        fail(f"make needs Python {wanted} or newer, got {sys.version.split()[0]}: set PYTHON=...")
    READY.unlink(missing_ok=True)
    shared = machine_torch()
    if subprocess.run([PYTHON, "-c", ""], capture_output=True).returncode if PYTHON.exists() else 1:
        create(bool(shared))
    if "torch" in installed():
        say(f"torch {installed()['torch']} is there")
    else:
        # NOTE: never a bare `torch`, and never --no-deps: its own requirements differ by platform.
        say(f"installing torch {TORCH} (some hundred MB, a minute or two)")
        if not pip_install("--constraint", str(REQUIREMENTS), f"torch=={TORCH}"):
            fail(f"could not install torch {TORCH}; see above")
    complete = all([install_packages(shared), install_compiler()])
    if complete:
        READY.write_text("made by tools/environment.py\n")
    say(f"{VENV.name} is ready ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    main()
