"""Device code embedded into a library: built by gcc and CMake, read back, damaged."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import containers
import cubin_check
import pytest
import real_cubins
import torch
from preloaded import PreloadedPython
from programs import output_of
from test_container_hostile import host, inspect, refused, tally

import torch_cubin
from torch_cubin import embed, errors

ROOT, DATA = real_cubins.ROOT, real_cubins.DATA
CUBINS = sorted(DATA.glob("vec_add.*.cubin"))
EXAMPLE = ROOT / "examples" / "embedded"

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, found none")


def compiled(unit: Path, *options: str) -> Path:
    library = unit.with_suffix(".so")
    command = ["gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", *options]
    subprocess.run([*command, str(unit), "-o", str(library)], check=True)
    return library


def embedded(folder: Path, files: list[Path], *options: str) -> Path:
    embed.write_unit(folder / "unit.c", files)
    return compiled(folder / "unit.c", *options)


def save_package(folder: Path, **changes: object) -> Path:
    """A package with images only: the embedded files are those that its manifest lists."""
    folder.mkdir()
    images = []
    for path in CUBINS:
        shutil.copy(path, folder)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        images.append({"file": path.name, "sha256": digest})
    manifest = {"format": "torch_cubin package", "version": 1, "images": images, "ops": []}
    (folder / "manifest.json").write_text(json.dumps({**manifest, **changes}))
    (folder / "notes.txt").write_text("no part of the package")
    return folder


@pytest.mark.parametrize(
    "options",
    [(), ("-flto",), ("-Wl,--gc-sections",), ("-x", "c++"), ("-Wl,-s",)],
    ids=["plain", "lto", "gc_sections", "cpp", "stripped"],
)
def test_a_library_of_cubins_is_read_back(options: tuple[str, ...], tmp_path: Path) -> None:
    library = embedded(tmp_path, CUBINS, *options)
    facts = torch_cubin.inspect(library)
    assert (facts.kind, facts.machine) == ("host_elf", "x86-64")
    content = library.read_bytes()
    for path, entry in zip(CUBINS, facts.entries, strict=True):
        assert (entry.name, entry.kind, entry.error) == (path.name, "cubin", None)
        assert content[entry.offset : entry.offset + entry.size] == path.read_bytes()
        assert entry.content == torch_cubin.inspect(path)
        assert entry.arch == entry.content.arch
    assert "3 embedded files" in str(facts)
    module = torch_cubin.load(library)
    assert [image.arch for image in module.images] == [e.arch for e in facts.entries]
    assert module["vec_add"].info.params[3].size == 4


def test_every_kind_of_file_may_be_embedded(tmp_path: Path) -> None:
    names = ("vec_add.ptx", "vec_add.zstd.fatbin", "vec_add.relocatable")
    library = embedded(tmp_path, [DATA / "containers" / name for name in names])
    facts = torch_cubin.inspect(library)
    assert [e.kind for e in facts.entries] == ["ptx", "fatbin", "relocatable_cubin"]
    assert cubin_check.inspect(library) == json.loads(json.dumps(facts.to_dict()))
    assert len(torch_cubin.load(library).images) == 3
    assert len(torch_cubin.load(library, jit=True).images) == 5


def test_several_units_and_fatbins_in_one_library(tmp_path: Path) -> None:
    for index, path in enumerate([*CUBINS[:2], CUBINS[0]]):  # one twice: no clash
        embed.write_unit(tmp_path / f"unit{index}.c", [path])
    with_fatbins = compiled(tmp_path / "unit0.c", *(str(tmp_path / f"unit{i}.c") for i in (1, 2)))
    names = [entry.name for entry in torch_cubin.inspect(with_fatbins).entries]
    assert names == [CUBINS[1].name, CUBINS[0].name, CUBINS[0].name]


def test_embedded_files_with_different_kernels_of_one_name(tmp_path: Path) -> None:
    """Each file is one of its own, as where they are given to load() one by one."""
    data = ROOT / "tests" / "data"
    files = [data / "vec_add.sm_90a.cuda124.cubin", data / "several.sm_90a.cuda130.cubin"]
    module = torch_cubin.load(embedded(tmp_path, files))
    assert module["structs"].name == "structs"
    with pytest.raises(errors.ImageError, match="'vec_add' for sm_90a is in two of the files"):
        module["vec_add"]


def test_odd_paths_are_quoted_and_an_unchanged_unit_is_not_rewritten(tmp_path: Path) -> None:
    odd = tmp_path / 'a "quoted" \\ folder' / "ü.cubin"
    odd.parent.mkdir()
    shutil.copy(CUBINS[0], odd)
    library = embedded(tmp_path, [odd])
    assert torch_cubin.inspect(library).entries[0].name == "ü.cubin"
    unit = tmp_path / "unit.c"
    before = unit.stat().st_mtime_ns
    embed.write_unit(unit, [odd])
    assert unit.stat().st_mtime_ns == before
    odd.write_bytes(CUBINS[1].read_bytes())
    embed.write_unit(unit, [odd])
    assert unit.stat().st_mtime_ns != before


def test_a_file_that_changed_after_the_unit_fails_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "k.cubin"
    shutil.copy(CUBINS[0], path)
    embed.write_unit(tmp_path / "unit.c", [path])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content + b"more")
    library = compiled(tmp_path / "unit.c")
    with pytest.raises(errors.HashError, match="'k.cubin' embedded in file"):
        torch_cubin.load(library)
    with pytest.raises(errors.HashError):
        torch_cubin.inspect(library)


def test_a_package_is_embedded_with_its_manifest(tmp_path: Path) -> None:
    folder = save_package(tmp_path / "package")
    embed.write_unit(tmp_path / "unit.c", package=folder)
    library = compiled(tmp_path / "unit.c")
    assert [e.name for e in torch_cubin.inspect(library).entries] == [p.name for p in CUBINS]
    content = library.read_bytes()
    assert (folder / "manifest.json").read_bytes() in content
    assert b"no part of the package" not in content


def test_invalid_requests_to_embed_are_refused(tmp_path: Path) -> None:
    unit = tmp_path / "unit.c"
    with pytest.raises(errors.InputError, match="has nothing to do"):
        embed.write_unit(unit)
    with pytest.raises(errors.InputError, match="has nothing to do"):
        embed.write_unit(unit, CUBINS, package=tmp_path)
    with pytest.raises(errors.InputError, match="two files of one name: got vec_add"):
        embed.write_unit(unit, [CUBINS[0], CUBINS[0]])
    with pytest.raises(errors.FileError, match="cannot be read: got No such file"):
        embed.write_unit(unit, [tmp_path / "none.cubin"])
    (tmp_path / "empty.cubin").touch()
    with pytest.raises(errors.FileError, match="is empty"):
        embed.write_unit(unit, [tmp_path / "empty.cubin"])
    with pytest.raises(errors.FileError, match=r"manifest\.json' cannot be read"):
        embed.write_unit(unit, package=tmp_path)
    strange = save_package(tmp_path / "strange", images=[{"path": "x"}])
    with pytest.raises(errors.FileError, match="is no package's manifest"):
        embed.write_unit(unit, package=strange)
    other = save_package(tmp_path / "other", images=[{"file": CUBINS[0].name, "sha256": "0" * 64}])
    with pytest.raises(errors.HashError, match="is not the one in the manifest"):
        embed.write_unit(unit, package=other)
    with pytest.raises(errors.ImageError, match="is not a cubin"):
        embed.CubinExtension("mine", [other / "notes.txt"])
    assert not unit.exists()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"output": None}, "argument 'output' has a wrong type: expected a path, got NoneType"),
        ({"output": b"unit.c"}, "'output' has a wrong type: expected a path, got bytes"),
        ({"files": 5}, "'files' has a wrong type: expected paths, or a Module, got int"),
        ({"files": None}, "'files' has a wrong type: expected paths, or a Module, got NoneType"),
        (
            {"files": b"vec_add.cubin"},
            "'files' has a wrong type: expected paths, or a Module, got bytes",
        ),
        ({"files": [CUBINS[0], 7]}, r"'files\[1\]' has a wrong type: expected a path, got int"),
        ({"files": [], "package": 1}, "'package' has a wrong type: expected a path, got int"),
        ({"name": 1}, "'name' has a wrong type: expected a str, got int"),
        ({"symbol": 2}, "'symbol' has a wrong type: expected a str, got int"),
        ({"symbol": "mine\n.byte 0"}, "the symbol .* cannot be embedded under: expected letters"),
        ({"symbol": "2mine"}, "the symbol '2mine' cannot be embedded under"),
        ({"name": "mine", "symbol": ""}, "the symbol '' cannot be embedded under"),
    ],
)
def test_arguments_of_wrong_types(given: dict, named: str, tmp_path: Path) -> None:
    arguments = {"output": tmp_path / "unit.c", "files": [CUBINS[0]], **given}
    with pytest.raises(errors.InputError, match=named):
        embed.write_unit(**arguments)
    assert not any(tmp_path.iterdir())


def test_one_path_is_one_file(tmp_path: Path) -> None:
    embed.write_unit(tmp_path / "one.c", str(CUBINS[0]))
    embed.write_unit(tmp_path / "listed.c", [CUBINS[0]])
    assert (tmp_path / "one.c").read_bytes() == (tmp_path / "listed.c").read_bytes()


def test_as_a_program(tmp_path: Path) -> None:
    """As CMake runs it: no torch, and torch_cubin/inspect.py must not hide Python's inspect."""
    command = [sys.executable, "-I", str(ROOT / "torch_cubin" / "cmake" / "embed.py"), "--output"]
    unit = tmp_path / "unit.c"
    done = subprocess.run([*command, unit, *CUBINS, "--symbol", "mine"], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert b".weak mine\\n" in unit.read_bytes()
    done = subprocess.run([*command, unit, "none.cubin"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "torch_cubin [file]: file 'none.cubin' cannot be read: got No such file or directory.\n"
    )


# --- packages ---

SAVE = """
import sys, torch_cubin
op = torch_cubin.define_op(
    "embedded::vec_add(Tensor x, Tensor y) -> Tensor",
    kernel=(sys.argv[2:], "vec_add"),
    tensors=dict(x="float32[*s]", y="float32[*s]", out="float32[*s]"),
    args=lambda x, y, out: (x, y, out, torch_cubin.int32(x.numel())),
    grid=lambda x: torch_cubin.cdiv(x.numel(), 256),
    block=256,
)
torch_cubin.save_package(sys.argv[1], [op])
"""
LOAD = """
import json, sys, torch, torch_cubin
from torch_cubin._native import library as _lib
ops = torch_cubin.load_package(sys.argv[1])
assert list(ops) == ["embedded::vec_add"], ops
assert torch_cubin.load_package(sys.argv[1]).keys() == ops.keys()  # again: nothing
assert torch_cubin.load_package(sys.argv[2]).keys() == ops.keys()  # the folder: the same content
x = torch.empty(3, 4, device="meta")
print(torch.ops.embedded.vec_add(x, x).shape)
"""
WITHOUT_PYTHON = r"""
#include <dlfcn.h>
#include <stdio.h>

int main(int count, char** arguments) {
  void* torch = dlopen(arguments[1], RTLD_NOW | RTLD_GLOBAL);
  void* library = torch ? dlopen(arguments[2], RTLD_NOW) : NULL;
  if (!library) return puts(dlerror()), 2;
  char* (*load)(const char*) = (char* (*)(const char*))dlsym(library, "torch_cubin_load_package");
  void (*release)(char*) = (void (*)(char*))dlsym(library, "torch_cubin_free");
  char* answer = load(arguments[3]);
  puts(answer);
  release(answer);
  return 0;
}
"""


@pytest.fixture(scope="module")
def python(torch_python: PreloadedPython) -> Callable[..., str]:
    """What a process of its own prints."""

    def run(code: str, *arguments: object, **environment: str) -> str:
        argv = ["-c", *map(str, arguments)]
        return torch_python.output(code, argv=argv, env={**os.environ, **environment})

    return run


@pytest.fixture(scope="module")
def package(python, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A package's folder, and the library that holds it."""
    folder = tmp_path_factory.mktemp("package")
    python(SAVE, folder / "ops", *CUBINS)
    embed.write_unit(folder / "unit.c", package=folder / "ops")
    return folder / "ops", compiled(folder / "unit.c")


def test_a_package_in_a_library_is_loaded(python, package: tuple[Path, Path]) -> None:
    folder, library = package
    assert python(LOAD, library, folder) == "torch.Size([3, 4])\n"


def test_a_library_in_the_environment(python, package: tuple[Path, Path]) -> None:
    code = "import torch, torch_cubin; print(torch.ops.embedded.vec_add.default)"
    assert python(code, TORCH_CUBIN_PACKAGES=str(package[1])) == "embedded.vec_add.default\n"


def test_a_process_without_python_loads_it(package: tuple[Path, Path], tmp_path: Path) -> None:
    source, program = tmp_path / "main.c", tmp_path / "main"
    source.write_text(WITHOUT_PYTHON)
    subprocess.run(["gcc", source, "-o", program, "-ldl"], check=True)
    libtorch = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    library = ROOT / "torch_cubin" / "_C.so"
    (op,) = json.loads(output_of([program, libtorch, library, package[1]]))["ops"]
    assert (op["name"], op["state"]) == ("embedded::vec_add", "defined")
    done = subprocess.run([program, libtorch, library, tmp_path], capture_output=True, text=True)
    assert json.loads(done.stdout)["error"]["tag"] == "file"


def test_libraries_without_a_whole_package_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "library"

    def refused_as(tag: str, words: str, *files: tuple[bytes, bytes]) -> None:
        path.write_bytes(host([(b".torch_cubin", 1, bundle(*files))]))
        with pytest.raises(errors.Error, match=words) as caught:
            torch_cubin.load_package(path)
        assert caught.value.tag == tag

    def manifest(**image: str) -> tuple[bytes, bytes]:
        content = {"format": "torch_cubin package", "version": 1, "images": [image], "ops": []}
        return b"manifest.json", json.dumps(content).encode()

    digest = hashlib.sha256(CUBIN[1]).hexdigest()
    refused_as("file", "is a library without a package in it", CUBIN)
    refused_as("file", "is missing", manifest(file="other.cubin", sha256=digest), CUBIN)
    refused_as("file", "outside of its package", manifest(file="../k.cubin", sha256=digest), CUBIN)
    refused_as("hash", "is not the one that the", manifest(file="k.cubin", sha256="0" * 64), CUBIN)
    with pytest.raises(errors.ImageError, match="is no library with a package in it"):
        torch_cubin.load_package(CUBINS[0])


# --- the example ---


def test_a_wheel_with_one_shared_file() -> None:
    printed = output_of([sys.executable, str(EXAMPLE / "run.py")], timeout=300)
    assert "built mine-1.0-py3-none-linux_x86_64.whl" in printed
    assert "_kernels.abi3.so': sm_120a, sm_80, sm_90a; 1 kernel>" in printed


CMAKE = """
cmake_minimum_required(VERSION 3.18)
project(test LANGUAGES {language})
set(Python_EXECUTABLE {python})
include({cmake}/torch_cubin.cmake)
file(WRITE ${{CMAKE_CURRENT_BINARY_DIR}}/main.{suffix} "int main(void) {{ return 0; }}")
add_library(kernels STATIC ${{CMAKE_CURRENT_BINARY_DIR}}/main.{suffix})
torch_cubin_embed(kernels FILES one.cubin)
add_executable(program ${{CMAKE_CURRENT_BINARY_DIR}}/main.{suffix})
target_link_libraries(program kernels)
target_link_options(program PRIVATE LINKER:--gc-sections)
torch_cubin_embed(program PACKAGE package)
"""


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake, found none")
@pytest.mark.parametrize(("language", "suffix"), [("C", "c"), ("CXX", "cpp")])
def test_cmake(language: str, suffix: str, tmp_path: Path) -> None:
    """Through a static library, into a program whose linker drops what nothing refers to."""
    done = subprocess.run(
        [sys.executable, "-m", "torch_cubin", "cmake-dir"], capture_output=True, text=True, cwd=ROOT
    )
    folder = done.stdout.strip()
    text = CMAKE.format(language=language, suffix=suffix, cmake=folder, python=sys.executable)
    (tmp_path / "CMakeLists.txt").write_text(text)
    shutil.copy(CUBINS[0], tmp_path / "one.cubin")
    save_package(tmp_path / "package")
    build = tmp_path / "build"

    def make() -> str:
        return output_of(["cmake", "--build", build])

    subprocess.run(["cmake", "-S", tmp_path, "-B", build], check=True, capture_output=True)
    make()
    found = torch_cubin.inspect(build / "program")
    assert sorted(e.name for e in found.entries) == sorted(
        ["one.cubin", *(path.name for path in CUBINS)]
    )
    assert "Embedding" not in make()  # nothing changed
    shutil.copy(CUBINS[1], tmp_path / "one.cubin")
    assert "Embedding" in make()
    (one,) = (e for e in torch_cubin.inspect(build / "program").entries if e.name == "one.cubin")
    assert one.arch == torch_cubin.inspect(CUBINS[1]).arch


# --- hostile bundles, under sanitizers ---


def bundle(*files: tuple[bytes, bytes], **fields: int) -> bytes:
    """One bundle; fields overwrite `size`, `count`, or of file 0 `name`, `name_size`, `at`, ..."""
    at, table, payload = 24 + 64 * len(files), [], b""
    for name, data in files:
        place = [at, len(name), at + len(name), len(data)]
        if not table:
            keys = ("name", "name_size", "at", "bytes")
            place = [fields.get(key, value) for key, value in zip(keys, place, strict=True)]
        table.append(struct.pack("<4Q", *place) + hashlib.sha256(data).digest())
        payload += name + data
        at += len(name) + len(data)
    head = struct.pack("<QQ", fields.get("size", at), fields.get("count", len(files)))
    return b"TCBUNDLE" + head + b"".join(table) + payload


CUBIN = (b"k.cubin", CUBINS[0].read_bytes())
HOSTILE = {
    "another magic": (b"TCBUNDLF" + bundle(CUBIN)[8:], "does not begin with TCBUNDLE"),
    "cut short": (bundle(CUBIN)[:-1], "ends outside"),
    "a header alone": (b"TCBUNDLE\x18", "does not begin"),
    "an endless size": (bundle(CUBIN, size=2**64 - 1), "ends outside"),
    "no size": (bundle(CUBIN, size=0), "ends outside"),
    "too many files": (bundle(CUBIN, count=2**60), "table ends outside"),
    "a file outside": (bundle(CUBIN, at=2**63), "lie outside, or overlap"),
    "a file too long": (bundle(CUBIN, bytes=2**64 - 1), "lie outside, or overlap"),
    "a file over its table": (bundle(CUBIN, at=0), "lie outside, or overlap"),
    "a name outside": (bundle(CUBIN, name=2**64 - 8), "lie outside, or overlap"),
    "an endless name": (bundle(CUBIN, name_size=5000), "name is too long"),
    "files over one another": (bundle(CUBIN, (b"b", b"c"), bytes=1 << 20), "outside, or overlap"),
    "no name": (bundle((b"", CUBIN[1])), "or one has none"),
    "one name twice": (bundle(CUBIN, CUBIN), "two of its files have one name"),
    "something behind": (bundle(CUBIN) + b"\0\1", "does not begin"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_damaged_bundles_are_refused(case: str, tmp_path: Path) -> None:
    data, words = HOSTILE[case]
    refused(tmp_path, bytes(host([(b".torch_cubin", 1, data)])), words)


def test_bundles_are_listed(tmp_path: Path) -> None:
    manifest = (b"manifest.json", b'{"format": "torch_cubin package"}')
    data = bundle(manifest, CUBIN) + bytes(40) + bundle(CUBIN)
    facts = inspect(tmp_path, bytes(host([(b".torch_cubin", 1, data)])))
    assert [entry["name"] for entry in facts["entries"]] == ["k.cubin"] * 2
    nested = bytes(host([(b".torch_cubin", 1, bundle(CUBIN))]))
    facts = inspect(tmp_path, bytes(host([(b".torch_cubin", 1, bundle((b"inner", nested)))])))
    assert [(e["kind"], e["content"]) for e in facts["entries"]] == [("unknown", None)]
    wrong = bundle(CUBIN)[:-1] + b"\xff"
    facts = inspect(tmp_path, bytes(host([(b".torch_cubin", 1, wrong)])))
    assert facts["error"]["tag"] == "hash"
    refused(tmp_path, bytes(host([(b".torch_cubin", 1, bundle(manifest))])), "without device code")


def test_damage_anywhere_is_survived(tmp_path: Path) -> None:
    path = tmp_path / "library"
    path.write_bytes(
        host([(b".torch_cubin", 1, bundle(CUBIN, (b"p", containers.CUBIN.read_bytes())))])
    )
    found = tally("truncate_inspect", path)
    assert found["refused"] == path.stat().st_size
    found = tally("flip_inspect", path, 20261121, 1500)
    assert found["refused"] + found["accepted"] == 1500


def test_the_module_is_an_attribute_that_is_imported_late(torch_python) -> None:
    code = """
import sys, torch, torch_cubin
before = set(sys.modules)
assert "torch_cubin.embed" not in before
assert "embed" in dir(torch_cubin)
torch_cubin.embed.write_unit
assert "torch_cubin.embed" in sys.modules
assert "setuptools" in before or "setuptools" not in sys.modules
from torch_cubin import embed
assert embed is torch_cubin.embed
"""
    torch_python.output(code)
