"""Builds tests/threads/first_use.cpp with ThreadSanitizer and runs it: `make thread-test`.

Nightly rather than a test: the compiler takes a minute. Without Python, torch or a driver: PyTorch
and the driver are those of tests/fuzz/torch_shims.cpp.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "fuzz"))
import fuzz  # noqa: E402

FUZZERS_OWN = {fuzz.HERE / "main.cpp", fuzz.HERE / "declared.cpp"}


def build() -> Path:
    folder = ROOT / "build" / "threads"
    folder.mkdir(parents=True, exist_ok=True)
    compiler = next((c for c in ("g++", "clang++", "clang++-14") if shutil.which(c)), None)
    if compiler is None:
        raise SystemExit("tests/threads/run.py: no C++ compiler")
    json_flag = f"-isystem{fuzz.json_include()}"
    sources = [path for path in fuzz.sources("declared") if path not in FUZZERS_OWN]
    # Three files for the compiler: names that are local to csrc/cubin are apart from the others'.
    of_cubin = [path for path in sources if path.parent.name == "cubin"]
    rest = [path for path in sources if path not in of_cubin]
    flags = ["-std=c++20", "-O1", "-g1", "-fsanitize=thread", "-pthread", f"-I{ROOT / 'csrc'}"]
    flags += [f"-I{fuzz.HERE}", json_flag, *fuzz.headers_of_torch(), "-w"]
    headers = [*(ROOT / "csrc").rglob("*.h"), *fuzz.HERE.glob("*.h")]
    newest = max(path.stat().st_mtime for path in headers)
    objects = []
    for name, parts in (("cubin", of_cubin), ("rest", rest), ("main", [HERE / "first_use.cpp"])):
        unit, made = folder / f"{name}.cpp", folder / f"{name}.o"
        unit.write_text("".join(f'#include "{path}"\n' for path in parts))
        real = [part for path in parts for part in fuzz.parts_of(path)]
        changed = max(newest, *(path.stat().st_mtime for path in real))
        if not made.exists() or made.stat().st_mtime < changed:
            subprocess.run([compiler, *flags, "-c", str(unit), "-o", str(made)], check=True)
        objects.append(str(made))
    program = folder / "first_use"
    subprocess.run([compiler, *flags, *objects, "-o", str(program), "-ldl"], check=True)
    return program


def main() -> int:
    start = time.monotonic()
    program = build()
    built = time.monotonic()
    image = ROOT / "tests" / "data" / "several.sm_90a.cuda130.cubin"
    command = [program, image, fuzz.HERE / "contracts.json"]
    environment = dict(os.environ, TSAN_OPTIONS="halt_on_error=0:exitcode=66")
    done = subprocess.run(list(map(str, command)), env=environment, timeout=600)
    print(f"thread-test: built in {built - start:.0f} s, ran {time.monotonic() - built:.1f} s")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
