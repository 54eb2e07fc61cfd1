"""python -m torch_cubin: each command's output and exit status, on good and bad machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import containers
import cubin_check
import pytest
import real_cubins
import torch

import torch_cubin
from torch_cubin import __main__ as cli
from torch_cubin import cpp, errors
from torch_cubin._command_line import demo, doctor
from torch_cubin._compile import nvrtc
from torch_cubin._native import launcher, library

SEVERAL = real_cubins.DATA / "several.sm_90a.cuda130.cubin"


def test_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "torch_cubin", "inspect", str(SEVERAL)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=real_cubins.ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str(torch_cubin.inspect(SEVERAL))


def test_inspect_json_is_the_facts(capsys) -> None:
    assert cli.main(["inspect", "--json", str(SEVERAL)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(
        json.dumps(torch_cubin.inspect(SEVERAL).to_dict())
    )


@pytest.mark.parametrize("path", containers.COMMITTED, ids=lambda path: path.name)
def test_inspect_of_every_kind_of_file(path, capsys) -> None:
    assert cli.main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == cubin_check.inspect(path)
    assert cli.main(["inspect", str(path)]) == 0
    assert capsys.readouterr().out == f"{torch_cubin.inspect(path)}\n"


def keys_of(value, kind: str, found: dict) -> dict:
    """{kind of object: its keys} in a tree of facts."""
    found.setdefault(kind, set()).update(value)
    for key in ("entries", "kernels", "params"):
        for item in value.get(key, ()):
            keys_of(item, f"{value.get('kind', kind)}.{key}", found)
    if value.get("content"):
        keys_of(value["content"], value["content"]["kind"], found)
    return found


def test_every_key_of_the_json_is_documented() -> None:
    found: dict = {}
    for path in containers.COMMITTED:
        facts = torch_cubin.inspect(path).to_dict()
        keys_of(facts, facts["kind"], found)
    text = (real_cubins.ROOT / "docs" / "inspect.md").read_text()
    for kind in ("cubin", "relocatable_cubin", "ptx", "fatbin", "host_elf"):
        assert found[kind]
        assert f"`{kind}`" in text
    for kind, keys in found.items():
        for key in keys:
            assert f"`{key}`" in text or f"[].{key}`" in text, (kind, key)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"\xed\x43\x4e\x7f" + b"\0" * 60, "LTO-IR"),
        (b"BC\xc0\xde" + b"\0" * 60, "LLVM bitcode"),
        (b"\x7fTileIR\0" + b"\0" * 60, "cuTile bytecode"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"PK\3\4" + b"\0" * 60, "zip archive"),
        (b"int main() { return 0; }\n", "text"),
        (b"", "empty"),
    ],
)
def test_inspect_names_what_it_does_not_read(data, what, capsys, tmp_path) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    assert cli.main(["inspect", str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("torch_cubin [image]: file '")
    assert what in captured.err


def test_a_closed_pipe_is_no_error(tmp_path) -> None:
    path = tmp_path / "many.cpp"
    path.write_text(containers.tensorrt_llm({f"k{i}": SEVERAL.read_bytes() for i in range(100)}))
    command = f"{sys.executable} -m torch_cubin inspect {path} | head -n 1"
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, cwd=real_cubins.ROOT
    )
    assert (done.stdout, done.stderr) == (
        f"C source, {path.stat().st_size} bytes, 100 arrays\n",
        "",
    )


def test_without_an_output() -> None:
    command = f"{sys.executable} -m torch_cubin inspect {SEVERAL} >&-"
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, cwd=real_cubins.ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_error_is_one_line_and_status_1(capsys, tmp_path) -> None:
    assert cli.main(["inspect", str(tmp_path / "none.cubin")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("torch_cubin [file]")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["--nonsense"], ["inspect"], ["doctor", "--nonsense"]]
)
def test_wrong_arguments_are_status_2(arguments, capsys) -> None:
    with pytest.raises(SystemExit) as exit_status:
        cli.main(arguments)
    assert exit_status.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_without_a_command_the_commands_are_listed_and_the_status_is_2(capsys) -> None:
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    commands = {"demo", "inspect", "doctor", "cmake-dir", "tune", "export", "bench"}
    assert commands <= set(captured.err.split())


def test_bench_passes_its_arguments_on(monkeypatch) -> None:
    ran = []

    def run(command, check):
        ran.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", run)
    assert cli.main(["bench", "--quick", "--shapes", "1x2x3"]) == 3
    assert ran == [[sys.executable, str(cli.BENCHMARK), "--quick", "--shapes", "1x2x3"]]


def test_bench_is_absent_without_the_benchmarks(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(cli, "BENCHMARK", tmp_path / "none.py")
    with pytest.raises(SystemExit):
        cli.main(["bench"])
    assert "invalid choice" in capsys.readouterr().err


CATALOG = {
    "path": "/nowhere",
    "compiler": "nvcc",
    "archs": ["sm_90a"],
    "kernels": [],
    "refused": [],
}


@pytest.fixture
def no_gpu(monkeypatch):
    """A machine as the checks see it: a CUDA torch that finds no GPU, a whole catalog."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def _raise(tag: str):
    def call(*arguments):
        raise errors.make(tag, f"torch_cubin [{tag}]: as a test wants it")

    return call


def _doctor(capsys) -> tuple[int, str]:
    status = doctor.run()
    return status, capsys.readouterr().out


def test_doctor_succeeds_without_a_gpu(no_gpu, capsys) -> None:
    status, text = _doctor(capsys)
    assert status == 0
    assert "torch finds none" in text
    assert "matmul on cpu equals" in text
    assert "BAD" not in text


def test_doctor_reports_the_launch_extension(no_gpu, monkeypatch, capsys, tmp_path) -> None:
    def line() -> str:
        (found,) = (line for line in _doctor(capsys)[1].splitlines() if line.startswith("launcher"))
        return found

    monkeypatch.delenv("TORCH_CUBIN_PLAIN_LAUNCH", raising=False)
    path = Path(library.PATH).with_name("_launch.abi3.so")
    if launcher.Launcher is not launcher.PlainLauncher:
        assert line() == f"launcher  ok  {path}: takes the common kernel calls"
        with monkeypatch.context() as patch:
            patch.setattr(launcher, "Launcher", launcher.PlainLauncher)
            assert line().startswith(
                f"launcher  --  {path} does not know the tensors of this torch"
            )

        def fails(name: str, really: Callable[[str], object] = doctor.importlib.import_module):
            if name == "torch_cubin._launch":
                raise ImportError("undefined symbol")
            return really(name)

        with monkeypatch.context() as patch:
            patch.setattr(doctor.importlib, "import_module", fails)
            assert line().startswith(f"launcher  BAD {path} does not load (undefined symbol): ")
            assert _doctor(capsys)[0] == 1
    monkeypatch.setenv("TORCH_CUBIN_PLAIN_LAUNCH", "1")
    assert line().startswith("launcher  --  turned off by TORCH_CUBIN_PLAIN_LAUNCH=1: kernel calls")
    monkeypatch.delenv("TORCH_CUBIN_PLAIN_LAUNCH")
    monkeypatch.setattr(doctor.library, "PATH", tmp_path / "_C.so")
    assert line().startswith(f"launcher  --  {tmp_path}/_launch.abi3.so is not there: kernel calls")


def test_doctor_reports_the_requirements_of_custom_kernels(
    no_gpu, monkeypatch, capsys, tmp_path
) -> None:
    text = _doctor(capsys)[1]
    own = text[text.index("\ntools") :]
    for path in (cpp.include_path(), cpp.library_path(), "NVRTC", "libcrypto", "Triton", "nvcc"):
        assert path in own
    monkeypatch.setattr(cpp, "_ROOT", tmp_path)
    monkeypatch.setenv("CXX", str(tmp_path / "no_compiler"))
    status, text = _doctor(capsys)
    assert status == 0  # the installed features need none of it
    for what in ("C++ headers", "libtorch_cubin.so", "libtorch_cubin.a", "a C++ compiler"):
        assert f"-- {what} is missing: without it no " in " ".join(text.split())


def test_doctor_folds_the_working_internals_of_pytorch(no_gpu, monkeypatch, capsys) -> None:
    def lines(*options: str) -> list[str]:
        assert cli.main(["doctor", *options]) == 0
        out = capsys.readouterr().out
        return out[out.index("\ninternals") : out.index("\nkernels")].strip().splitlines()

    monkeypatch.setattr(doctor, "_products", lambda: iter(()))
    every = lines("--all")
    folded = lines()
    lost = [text for _, mark, text in (line.partition(" -- ") for line in every) if mark]
    # A feature that lacks several symbols takes one line.
    assert [line.partition(" -- ")[2] for line in folded[1:]] == list(dict.fromkeys(lost))
    assert len(folded) < len(every)
    assert f"of {len(every)} " in folded[0]


def test_doctor_finds_a_changed_kernel(no_gpu, monkeypatch, capsys) -> None:
    dtypes = ("float32", "any", "bfloat16")
    kernels = [{"name": "a", "arch": "sm_90a", "dtype": dtype} for dtype in dtypes]
    monkeypatch.setattr(
        library, "catalog", lambda: {**CATALOG, "path": "/made/up", "kernels": kernels}
    )
    monkeypatch.setattr(library, "catalog_cubin", _raise("hash"))
    status, text = _doctor(capsys)
    assert status == 1
    assert "BAD sm_90a: 3 kernels, 0.0 MB: bfloat16, float32\n" in text
    assert text.count("BAD torch_cubin [hash]") == 1


def test_doctor_finds_a_kernel_that_the_library_refuses(no_gpu, monkeypatch, capsys) -> None:
    refused = {"name": "k", "arch": "sm_80", "message": "torch_cubin [params]: another struct"}
    monkeypatch.setattr(library, "catalog", lambda: {**CATALOG, "refused": [refused]})
    status, text = _doctor(capsys)
    assert status == 1
    assert "BAD sm_80: torch_cubin [params]: another struct" in text


def test_doctor_shows_a_catalog_that_cannot_be_read(no_gpu, monkeypatch, capsys) -> None:
    monkeypatch.setattr(library, "catalog", _raise("file"))
    status, text = _doctor(capsys)
    assert status == 1
    assert "BAD torch_cubin [file]" in text


def _fails(error: BaseException) -> Callable[..., object]:
    def call(*arguments: object, **keywords: object) -> object:
        raise error

    return call


@pytest.mark.parametrize("spec", ["none", "missing"])
def test_doctor_survives_a_module_without_a_spec(spec, no_gpu, monkeypatch, capsys) -> None:
    for name in ("triton", "nvidia"):
        module = types.ModuleType(name)
        module.__file__ = f"/made/up/{name}.py"
        if spec == "missing":
            del module.__spec__
        monkeypatch.setitem(sys.modules, name, module)
    nvrtc.load.cache_clear()
    status, text = _doctor(capsys)
    assert status == 0
    assert "Triton: /made/up/triton.py" in text
    monkeypatch.setitem(sys.modules, "triton", None)  # as code writes that wants none
    status, text = _doctor(capsys)
    assert status == 0
    assert "Triton is missing" in text


# By case: the replaced object and name, the error that it then raises, and the printed line.
BROKEN = {
    "catalog": (library, "catalog", KeyError("archs"), "kernels   BAD KeyError: 'archs'"),
    "device count": (torch.cuda, "device_count", RuntimeError("no\nway"), "BAD RuntimeError: no\n"),
    "product": (torch, "equal", RuntimeError("CUDA error"), "on cpu fails: RuntimeError: CUDA err"),
    "internals": (library, "pytorch_symbols", TypeError(), "BAD TypeError\n"),
    "platform": (doctor.platform, "platform", OSError("uname"), "BAD OSError: uname"),
    "Triton": (
        doctor,
        "_module",
        SyntaxError("in triton"),
        "--  Triton cannot be found (",
    ),
    "NVRTC": (
        nvrtc,
        "load",
        AttributeError("nvrtcVersion"),
        "--  NVRTC cannot be found (",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_doctor_continues_after_a_failed_check(case, no_gpu, monkeypatch, capsys) -> None:
    object_, name, error, said = BROKEN[case]
    monkeypatch.setattr(library, "catalog_cubin", lambda *arguments: b"")  # it reads every kernel
    monkeypatch.setattr(object_, name, _fails(error))
    status, text = _doctor(capsys)
    assert said in text
    assert status == ("BAD" in said or "fails" in said)
    assert "libcrypto" in text  # the last check's


def test_doctor_reports_each_gpu_that_fails(no_gpu, monkeypatch, capsys) -> None:
    def device(index: int) -> dict[str, object]:
        if index == 0:
            raise errors.fault("driver", "GPU 0", "is lost")
        return {"name": "Fine", "sm": 90, "driver": "13.0", "arch": "sm_90a"}

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(library, "device", device)
    status, text = _doctor(capsys)
    assert status == 1
    assert "BAD 0: torch_cubin [driver]: GPU 0 is lost" in text
    assert "ok  1: Fine (sm_90)" in text
    assert "matmul on cpu equals" in text
    for index in (0, 1):  # this torch has no CUDA at all
        assert f"BAD matmul on cuda:{index} fails: " in text


def test_doctor_in_a_folder_that_is_closed(no_gpu, monkeypatch, capsys, tmp_path) -> None:
    """As root no folder is closed, so the system's answer is made up."""

    def stat(path, *arguments, really=os.stat, **keywords):
        if str(path).startswith(str(tmp_path)):
            raise PermissionError(13, "Permission denied", str(path))
        return really(path, *arguments, **keywords)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(cpp, "_ROOT", tmp_path)
    monkeypatch.setattr(library, "PATH", tmp_path / "_C.so")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("TORCH_CUBIN_PLAIN_LAUNCH", raising=False)
    nvrtc.load.cache_clear()
    status, text = _doctor(capsys)
    assert status == 0
    assert f"{tmp_path}/_launch.abi3.so is not there" in text
    assert "C++ headers is missing" in text
    assert "Error" not in text


def test_doctor_names_errors_of_the_environment(no_gpu, monkeypatch, capsys) -> None:
    monkeypatch.setenv("CXX", "g++ '")
    assert doctor.run() == 0
    with pytest.raises(errors.InputError, match=r"CXX.*No closing quotation"):
        cpp._compiler()
    assert "a C++ compiler is missing" in capsys.readouterr().out


def test_doctor_prints_what_the_terminal_does_not_have(tmp_path) -> None:
    path = tmp_path / "compiler_\N{GREEK SMALL LETTER MU}"
    path.touch(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "torch_cubin", "doctor"],
        capture_output=True, text=True, cwd=real_cubins.ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "CXX": str(path)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "compiler_\\u03bc" in done.stdout


# What `python -m torch_cubin` does.
AS_MODULE = """
import runpy, sys
sys.orig_argv[:] = ["python", "-m", "torch_cubin", *sys.argv[1:]]
runpy._run_module_as_main("torch_cubin")
"""


@pytest.mark.parametrize("command", ["doctor", "demo", ""])
def test_doctor_reports_packages_that_cannot_be_loaded(command, tmp_path, torch_python) -> None:
    """The import itself refuses them, so that no program runs without ops that it was to have."""
    env = {**os.environ, "TORCH_CUBIN_PACKAGES": str(tmp_path / "none")}
    code, argv = (AS_MODULE, ["-m", command]) if command else ("import torch_cubin", ["-m"])
    done = torch_python.run(code, argv=argv, env=env, cwd=real_cubins.ROOT)
    assert done.returncode == 1
    assert "torch_cubin [file]: package " in done.stdout + done.stderr
    assert ("Traceback" in done.stderr) == (command == "")
    if command == "doctor":
        assert "packages  BAD torch_cubin [file]" in done.stdout
        assert "matmul on cpu equals" in done.stdout


def test_doctor_shows_a_gpu_without_kernels(no_gpu, monkeypatch, capsys) -> None:
    device = {"index": 0, "name": "Old", "sm": 75, "driver": "13.0", "arch": None}
    device["arch_error"] = {"tag": "arch", "message": "torch_cubin [arch]: nothing for sm_75"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(library, "device", lambda index: device)
    monkeypatch.setattr(doctor, "CHECKS", [("GPUs", doctor._gpus)])
    status, text = _doctor(capsys)
    assert status == 1
    assert "0: Old (sm_75)" in text
    assert "nothing for sm_75" in text


def test_demo_without_a_gpu_says_so_and_shows_the_cubins(no_gpu, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo, "EXAMPLE", tmp_path / "none.py")
    assert cli.main(["demo"]) == 0
    text = capsys.readouterr().out
    assert "No GPU here" in text
    assert "mma_matmul_bf16" in text
    assert "_attention_bf16" in text
    assert "decode bfloat16" in text
    assert "torch.nn.functional.linear" in text
    assert "torch.nn.functional.scaled_dot_product_attention" in text
    assert "least cosine similarity to stock PyTorch: 1.0000000" in text


@pytest.mark.gpu
def test_demo_on_a_gpu(capsys) -> None:
    assert cli.main(["demo"]) == 0
    text = capsys.readouterr().out
    loaded = next(line for line in text.splitlines() if line.startswith("Loaded for these"))
    assert "mma_matmul_bf16" in loaded
    assert "_attention_bf16" in loaded
    assert "No GPU here" not in text


@pytest.mark.parametrize("part", ["_show_products", "_show_attention"])
def test_demo_fails_where_a_result_is_wrong(part, no_gpu, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(demo, "EXAMPLE", tmp_path / "none.py")
    show = getattr(demo, part)

    def show_wrong(device: str) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(demo, "_error", lambda result, exact: float("nan"))
            return show(device)

    monkeypatch.setattr(demo, part, show_wrong)
    assert cli.main(["demo"]) == 1
