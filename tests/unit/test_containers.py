"""inspect_to_json and list_entries on real fatbins, host ELF files and relocatable cubins."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

import containers
import cubin_check
import pytest
import real_cubins
from containers import FOLDER

needs_nvcc = pytest.mark.skipif(real_cubins.nvcc() is None, reason="needs nvcc, found none")
CUOBJDUMP = real_cubins.cuobjdump()
needs_cuobjdump = pytest.mark.skipif(
    CUOBJDUMP is None, reason="needs cuobjdump (CUDA toolkit or Triton), found none"
)

IMAGES = {
    "sm_80": "vec_add.sm_80.cuda118.cubin",
    "sm_90a": "vec_add.sm_90a.cuda124.cubin",
    "sm_120a": "vec_add.sm_120a.cuda130.cubin",
}


def unpacked(path: Path, *indexes: int, out: Path) -> bytes:
    cubin_check.run(("unpack", path, *indexes, out))
    return out.read_bytes()


def summary(entry: dict) -> tuple:
    return (entry["kind"], entry["arch"], entry["compression"], entry["name"], entry["options"])


@pytest.mark.parametrize("packing", ["raw", "lz4", "zstd"])
def test_fatbin_lists_and_unpacks_its_entries(packing: str, tmp_path: Path) -> None:
    path = FOLDER / f"vec_add.{packing}.fatbin"
    facts = cubin_check.inspect(path)
    assert (facts["kind"], facts["size"]) == ("fatbin", path.stat().st_size)
    compression = "none" if packing == "raw" else packing
    named = ("vec_add.cu", "-O3 -v") if packing == "zstd" else ("", "")
    assert [summary(entry) for entry in facts["entries"]] == [
        *(("cubin", arch, compression, named[0], "") for arch in IMAGES),
        ("ptx", "sm_80", compression, *named),
    ]
    end = 16
    for index, (entry, file) in enumerate(
        zip(facts["entries"], [*IMAGES.values(), "containers/vec_add.ptx"], strict=True)
    ):
        alone = real_cubins.DATA / file
        assert entry["error"] is None
        assert entry["offset"] >= end + 64
        end = entry["offset"] + entry["stored_size"]
        data = unpacked(path, index, out=tmp_path / "out")
        assert len(data) == entry["size"]
        if entry["kind"] == "cubin":
            assert data == alone.read_bytes()
            assert entry["content"] == cubin_check.inspect(alone)
        else:  # fatbinary drops comments from PTX, and ends it with a NUL
            assert data.rstrip(b"\0").split() == re.sub(rb"//.*", b"", alone.read_bytes()).split()
            ours, theirs = entry["content"], cubin_check.inspect(alone)
            assert {**ours, "size": 0} == {**theirs, "size": 0}
    assert path.stat().st_size - end < 8


@pytest.mark.parametrize(
    "path",
    [real_cubins.DATA / IMAGES["sm_90a"], FOLDER / "vec_add.ptx", FOLDER / "vec_add.relocatable"],
    ids=lambda path: path.name,
)
def test_an_image_alone_is_a_container_of_one(path: Path, tmp_path: Path) -> None:
    """For load(), which takes any of them."""
    assert unpacked(path, 0, out=tmp_path / "out") == path.read_bytes()


def test_lto_ir_is_listed_by_name() -> None:
    (entry,) = cubin_check.inspect(FOLDER / "vec_add.lto.fatbin")["entries"]
    assert (entry["kind"], entry["arch"], entry["compression"]) == ("lto_ir", "sm_90", "unknown")
    assert (entry["content"], entry["error"]) == (None, None)
    assert entry["options"].startswith("-ftz=0")


def test_relocatable_cubin_has_facts_and_is_not_loadable() -> None:
    path = FOLDER / "vec_add.relocatable"
    facts = cubin_check.inspect(path)
    assert (facts["kind"], facts["arch"]) == ("relocatable_cubin", "sm_90a")
    (kernel,) = facts["kernels"]
    assert (kernel["name"], kernel["param_bytes"], kernel["registers"]) == ("vec_add", 28, 12)
    refusal = cubin_check.facts(path)["error"]
    assert refusal["tag"] == "image"
    assert "relocatable" in refusal["message"]
    assert "nvlink" in refusal["message"]
    kinds = [
        e["kind"] for e in cubin_check.inspect(FOLDER / "vec_add.relocatable.fatbin")["entries"]
    ]
    assert kinds == ["ptx", "relocatable_cubin", "ptx"]


def test_host_elf_lists_its_fatbins(tmp_path: Path) -> None:
    path = FOLDER / "vec_add.object"
    facts = cubin_check.inspect(path)
    assert (facts["kind"], facts["machine"]) == ("host_elf", "x86-64")
    (fatbin,) = facts["entries"]
    assert (fatbin["kind"], fatbin["name"]) == ("fatbin", ".nv_fatbin")
    data = path.read_bytes()[fatbin["offset"] :][: fatbin["size"]]
    assert struct.unpack_from("<I", data) == (0xBA55ED50,)
    kinds = [(e["kind"], e["arch"], e["compression"]) for e in fatbin["content"]["entries"]]
    assert kinds == [("cubin", "sm_80", "zstd"), ("ptx", "sm_80", "zstd")]
    assert unpacked(path, 0, 0, out=tmp_path / "cubin").startswith(b"\x7fELF")
    aarch64 = bytearray(path.read_bytes())
    struct.pack_into("<H", aarch64, 18, 183)
    other = tmp_path / "aarch64.o"
    other.write_bytes(aarch64)
    assert cubin_check.inspect(other) == {**facts, "machine": "aarch64"}


def test_host_elf_without_device_code_says_so() -> None:
    error = cubin_check.inspect(cubin_check.program())["error"]
    assert error["tag"] == "image"
    assert "without device code" in error["message"]


@needs_nvcc
@pytest.mark.parametrize("every", ["", ".all"])
@pytest.mark.parametrize("mode", containers.MODES)
def test_fatbins_of_every_mode_hold_the_same(mode: str, every: str, tmp_path: Path) -> None:
    made = containers.compiled()
    path, plain = made[f"{mode}{every}.fatbin"], made["none.fatbin"]
    facts, wanted = cubin_check.inspect(path), cubin_check.inspect(plain)
    packed = {"none": 0, "size": 5}.get(mode, 5 if every else 1)
    kind = {"none": "none", "speed": "lz4"}.get(mode, "zstd")
    compressions = [entry["compression"] for entry in facts["entries"]]
    assert compressions.count(kind) >= packed, compressions
    assert set(compressions) <= {"none", kind}
    for index, (entry, other) in enumerate(zip(facts["entries"], wanted["entries"], strict=True)):
        assert (entry["kind"], entry["arch"]) == (other["kind"], other["arch"])
        assert entry["content"] == other["content"]
        ours = unpacked(path, index, out=tmp_path / "ours")
        theirs = unpacked(plain, index, out=tmp_path / "theirs")
        assert ours.rstrip(b"\0") == theirs.rstrip(b"\0")
    archs = sorted(entry["arch"] for entry in facts["entries"])
    assert archs == ["sm_100f", "sm_120", "sm_75", "sm_80", "sm_90a"]
    for entry in facts["entries"]:
        assert entry["content"]["arch"] == entry["arch"]


@needs_nvcc
def test_host_files_of_nvcc_hold_what_was_compiled(tmp_path: Path) -> None:
    made = containers.compiled()
    alone = {
        entry["arch"]: entry["content"]
        for entry in cubin_check.inspect(made["none.fatbin"])["entries"]
    }
    for name in ("object.o", "library.so", "program"):
        if name not in made:
            continue
        fatbins = cubin_check.inspect(made[name])["entries"]
        found = [entry["content"] for fatbin in fatbins for entry in fatbin["content"]["entries"]]
        assert all(content is not None for content in found), name
        assert alone["sm_90a"] in found, name
        assert alone["sm_80"] in found, name  # the PTX
        kernels = {kernel["name"] for content in found for kernel in content["kernels"]}
        assert ("in_main" in kernels) == (name == "program")
        if name == "program":
            assert len(fatbins) >= 2
    relocatable = cubin_check.inspect(made["relocatable.o"])["entries"]
    assert [fatbin["name"] for fatbin in relocatable] == ["__nv_relfatbin"]
    kinds = {entry["kind"] for entry in relocatable[0]["content"]["entries"]}
    assert kinds == {"relocatable_cubin", "ptx"}
    # The same kernels, registers and parameters as in the linked cubin.
    (linked,) = (
        e for e in cubin_check.inspect(made["none.fatbin"])["entries"] if e["arch"] == "sm_90a"
    )
    object_facts = cubin_check.inspect(made["relocatable.cubin"])
    for ours, theirs in zip(object_facts["kernels"], linked["content"]["kernels"], strict=True):
        for key in ("name", "params", "registers", "static_shared", "max_block", "cluster"):
            assert ours[key] == theirs[key], (ours["name"], key)


def flat(facts: dict) -> list[tuple[tuple[int, ...], dict]]:
    """Every image in a container with its path of indexes, in the file's order."""
    found = []
    for index, entry in enumerate(facts["entries"]):
        if entry["kind"] == "fatbin":
            found += [((index, *path), inner) for path, inner in flat(entry["content"])]
        else:
            found.append(((index,), entry))
    return found


def cuobjdump_files(path: Path, folder: Path, what: str) -> list[Path]:
    """What `cuobjdump -xelf all` or `-xptx all` takes out, in its order."""
    folder.mkdir()
    flag = {"elf": "-xelf", "ptx": "-xptx"}[what]
    done = subprocess.run(
        [CUOBJDUMP, flag, "all", path], cwd=folder, capture_output=True, text=True
    )
    return [folder / name for name in re.findall(r"Extracting .*?\d+: (\S+)", done.stdout)]


@needs_cuobjdump
def test_containers_agree_with_cuobjdump(tmp_path: Path) -> None:
    """The same images in the same order, and the same bytes, in every file that we can make."""
    files = [*containers.COMMITTED, *containers.compiled().values()]
    compared = 0
    for number, path in enumerate(files):
        facts = cubin_check.inspect(path)
        if "entries" not in facts:
            continue
        images = flat(facts)
        for what, kinds in (("elf", ("cubin", "relocatable_cubin")), ("ptx", ("ptx",))):
            ours = [(where, entry) for where, entry in images if entry["kind"] in kinds]
            theirs = cuobjdump_files(path, tmp_path / f"{number}.{what}", what)
            assert len(theirs) == len(ours), (path, what, [p.name for p in theirs])
            for (where, entry), file in zip(ours, theirs, strict=True):
                # cuobjdump 12.8 omits the suffix of 120a.
                sm = re.search(r"\.(sm_\d+)[af]?\.", file.name).group(1)
                assert entry["arch"].rstrip("af") == sm, (path, where, file.name)
                data = unpacked(path, *where, out=tmp_path / "entry")
                assert data.rstrip(b"\0") == file.read_bytes().rstrip(b"\0"), (path, where)
                compared += 1
    assert compared >= 10
