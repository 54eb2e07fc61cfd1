"""Fresh processes that do not wait for PyTorch's import: a parent imports it once and forks them.

    with PreloadedPython(["torch"]) as python:
        done = python.run("import torch_cubin; print(1)", env={...})     # as subprocess.run does

Each run has its own environment, working folder, arguments and `__main__`; of this package and of
its tests nothing is imported before. Its end runs what atexit holds and frees nothing, or is an
interpreter's whole end (`finalize`). What the
system's loader reads when a process starts (LD_LIBRARY_PATH) must be given to PreloadedPython.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path


class PreloadedPython(contextlib.AbstractContextManager):
    def __init__(self, modules: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.env = dict(os.environ if env is None else env)
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.env,
            cwd=self._folder.name,
            text=True,
        )

    def run(
        self,
        code: str,
        *,
        argv: Sequence[str] = ("-c",),
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        path: Sequence[str] | None = None,
        finalize: bool = False,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """Runs `code` with sys.argv `argv`, sys.path `path` (else this process's), and `env`, or
        what was given to PreloadedPython. `finalize`: the end of the process is part of the test.
        """
        output, errors = (Path(self._folder.name) / name for name in ("stdout", "stderr"))
        request = {
            "code": code,
            "argv": list(argv),
            "env": dict(self.env if env is None else env),
            "cwd": str(cwd or Path.cwd()),
            "path": list(sys.path if path is None else path),
            "finalize": finalize,
            "stdout": str(output),
            "stderr": str(errors),
        }
        self._ask(request)
        pid = json.loads(self._process.stdout.readline())
        with _killed_after(pid, timeout):
            status = json.loads(self._process.stdout.readline())
        texts = [file.read_text(errors="replace") for file in (output, errors)]
        return subprocess.CompletedProcess(list(argv), status, *texts)

    def output(self, code: str, **options: object) -> str:
        """What run() prints, which must end with status 0."""
        done = self.run(code, **options)
        assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    def _ask(self, request: dict) -> None:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()


@contextlib.contextmanager
def _killed_after(pid: int, seconds: float):
    import signal
    import threading

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(seconds, kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _serve(modules: Sequence[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    # The children's collections would visit all objects made so far, a tenth of a second each time.
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            answers.close()
            _exit_as(request)
        print(pid, file=answers, flush=True)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(status, file=answers, flush=True)


def _exit_as(request: dict) -> None:
    """The child: becomes what was asked for."""
    for number, name in ((0, os.devnull), (1, request["stdout"]), (2, request["stderr"])):
        file = os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv[:], sys.path[:] = request["argv"], request["path"]
    main = types.ModuleType("__main__")
    if request["argv"][0] != "-c":
        main.__file__ = request["argv"][0]
    sys.modules["__main__"] = main
    status = 0
    try:
        exec(compile(request["code"], request["argv"][0], "exec"), vars(main))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status == 1 and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:  # as an interpreter would
        status = 1
        traceback.print_exc()
    if request["finalize"]:
        gc.unfreeze()
        sys.exit(status)
    # An interpreter would now free all of PyTorch, which takes longer than most of what runs here.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve(sys.argv[1:])
