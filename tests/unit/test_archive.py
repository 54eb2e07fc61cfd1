"""Zip archives with device code: AOTInductor's .pt2, and what hostile ones do."""

from __future__ import annotations

import io
import os
import random
import re
import struct
import subprocess
import time
import zipfile
from pathlib import Path

import containers
import elf_builder
import pytest
import real_cubins
import torch
from elf_builder import value
from test_static_library import library

import torch_cubin
from torch_cubin import errors
from torch_cubin._inspection import archive
from torch_cubin._kernels import module as module_

ROOT = Path(__file__).resolve().parents[2]
CUBIN = (real_cubins.DATA / "vec_add.sm_90a.cuda124.cubin").read_bytes()
OTHER = (real_cubins.DATA / "declared.sm_90a.cuda130.cubin").read_bytes()
SEVERAL = (real_cubins.DATA / "several.sm_90a.cuda130.cubin").read_bytes()

# As torch/_inductor/codegen/cpp_wrapper_gpu.py writes a kernel's function.
WRAPPER = r"""
namespace torch::aot_inductor {
template <typename in_ptr0_type_, typename out_ptr0_type_, typename kernels_type_>
static __attribute__((noinline)) void call_vec_add(
    const in_ptr0_type_& in_ptr0,
    const out_ptr0_type_& out_ptr0,
    int64_t xnumel,
    int32_t device_idx_,
    cudaStream_t stream_,
    kernels_type_& kernels_,
    const std::optional<std::string>& cubin_dir_ = std::nullopt
){
    /*
    triton_meta={'signature': {'in_ptr0': '*fp32', 'out_ptr0': '*fp32', 'xnumel': 'i32'}}
    */
    uint32_t grid_0 = ((xnumel + (1024 - 1)) / (1024));
    uint32_t grid_1 = 1;
    uint32_t grid_2 = 1;
    if (grid_0 == 0 || grid_1 == 0 || grid_2 == 0) return;
    if (kernels_.vec_add == nullptr) {
        kernels_.vec_add = loadKernel("/tmp/ab/cab\"x.cubin", "vec_add", 512, cubin_dir_);
    }
    CUdeviceptr var_0 = reinterpret_cast<CUdeviceptr>(in_ptr0.data_ptr());
    CUdeviceptr var_1 = reinterpret_cast<CUdeviceptr>(out_ptr0.data_ptr());
    int32_t var_2 = xnumel;
    CUdeviceptr global_scratch_3 = 0;
    void* kernel_args_[] = {&var_0, &var_1, &var_2, &global_scratch_3};
    launchKernel(kernels_.vec_add, grid_0, grid_1, grid_2, 4, 512, kernel_args_, stream_);
}
"""


def pt2(path: Path, files: dict[str, bytes]) -> Path:
    """By the writer that torch's packages are written with: stored, aligned, of 64-bit records."""
    writer = torch._C.PyTorchFileWriter(str(path))
    for name, data in files.items():
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return path


def real(path: Path) -> Path:
    folder = "data/aotinductor/model"
    return pt2(
        path,
        {
            f'{folder}/cab"x.cubin': CUBIN,
            f"{folder}/cxy.cubin": OTHER,
            f"{folder}/c123.wrapper.cpp": WRAPPER.encode(),
            f"{folder}/c123.wrapper.so": b"\x7fELF and so on",
            "archive_format": b"pt2",
        },
    )


def zipped(*files: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as made:
        for name, data in files:
            made.writestr(name, data)
    return out.getvalue()


def test_a_package_lists_its_cubins_and_their_launches(tmp_path: Path) -> None:
    found = torch_cubin.inspect(real(tmp_path / "m.pt2"))
    assert (found.kind, found.machine) == ("archive", None)
    assert found.size == (tmp_path / "m.pt2").stat().st_size
    first, second = found.entries
    assert first.name.endswith('data/aotinductor/model/cab"x.cubin')
    assert (first.kind, first.arch, first.size, first.compression) == (
        *("cubin", "sm_90a", len(CUBIN)),
        "none",
    )
    (launch,) = first.launches
    assert (launch.kernel, launch.num_warps, launch.shared_memory) == ("vec_add", 4, 512)
    assert launch.grid == ("((xnumel + (1024 - 1)) / (1024))", "1", "1")
    assert launch.arguments == (
        "CUdeviceptr reinterpret_cast<CUdeviceptr>(in_ptr0.data_ptr())",
        "CUdeviceptr reinterpret_cast<CUdeviceptr>(out_ptr0.data_ptr())",
        "int32_t xnumel",
        "CUdeviceptr 0",
    )
    assert second.launches == ()
    text = str(found)
    for part in (
        "zip archive",
        "2 files",
        "4 warps, 512 B dynamic shared memory",
        "int32_t xnumel",
    ):
        assert part in text, text
    as_dict = found.to_dict()
    assert as_dict["entries"][0]["launches"][0]["grid"][1:] == ["1", "1"]
    assert torch_cubin.inspect((tmp_path / "m.pt2").read_bytes()) == found


def test_a_package_of_torch_2_11() -> None:
    """tests/data/aoti: what aoti_compile_and_package wrote on a GPU, of softmax(relu(2x) @ w) + 1,
    without its libraries, and packed."""
    found = torch_cubin.inspect(ROOT / "tests" / "data" / "aoti" / "softmax.torch211.sm_90a.pt2")
    pointwise, softmax = (entry.launches[0] for entry in found.entries)
    assert all(len(entry.launches) == 1 for entry in found.entries)
    assert pointwise.kernel == "triton_poi_fused_mul_relu_0"
    assert pointwise.grid == ("((xnumel + (128 - 1)) / (128))", "1", "1")
    assert (pointwise.num_warps, pointwise.shared_memory) == (4, 0)
    assert pointwise.arguments[2:] == ("int32_t xnumel", "CUdeviceptr 0", "CUdeviceptr 0")
    assert softmax.kernel.startswith("triton_per_fused__softmax_add")
    assert softmax.grid == ("xnumel", "1", "1")
    assert (softmax.num_warps, softmax.shared_memory) == (4, 16)
    assert softmax.arguments[1:3] == ("int32_t xnumel", "int32_t r0_numel")
    for image, launch in zip(found.images(), (pointwise, softmax), strict=True):
        (kernel,) = image.kernels
        assert kernel.name == launch.kernel
        assert len(kernel.params) == len(launch.arguments)
        assert kernel.required_block == (32 * launch.num_warps, 1, 1)


def test_its_kernels_are_loaded(tmp_path: Path) -> None:
    module = torch_cubin.load(real(tmp_path / "m.pt2"))
    assert {"vec_add", "axpy"} <= set(module)
    assert [len(data) for data, _ in module._read_again()] == [len(CUBIN), len(OTHER)]
    assert "cab" in module._read_again()[0].origin
    again = torch_cubin.load([tmp_path / "m.pt2", real_cubins.DATA / "vec_add.sm_80.cuda118.cubin"])
    assert {image.arch for image in again.images} == {"sm_90a", "sm_80"}
    given = torch_cubin.load((tmp_path / "m.pt2").read_bytes())
    assert set(given) == set(module)


def test_compressed_packages_and_packages_with_cubins_in_a_library(tmp_path: Path) -> None:
    packed = zipped(("a.cubin", CUBIN), ("b.wrapper.cpp", b""), method=zipfile.ZIP_DEFLATED)
    assert torch_cubin.inspect(packed).entries[0].compression == "deflate"
    assert "vec_add" in torch_cubin.load(packed)
    library = tmp_path / "lib.so"
    array = ",".join(map(str, CUBIN))
    (tmp_path / "a.c").write_text(f"const unsigned char __vec_add_start[] = {{{array}}};")
    try:
        subprocess.run(["cc", "-shared", str(tmp_path / "a.c"), "-o", str(library)], check=True)
    except FileNotFoundError:
        pytest.skip("needs a C compiler")
    embedded = WRAPPER.replace(r'"/tmp/ab/cab\"x.cubin"', "__vec_add_start")
    data = zipped(("m/x.wrapper.so", library.read_bytes()), ("m/x.wrapper.cpp", embedded.encode()))
    (entry,) = torch_cubin.inspect(data).entries
    assert entry.kind == "host_elf"
    assert [launch.kernel for launch in entry.launches] == ["vec_add"]


def test_libraries_with_versions_static_ones_and_ptx() -> None:
    """As in wheels of CUDA libraries."""
    object_ = (containers.FOLDER / "vec_add.object").read_bytes()
    static = library((b"a.o/", object_))
    for name, content in (("lib/libk.so.12", object_), ("lib/libk.so.1.2.3", object_),
                          ("lib/libk.a", static)):  # fmt: skip
        module = torch_cubin.load(zipped((name, content), ("README", b"text")))
        assert list(module) == ["vec_add"], name
    ptx = b".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\nret;\n}\n"
    assert list(torch_cubin.load(zipped(("k.ptx", ptx)), jit=True)) == ["k"]


def test_an_archive_without_device_code_says_so() -> None:
    for files in ([], [("data.pkl", b"x"), ("b.so", b"no ELF")]):
        with pytest.raises(errors.ImageError, match="without device code in it: expected files"):
            torch_cubin.load(zipped(("archive_format", b"pt2"), *files))


def test_two_models_with_another_kernel_of_one_name(tmp_path: Path) -> None:
    """Inductor numbers names from the start in each model of a package."""
    changed = SEVERAL  # it has another vec_add, with the same parameters
    package = pt2(tmp_path / "m.pt2", {"data/one/a.cubin": CUBIN, "data/two/b.cubin": changed})
    (tmp_path / "a.cubin").write_bytes(CUBIN)
    (tmp_path / "b.cubin").write_bytes(changed)
    for source in (package, [tmp_path / "a.cubin", tmp_path / "b.cubin"]):
        module = torch_cubin.load(source)
        assert module["structs"].name == "structs"  # another kernel of these files
        with pytest.raises(errors.ImageError, match="'vec_add' for sm_90a is in two") as caught:
            module["vec_add"]
        assert "a.cubin" in str(caught.value)
        assert "b.cubin" in str(caught.value)
    same = pt2(tmp_path / "same.pt2", {"data/one/a.cubin": CUBIN, "data/two/a.cubin": CUBIN})
    assert "vec_add" in torch_cubin.load(same)


def test_ops_of_an_archive(tmp_path: Path) -> None:
    """An archive is what `load` takes, so define_op and choices take it: the files that have the
    kernel, of several."""
    package = real(tmp_path / "m.pt2")
    args = {
        "tensors": {"a": "float32[n]", "b": "float32[n]", "out": "float32[n]"},
        "args": lambda a, b, out, n: (a, b, out, n),
        "grid": 1,
        "block": 32,
    }
    given = (
        f"{package}:vec_add",
        (package.read_bytes(), "vec_add"),
        torch_cubin.load(package)["vec_add"],
    )
    for number, kernel in enumerate(given):
        schema = f"test_archive::add{number}(Tensor a, Tensor b) -> Tensor"
        op = torch_cubin.define_op(schema, kernel=kernel, **args)
        (image,) = op._images
        assert image.data == CUBIN
    with pytest.raises(errors.NoKernelError, match="vec_add"):
        torch_cubin.define_op(
            "test_archive::none(Tensor a, Tensor b) -> Tensor",
            kernel=f"{package}:vec_ad",
            **args,
        )
    found = torch_cubin.choices(package)
    assert {"vec_add", "axpy"} <= {choice.kernel[1] for choice in found}


def test_ops_of_an_archive_open_it_once(tmp_path: Path) -> None:
    """An op of hundreds of kernels reads its archive as often as an op of two."""
    names = [f"k{i}" for i in range(24)]
    cubins = {
        name: elf_builder.Cubin(
            kernels=[elf_builder.Kernel(name, elf_builder.param(0, 0, 8) + value(0x19, 8))]
        ).build()
        for name in names
    }
    package = pt2(tmp_path / "m.pt2", {f"data/{n}.cubin": data for n, data in cubins.items()})
    counts: dict[str, list[int]] = {"ZipFile": [], "inspect": []}

    class Counting(zipfile.ZipFile):
        def __init__(self, *args) -> None:
            counts["ZipFile"].append(1)
            super().__init__(*args)

    looked_into = module_.library.inspect

    def inspect(*args):
        counts["inspect"].append(1)
        return looked_into(*args)

    module, data = torch_cubin.load(package), package.read_bytes()
    given = {
        "path": [f"{package}:{name}" for name in names],
        "bytes": [(data, name) for name in names],
        "loaded": [module[name] for name in names],
    }
    for source, kernels in given.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(archive.zipfile, "ZipFile", Counting)
            patch.setattr(module_.library, "inspect", inspect)
            for count in counts.values():
                count.clear()
            op = torch_cubin.define_op(
                f"test_archive::{source}(Tensor(a!) x, int which) -> ()",
                tensors={"x": "float32[n]"},
                args=["x"],
                grid=1,
                block=32,
                kernels=[
                    torch_cubin.KernelChoice(kernel, when=lambda which, i=i: which == i)
                    for i, kernel in enumerate(kernels)
                ],
            )
        assert [image.data for image in op._images] == list(cubins.values())
        assert len(counts["ZipFile"]) <= 3, source
        assert len(counts["inspect"]) <= 2 * len(names), source  # in the archive, and for its names


def test_launches_in_comments_are_ignored() -> None:
    for before, after in (("/*", "*/"), ("//", ""), ('f("/*");//', ""), ("/* '", "*/")):
        lines = WRAPPER.splitlines()
        (at,) = (i for i, line in enumerate(lines) if "launchKernel(" in line)
        lines[at] = f"{before} {lines[at]} {after}"
        data = zipped(('cab"x.cubin', CUBIN), ("a.cpp", "\n".join(lines).encode()))
        assert torch_cubin.inspect(data).entries[0].launches == (), before
    for before in ('f("/*");', "f('\"');", 'f(R"(/* " )");', "/* it's */", '// "'):
        data = zipped(('cab"x.cubin', CUBIN), ("a.cpp", f"{before}\n{WRAPPER}".encode()))
        assert len(torch_cubin.inspect(data).entries[0].launches) == 1, before


def test_a_library_that_cannot_be_unpacked_is_named() -> None:
    bomb = zipped(("m/a.wrapper.so", bytes(64 << 20)), method=zipfile.ZIP_DEFLATED)
    assert "a.wrapper.so' would unpack to more" in fault_of(bomb)


# --- hostile archives ----------------------------------------------------------------------------


def fault_of(data: bytes) -> str:
    (entry,) = torch_cubin.inspect(data).entries
    assert entry.error is not None
    assert entry.error.tag == "image"
    with pytest.raises(errors.ImageError) as caught:
        torch_cubin.load(data)
    assert str(caught.value) == entry.error.message
    return entry.error.message


@pytest.mark.parametrize(
    "name",
    ["../a.cubin", "/etc/a.cubin", "a/../../b.cubin", "..\\a.cubin", "C:\\a.cubin", "\\a.cubin"],
)
def test_names_that_lead_out_are_refused(name: str) -> None:
    assert "leads out of the archive" in fault_of(zipped((name, CUBIN)))


def test_bombs_are_not_unpacked() -> None:
    bomb = zipped(("a.cubin", bytes(64 << 20)), method=zipfile.ZIP_DEFLATED)
    assert len(bomb) < 1 << 17
    begun = time.process_time()
    assert "would unpack to more" in fault_of(bomb)
    assert time.process_time() - begun < 2
    # Many files share what may be unpacked.
    many = zipped(*((f"{i}.cubin", bytes(3 << 20)) for i in range(12)), method=zipfile.ZIP_DEFLATED)
    found = [entry.error.message for entry in torch_cubin.inspect(many).entries]
    assert sum("would unpack to more" in message for message in found) >= 6


def patched(data: bytes, signature: bytes, offset: int, value: bytes) -> bytes:
    at = data.index(signature) + offset
    return data[:at] + value + data[at + len(value) :]


DIRECTORY = b"PK\x01\x02"


@pytest.mark.parametrize(
    ("signature", "offset", "value", "says"),
    [
        (DIRECTORY, 24, struct.pack("<I", 0xFFFFFFF0), "would unpack to more"),
        (DIRECTORY, 24, struct.pack("<I", len(CUBIN) + 9), "is damaged"),
        (DIRECTORY, 24, struct.pack("<I", 8), "."),  # cut short: no cubin
        (DIRECTORY, 8, struct.pack("<H", 1), "packed by a method that is not read.*encrypted"),
        (DIRECTORY, 10, struct.pack("<H", 12), "not read: .*got method 12"),
        (DIRECTORY, 16, b"\1\2\3\4", "is damaged"),
        (b"PK\x03\x04", 26, struct.pack("<H", 60000), "is damaged"),
    ],
)  # fmt: skip
def test_inconsistent_directory_entries_are_refused(signature, offset, value, says) -> None:
    data = patched(zipped(("a.cubin", CUBIN)), signature, offset, value)
    assert re.search(says, fault_of(data))


@pytest.mark.parametrize(
    ("offset", "value"),
    [(12, struct.pack("<I", 1 << 30)), (12, struct.pack("<I", 0xFFFFFFFF)), (16, b"\xff" * 4)],
)
def test_inconsistent_end_records_are_refused(offset, value) -> None:
    data = patched(zipped(("a.cubin", CUBIN)), b"PK\x05\x06", offset, value)
    with pytest.raises(errors.ImageError, match=r"directory|damaged"):
        torch_cubin.load(data)


def test_duplicate_names_are_refused() -> None:
    with pytest.warns(UserWarning, match="Duplicate"):
        data = zipped(("a.cubin", CUBIN), ("a.cubin", OTHER))
    assert all("is there twice" in e.error.message for e in torch_cubin.inspect(data).entries)


def test_damage_anywhere_is_an_error_or_nothing(tmp_path: Path) -> None:
    """Bytes changed, cut and moved at random: the result is right, or an error says why."""
    data = real(tmp_path / "m.pt2").read_bytes()
    random_ = random.Random(5)
    begun = time.process_time()
    for _ in range(400):
        changed = bytearray(data)
        for _ in range(random_.choice([1, 1, 4, 40])):
            tail = random_.random() < 0.7  # where the directory is
            at = random_.randrange(len(data) - 1500 if tail else 0, len(data))
            changed[at] = random_.randrange(256)
        if random_.random() < 0.2:
            del changed[random_.randrange(4, len(changed)) :]
        try:
            torch_cubin.inspect(bytes(changed))
        except errors.ImageError:
            continue
    assert time.process_time() - begun < 60


def test_hostile_wrappers_cost_no_more_than_their_size() -> None:
    parts = [
        "launchKernel(" * 20000, 'loadKernel("' * 20000, "uint32_t grid_0 = " * 20000,
        "int a = 1;\n" * 40000 + "void* kernel_args_[] = {" + "&a," * 20000 + "};",
        "(" * 100_000, '"' + "\\" * 100_000, "a" * 200_000 + " b = 1;", "x::" * 60_000,
        WRAPPER * 50,
    ]  # fmt: skip
    random_ = random.Random(1)
    for _ in range(3):
        random_.shuffle(parts)
        text = "\n".join([*parts, WRAPPER])
        begun = time.process_time()
        found = torch_cubin.inspect(zipped(('cab"x.cubin', CUBIN), ("a.cpp", text.encode())))
        assert time.process_time() - begun < 20
        assert len(found.entries[0].launches) >= 1


def test_blanks_in_a_wrapper_take_linear_time() -> None:
    """Eight times the blanks cost no more than some eight times the time, and no second."""

    def seconds(blanks: int) -> float:
        text = "launchKernel(a," + (" " * blanks + ",") * 3 + " " * blanks + "x;\n"
        begun = time.process_time()
        assert list(archive._launches_in(text, "a.cpp")) == []
        return time.process_time() - begun

    seconds(10)
    assert seconds(160) < 1
    assert min(seconds(8000) for _ in range(3)) < 40 * max(seconds(1000), 1e-4)


def test_many_files_take_time_in_proportion() -> None:
    """Names are counted once, and the archive is opened a few times, whatever is in it."""
    data = zipped(*((f"{i}.cubin", CUBIN) for i in range(200)))
    opened = []

    class Counting(zipfile.ZipFile):
        def __init__(self, *args) -> None:
            opened.append(1)
            super().__init__(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archive.zipfile, "ZipFile", Counting)
        assert len(torch_cubin.load(data).images) == 200
    assert len(opened) <= 3

    def seconds(files: int) -> float:
        many = zipped(*((f"{i}.cubin", b"") for i in range(files)))
        begun = time.process_time()
        torch_cubin.inspect(many)
        return time.process_time() - begun

    assert seconds(8000) < 24 * max(seconds(1000), 1e-2)


def test_nothing_is_written(tmp_path: Path, torch_python) -> None:
    code = (
        "import sys, torch_cubin; torch_cubin.inspect(sys.argv[1]); torch_cubin.load(sys.argv[1])"
    )
    (tmp_path / "run").mkdir()
    torch_python.output(
        code,
        argv=["-c", str(real(tmp_path / "m.pt2"))],
        cwd=tmp_path / "run",
        env={**os.environ, "TMPDIR": str(tmp_path / "run")},
    )
    assert not list((tmp_path / "run").iterdir())


def test_other_files_are_not_archives(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for other in (tmp_path / "folder", tmp_path / "missing", "a\0b", b"", b"PK", 5, None):
        assert not archive.is_archive(other)
    with pytest.raises(errors.ImageError, match="without a directory that could be read"):
        torch_cubin.inspect(b"PK\x03\x04" + bytes(100))
