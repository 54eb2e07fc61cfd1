"""torch_cubin.compile: CUDA C++ by NVRTC and nvcc, their errors, and the cache of both.

Over 500 lines, because all sections share the compilers that are found and the cache's folder.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from users import unprivileged

import torch_cubin
from torch_cubin import errors
from torch_cubin._compile import cache, headers, nvrtc
from torch_cubin._compile import compile as compiler

ROOT = Path(__file__).resolve().parents[2]
AXPY = """
#include <cstdint>
#include <climits>
template <class T, int N>
__global__ void axpy(T* y, const T* x, T a, int32_t n) {
  const std::uint32_t first = (blockIdx.x * blockDim.x + threadIdx.x) * N;
  for (int i = 0; i < N; ++i) {
    if (first + i < n) y[first + i] += a * x[first + i];
  }
}
extern "C" __global__ void zero(float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 0;
}
__global__ void plain(unsigned char* y) { y[0] = UINT8_MAX; }
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_CUBIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def library() -> None:
    try:
        nvrtc.load()
    except errors.FileError as error:
        pytest.skip(f"no NVRTC: {str(error)[:80]}")


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.compiled"))


def test_a_str_that_is_a_file_s_name() -> None:
    for text in ("k.cu", "/tmp/some kernels/k.cu"[:5] + "k.cuh"):
        with pytest.raises(errors.InputError, match=r"Pass pathlib.Path\('"):
            torch_cubin.compile(text, archs="sm_90a")


def test_a_template_without_instances_asks_for_names(library) -> None:
    source = "template <class T> __global__ void f(T* x) { *x = 0; }"
    with pytest.raises(errors.NoKernelError, match='as names=\\["axpy<float, 2>"\\]'):
        torch_cubin.compile(source, archs="sm_90a")
    assert len(torch_cubin.compile(source, names=["f<int>"], archs="sm_90a")) == 1


@pytest.mark.parametrize("argument", ["names", "include", "options", "archs"])
def test_wrong_types_of_list_arguments_are_refused(argument: str) -> None:
    for wrong in (5, [5]):
        given = {"archs": "sm_90a", argument: wrong}
        with pytest.raises(errors.InputError, match=f"argument '{argument}' has a wrong"):
            torch_cubin.compile("", **given)
    with pytest.raises(errors.InputError, match="half of a character"):
        torch_cubin.compile("// \udc80", archs="sm_90a")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_nvcc_without_kernels() -> None:
    with pytest.raises(errors.NoKernelError, match="compiles to no kernel"):
        torch_cubin.compile("int n;", archs="sm_90a", compiler="nvcc")


VARIABLES = "__constant__ float scale; __device__ int table[4] = {1, 2, 3, 4};"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_a_source_of_variables_alone() -> None:
    """For global_tensor(). A template without an instance is the likelier mistake."""
    for text in (VARIABLES, "__constant__ float scale;", "__device__ int table[4];"):
        module = torch_cubin.compile(text, archs=["sm_80", "sm_90a"], compiler="nvcc")
        assert len(module) == 0
        assert [image.arch for image in module.images] == ["sm_80", "sm_90a"]
    template = "template <class T> __global__ void f(T* x) { *x = 0; }"
    with pytest.raises(errors.NoKernelError, match="compiles to no kernel"):
        torch_cubin.compile(VARIABLES + template, archs="sm_90a", compiler="nvcc")


def test_variables_alone_by_nvrtc(library) -> None:
    module = torch_cubin.compile(VARIABLES, archs="sm_90a")
    assert len(module) == 0
    with pytest.raises(errors.NoKernelError, match="holds no kernel at all"):
        module["f"]


def test_a_header_that_is_not_found(library) -> None:
    with pytest.raises(errors.InputError, match=r"(?s)include=\[\.\.\.\].*compiler=.nvcc"):
        torch_cubin.compile("#include <vector>\n__global__ void f() {}", archs="sm_90a")


def test_a_misspelt_name_gets_the_nearest_of_the_given_names(library) -> None:
    module = torch_cubin.compile(AXPY, names=["axpy<float, 2>"], archs="sm_90a")
    with pytest.raises(errors.NoKernelError, match="'plain'"):
        module["plian"]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_load_of_an_object_that_is_not_linked(tmp_path: Path) -> None:
    (tmp_path / "f.cu").write_text("__global__ void f(int* x) { *x = 1; }")
    nvcc = ["nvcc", "-arch=sm_90a"]
    subprocess.run([*nvcc, "-dc", "f.cu", "-o", "f.o"], cwd=tmp_path, check=True)
    with pytest.raises(errors.ImageError, match="relocatable device code \\(nvcc -dc"):
        torch_cubin.load(tmp_path / "f.o")
    link = [*nvcc, "-dlink", "-cubin", "f.o", "-o", "linked.cubin"]  # as the error says
    subprocess.run(link, cwd=tmp_path, check=True)
    assert torch_cubin.load(tmp_path / "linked.cubin").names == ("_Z1fPi",)


def test_load_of_a_source_names_compile(tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text(AXPY)
    with pytest.raises(errors.ImageError, match=r"torch_cubin\.compile\(pathlib\.Path"):
        torch_cubin.load(tmp_path / "k.cu")


def test_names_and_archs(library, folder: Path) -> None:
    names = ["axpy<float, 2>", "axpy<double,4>"]
    module = torch_cubin.compile(AXPY, names=names, archs=["sm_80", "sm_90a"])
    assert [image.arch for image in module.images] == ["sm_80", "sm_90a"]
    kernel = module["axpy<float,2>"]
    assert kernel is module[" axpy< float , 2 > "] is module[kernel.name]
    assert kernel.name.startswith("_Z")
    assert [p.size for p in module["axpy<double, 4>"].info.params] == [8, 8, 8, 4]
    assert "zero" in module
    assert module["plain"].name == "_Z5plainPh"
    assert "axpy<int, 1>" not in module
    with pytest.raises(errors.NoKernelError):
        module["axpy<int, 1>"]
    again = pickle.loads(pickle.dumps(module))
    assert again["axpy<float, 2>"].name == kernel.name
    assert len(entries(folder)) == 2


def test_a_compiled_kernel_becomes_an_op(library, tmp_path: Path) -> None:
    kernel = torch_cubin.compile(AXPY, names=["axpy<float, 2>"], archs="sm_90a")["axpy<float, 2>"]
    op = torch_cubin.define_op(
        "test_compiled::axpy(Tensor(a!) y, Tensor x, float a) -> ()",
        kernel=kernel,
        tensors={"y": "float32[n]", "x": "float32[n]"},
        args=lambda y, x, a, n: (y, x, a, n),
        grid=lambda n: torch_cubin.cdiv(n, 512),
        block=256,
    )
    producer = op.contract["kernels"][0]["producer"]
    assert producer["name"] == "nvrtc"
    assert producer["aliases"] == ["axpy<float,2>"]
    assert producer["version"].startswith("NVRTC 1")
    torch_cubin.save_package(tmp_path / "package", [op])
    assert "test_compiled::axpy" in torch_cubin.load_package(tmp_path / "package")


def test_errors_show_the_line(library) -> None:
    wrong = AXPY.replace("y[i] = 0;", "y[i] = nothing;").replace("UINT8_MAX", "+")
    with pytest.raises(errors.InputError) as caught:
        torch_cubin.compile(wrong, archs=["sm_90a"])
    message = str(caught.value)
    assert 'line 13 does not compile for sm_90a: identifier "nothing" is undefined' in message
    assert "if (i < n) y[i] = nothing;\n" in message
    assert "^" in message
    assert "source.cu(15): error" in message
    with pytest.raises(errors.InputError, match="does not compile"):
        torch_cubin.compile(AXPY, names=["axpy<float>"], archs="sm_90a")
    with pytest.raises(errors.InputError, match="does not compile"):
        torch_cubin.compile(AXPY, archs="sm_90a", options=["--no-such-option"])
    with pytest.raises(errors.InputError, match="does not compile"):
        torch_cubin.compile(AXPY, archs="sm_9999")


WRONG = {
    "a number": ({"source": 5}, "a str or os.PathLike"),
    "a NUL": ({"source": "\0"}, "holds a NUL"),
    "an arch": ({"archs": "90"}, "'sm_80', 'sm_90a'"),
    "archs": ({"archs": []}, "one or more"),
    "a compiler": ({"compiler": "clang"}, "'nvrtc' or 'nvcc'"),
    "names for nvcc": ({"compiler": "nvcc", "names": ["f<int>"]}, "is for NVRTC"),
    "an option": ({"options": [5]}, "a str"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    changes, says = WRONG[case]
    given = {"source": "", "archs": "sm_90a", **changes}
    with pytest.raises(errors.InputError) as caught:
        torch_cubin.compile(given.pop("source"), **given)
    assert says in str(caught.value)


def test_files_and_their_headers(library, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "inc").mkdir()
    (tmp_path / "inc" / "far.h").write_text('#include "near.h"\n')
    (tmp_path / "inc" / "near.h").write_text("#define VALUE 1\n")
    source = tmp_path / "one.cu"
    source.write_text('#include "far.h"\nextern "C" __global__ void f(int* y) { *y = VALUE; }\n')

    def made() -> bytes:
        module = torch_cubin.compile(source, archs="sm_90a", include=[tmp_path / "inc"])
        assert module.origin == f"file '{source}'"
        return module._sources[0][0]

    first = made()
    assert made() == first
    assert len(entries(folder)) == 1
    (tmp_path / "inc" / "near.h").write_text("#define VALUE 2\n")
    assert made() != first
    # A header that comes to stand before the one that was found changes the key, too.
    (tmp_path / "far.h").write_text("#define VALUE 1\n")
    assert made() == first
    assert len(entries(folder)) == 3
    source.write_text('#define H "far.h"\n#include H\n' + source.read_text())
    made()
    assert len(entries(folder)) == 3  # what a macro includes, nothing can say
    with pytest.raises(errors.FileError):
        torch_cubin.compile(tmp_path / "none.cu", archs="sm_90a")


@pytest.mark.parametrize(
    "source",
    [
        '#include "x.h"', "# include <x.h> // why", '#include "x.h"\r', '/* one */ #include "x.h"',
        '# /* one */ include "x.h"', '/* two\nlines */ #include "x.h"', '%:include "x.h"',
        '#import "x.h"', '#inc\\\nlude "x.h"', '#if __has_include("x.h")',
        "#if __has_include( <x.h>)", '#include "{folder}/x.h"', '#include "sub/../x.h"',
        '#include "sub/of.h"', '#include "link/of.h"\n#include "sub/of.h"',
    ],
)  # fmt: skip
def test_every_spelling_of_an_include_is_part_of_the_key(source: str, tmp_path: Path) -> None:
    """A kernel in the cache that a changed header leaves in place is a wrong kernel."""
    home = tmp_path / "home"
    (home / "sub").mkdir(parents=True)
    (home / "sub" / "of.h").write_text('#include "../x.h"\n')
    (tmp_path / "link").mkdir()  # a header under another name has other neighbours
    (tmp_path / "link" / "of.h").symlink_to(home / "sub" / "of.h")
    (tmp_path / "x.h").write_text("int far;")
    folders = [home, tmp_path]
    text = source.replace("{folder}", str(home)) + "\n"
    found = [headers.digest(text, folders, ())]
    for content in ("int n;", "int m;"):
        (home / "x.h").write_text(content)
        found.append(headers.digest(text, folders, ()))
    (home / "x.h").unlink()
    found.append(headers.digest(text, folders, ()))
    assert None not in found
    assert len({*found}) == 3
    assert found[0] == found[3]


def test_a_header_in_several_folders_may_be_any_of_them(tmp_path: Path) -> None:
    """g++ searches those of -I before those of -isystem, in whatever order they are given."""
    folders = headers.folders_of_options(
        ["-isystem", f"{tmp_path}/a", f"-I{tmp_path}/b", f"-idirafter{tmp_path}/c"]
    )
    assert folders == [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
        (folder / "x.h").write_text("int n;")
    found = []
    for folder in folders:
        (folder / "x.h").write_text("int m;")
        found.append(headers.digest("#include <x.h>\n", folders, ()))
    assert len({*found}) == 3


@pytest.mark.parametrize(
    "source",
    ["#include X", "#include_next <x.h>", "#if __has_include(X)", "#if __has_include_next(<x.h>)",
     '# /* two\nlines */ include "x.h"'],
)  # fmt: skip
def test_an_include_that_nothing_can_name_is_not_cached(source: str) -> None:
    assert headers.digest(f"{source}\n", [], ()) is None


@pytest.mark.parametrize("source", ["#ifdef __has_include", "int includes = 1;", "#define X 1"])
def test_what_includes_nothing(source: str) -> None:
    assert headers.digest(f"{source}\n", [], ()) == headers.digest("", [], ())


def test_headers_do_not_depend_on_the_working_folder(
    library, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which folder a process runs in decides nothing, and no cached kernel hides that."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "here.h").write_text("#define VALUE 1\n")
    (tmp_path / "sub" / "far.h").write_text('#include "near.h"\n')
    (tmp_path / "sub" / "near.h").write_text("#define VALUE 2\n")
    monkeypatch.chdir(tmp_path)
    body = 'extern "C" __global__ void f(int* y) { *y = VALUE; }\n'
    for _ in range(2):
        with pytest.raises(errors.InputError, match='source.cu line 1 .*"here.h"') as caught:
            torch_cubin.compile(f'#include "here.h"\n{body}', archs="sm_90a")
        assert "/dev/null" not in str(caught.value)
    # A header still finds its neighbours.
    source = f'#include "far.h"\n{body}'
    assert "f" in torch_cubin.compile(source, archs="sm_90a", include=[tmp_path / "sub"])
    name = 'extern "C" __device__ const char* g() { return __FILE__; }\n' + body
    cubin = torch_cubin.compile(f"#define VALUE g()[0]\n{name}", archs="sm_90a")._sources[0][0]
    assert b"/dev/null" not in cubin


def test_the_cache_is_by_content(library, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    compiled = nvrtc.compile
    monkeypatch.setattr(nvrtc, "compile", lambda *args: (calls.append(1), compiled(*args))[1])

    def make(source: str = AXPY, **more) -> None:
        given = {"names": ["axpy<float, 1>"], "archs": "sm_90a", **more}
        assert "axpy<float, 1>" in torch_cubin.compile(source, **given) or "names" in more

    make()
    make()
    assert len(calls) == 1
    for number, changes in enumerate(
        ({"archs": "sm_80"}, {"options": ["-DOTHER=1"]}, {"names": []}, {"source": AXPY + " "})
    ):
        make(**changes)
        make(**changes)
        assert len(calls) == number + 2
    for path in entries(folder):
        path.write_bytes(path.read_bytes()[:-1])  # damaged: compiled again
    make()
    assert len(calls) == 6
    make(cache=False)
    assert len(calls) == 7
    monkeypatch.setenv("TORCH_CUBIN_CACHE", "0")
    make()
    assert len(calls) == 8
    monkeypatch.setenv("TORCH_CUBIN_CACHE", "/proc/nowhere")
    make()
    assert len(calls) == 9


def test_the_cache_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_FILES", 8)
    for number in range(8):
        cache.keep(f"{number:02}", {}, b"x" * 10)
        os.utime(folder / f"{number:02}.compiled", (number, number))
    cache.find("00")  # used just now
    cache.keep("99", {"a": 1}, b"new")
    names = [path.stem for path in entries(folder)]
    assert names == ["00", "04", "05", "06", "07", "99"]
    assert cache.find("99")[0]["a"] == 1
    monkeypatch.setattr(cache, "MOST_BYTES", 1000)
    cache.keep("large", {}, b"x" * 900)
    assert sum(path.stat().st_size for path in entries(folder)) <= 1000
    for damaged in (b"", b"\n", b"{}\nx", b"[1]\nx", b'{"sha256": 5}\nx'):
        (folder / "99.compiled").write_bytes(damaged)
        assert cache.find("99") is None


def entry(name: str) -> tuple[dict, bytes]:
    return {"number": int(name)}, name.encode() * 20


def is_right_or_absent(name: str) -> bool:
    found = cache.find(name)
    facts, body = entry(name)
    return found is None or (found[0]["number"], found[1]) == (facts["number"], body)


@pytest.mark.fault_case(45)
def test_a_clock_that_was_set_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier entries have future times: they are found, new entries are kept, and evictions take
    no wrong entry. Leftovers that seem new stay."""
    monkeypatch.setattr(cache, "MOST_FILES", 8)
    future = time.time() + 1e9
    for number in range(7):
        cache.keep(f"{number:02}", *entry(f"{number:02}"))
        os.utime(folder / f"{number:02}.compiled", (future + number, future + number))
    leftover = folder / f".{'0' * 64}.compiled.{'1' * 16}"
    leftover.write_bytes(b"x")
    os.utime(leftover, (future, future))
    for number in range(7):
        assert cache.find(f"{number:02}")[1] == entry(f"{number:02}")[1]
        os.utime(folder / f"{number:02}.compiled", (future + number, future + number))
    cache.keep("50", *entry("50"))
    assert cache.find("50")[1] == entry("50")[1]
    for number in range(60, 80):
        cache.keep(str(number), *entry(str(number)))
        assert len(entries(folder)) <= 8
    names = [f"{number:02}" for number in (*range(7), 50, *range(60, 80))]
    assert all(is_right_or_absent(name) for name in names)
    assert leftover.exists()


@pytest.mark.fault_case(45)
def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept, what was kept is still found, and no error is made of it."""
    with unprivileged() as home:
        monkeypatch.setenv("TORCH_CUBIN_CACHE", str(home))
        cache.keep("01", *entry("01"))
        home.chmod(0o555)
        cache.keep("02", *entry("02"))
        assert cache.find("01")[1] == entry("01")[1]
        assert cache.find("02") is None
        assert [path.name for path in home.iterdir()] == ["01.compiled"]


@pytest.mark.fault_case(45)
def test_a_cache_on_a_full_disk(folder: Path) -> None:
    """The system refuses to write past a limit, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal_before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        cache.keep("01", {}, b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, signal_before)
    assert cache.find("01") is None
    assert list(folder.iterdir()) == []  # no half of an entry either


def build_folder(folder: Path, name: str, used: int) -> Path:
    made = folder / name
    made.mkdir(parents=True)
    for file in ("lock", "mine.so"):
        (made / file).write_bytes(b"x" * 100)
        os.utime(made / file, (used, used))
    return made


def test_builds_and_what_was_left_unfinished_are_evicted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders of load_inline count as entries do; temporary files of dead processes go."""
    monkeypatch.setattr(cache, "MOST_FILES", 4)
    builds = [build_folder(folder, f"mine_{n:016x}", used=n) for n in range(4)]
    (folder / "mine_of_a_user").mkdir()
    kept = build_folder(folder, "no_hash", used=0)
    temporaries = [
        folder / f".{'0' * 64}.compiled.{'1' * 16}", folder / f".{'0' * 64}.compiled.{'2' * 16}",
        folder / ".mine",
    ]  # fmt: skip
    for path in temporaries:
        path.write_bytes(b"x")
    os.utime(temporaries[0], (0, 0))
    os.utime(temporaries[2], (0, 0))
    with (builds[0] / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # built in now
        cache.keep("a", {}, b"new")
    assert [path.is_dir() for path in builds] == [True, False, False, True]
    assert kept.is_dir()
    assert (folder / "mine_of_a_user").is_dir()
    assert [path.exists() for path in temporaries] == [False, True, True]
    assert not list(folder.glob(".evicted*"))
    # One that waits for a folder's lock while it is evicted gets the folder that stands then.
    cache._evict_folder(builds[0])
    with cache.locked_folder(builds[0]) as lock:
        assert os.path.samestat(os.fstat(lock.fileno()), (builds[0] / "lock").stat())


def test_a_lock_on_an_evicted_folder_is_taken_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = build_folder(folder, "mine_0123456789abcdef", used=0)
    flock, calls = fcntl.flock, []

    def evicted_meanwhile(lock, how: int) -> None:
        calls.append(how)
        flock(lock, how)
        if len(calls) == 1:
            flock(lock, fcntl.LOCK_UN)
            cache._evict_folder(build)

    monkeypatch.setattr(fcntl, "flock", evicted_meanwhile)
    with cache.locked_folder(build) as lock:
        assert os.path.samestat(os.fstat(lock.fileno()), (build / "lock").stat())
    assert [path.name for path in build.iterdir()] == ["lock"]


def test_a_folder_that_another_process_empties_does_not_fail_the_eviction(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at its lock and the look at its files."""
    build = build_folder(folder, "mine_0123456789abcdef", used=0)
    is_build_folder = cache._is_build_folder

    def emptied_meanwhile(entry: os.DirEntry[str]) -> bool:
        found = is_build_folder(entry)
        if found:
            for file in build.iterdir():
                file.unlink()
        return found

    monkeypatch.setattr(cache, "_is_build_folder", emptied_meanwhile)
    cache.keep("a", {}, b"new")
    assert cache.find("a")[1] == b"new"
    assert list(build.iterdir()) == []  # it was looked at


def test_many_processes_share_the_cache(folder: Path, torch_python) -> None:
    code = (
        "import os\nfrom torch_cubin._compile import cache\ncache.MOST_FILES = 20\n"
        "children = []\n"
        "while len(children) < 2 and (pid := os.fork()):\n    children.append(pid)\n"
        "if len(children) < 2:\n    children.clear()  # of the parent\n"
        "for i in range(150):\n"
        "    name = f'{i % 40:02}'\n    found = cache.find(name)\n"
        "    assert found is None or found[1] == name.encode() * 5000, name\n"
        "    cache.keep(name, {}, name.encode() * 5000)\n"
        "assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * len(children)\n"
    )
    torch_python.output(code, env=os.environ, timeout=120)
    assert len(entries(folder)) <= 40
    assert not [path for path in folder.iterdir() if path.suffix != ".compiled"]


def test_own_headers_are_whole() -> None:
    assert {"cstdint", "stdint.h", "cstddef", "climits"} <= headers.OWN.keys()
    assert headers.digest("#include MACRO\n", [], []) is None
    assert headers.digest("int x;", [], []) == headers.digest("int y;", [], [])


@pytest.mark.parametrize(
    ("symbol", "plain"),
    [("_Z5plainPh", "plain"), ("_Z4axpyIfEvPT_", None), ("_ZN2ns1fEv", None), ("zero", None)],
)
def test_plain_names(symbol: str, plain: str | None) -> None:
    assert compiler._plain_name(symbol) == plain


def test_nvcc(folder: Path, tmp_path: Path) -> None:
    try:
        compiler._nvcc_path()
    except errors.FileError:
        pytest.skip("nvcc is not here")
    source = tmp_path / "two.cu"
    source.write_text('extern "C" __global__ void f(int* y) { *y = 1; }\n__global__ void g() {}\n')
    begun = time.monotonic()
    module = torch_cubin.compile(source, archs=["sm_80", "sm_90a"], compiler="nvcc")
    first = time.monotonic() - begun
    assert [image.arch for image in module.images] == ["sm_80", "sm_90a"]
    assert module["g"].name == "_Z1gv"
    assert len(entries(folder)) == 2
    begun = time.monotonic()
    torch_cubin.compile(source, archs=["sm_80", "sm_90a"], compiler="nvcc")
    assert time.monotonic() - begun < first
    source.write_text("__global__ void f() { nothing; }\n")
    with pytest.raises(errors.InputError, match='line 1 does not compile .*"nothing"'):
        torch_cubin.compile(source, archs="sm_90a", compiler="nvcc")


@pytest.mark.parametrize("name", ["CPATH", "NVCC_APPEND_FLAGS"])
def test_nvcc_compiles_again_for_a_header_that_the_environment_finds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        compiler._nvcc_path()
    except errors.FileError:
        pytest.skip("nvcc is not here")
    monkeypatch.setenv(name, f"{'-I' * (name != 'CPATH')}{tmp_path}")
    source = '#include <value.h>\nextern "C" __global__ void f(int* y) { *y = VALUE; }\n'
    cubins = []
    for value in (1, 2):
        (tmp_path / "value.h").write_text(f"#define VALUE {value}\n")
        module = torch_cubin.compile(source, archs="sm_90a", compiler="nvcc")
        cubins.append(module.image("sm_90a"))
    assert cubins[0] != cubins[1]


@pytest.mark.parametrize(
    "option",
    ["-I/my/folder", "--include-path=/x", "-include", "--include=x.h", "@flags", "-Xcompiler=-I/x"],
)
def test_kernels_whose_options_include_files_are_not_cached(
    option: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels compiled with them are not cached, because the files may change."""
    monkeypatch.setattr(nvrtc, "compile", lambda *_: nvrtc.Compiled(b"cubin", {}, ""))
    monkeypatch.setattr(nvrtc, "version", lambda: "13.0")
    arguments = ("int x;", "x.cu", "source", [], "sm_90a", [])
    for _ in range(2):
        assert compiler._nvrtc(*arguments, [option], True) == (b"cubin", {})
    assert entries(folder) == []
    assert compiler._nvrtc(*arguments, ["-DX=1"], True) == (b"cubin", {})
    assert len(entries(folder)) == 1
