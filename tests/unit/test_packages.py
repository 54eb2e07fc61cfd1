"""Packages: what save_package writes, load_package reads, and everything it refuses."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import resource
import time
from pathlib import Path

import declared
import json_schema
import pytest
import torch
from declared import DATA, DECLARED, blocks, schema, vec_add

import torch_cubin
from torch_cubin import errors
from torch_cubin._declared import contract as _contract
from torch_cubin._declared import signature as _signature

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "docs/manifest.schema.json").read_text())


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def check_against_schema(manifest: dict) -> list[str]:
    found = list(json_schema.problems(manifest, SCHEMA, SCHEMA))
    try:
        import jsonschema
    except ImportError:
        return found
    assert bool(list(jsonschema.Draft202012Validator(SCHEMA).iter_errors(manifest))) == bool(found)
    return found


@pytest.fixture
def package(tmp_path: Path) -> Path:
    backward = declared.cube_backward()
    ops = [vec_add(), declared.cube(backward=backward.name), backward]
    return torch_cubin.save_package(tmp_path / "package", ops)


def renamed(package: Path) -> dict:
    """The manifest with names that this process does not have yet."""
    manifest = manifest_of(package)
    for op in manifest["ops"]:
        op["schema"] = schema(op["schema"].split("::")[1])
        op.pop("backward", None)
    return manifest


def write(package: Path, manifest: object) -> None:
    text = manifest if isinstance(manifest, str) else json.dumps(manifest)
    (package / "manifest.json").write_text(text)


def test_a_saved_package(package) -> None:
    manifest = manifest_of(package)
    assert check_against_schema(manifest) == []
    assert sorted(path.name for path in package.iterdir()) == [
        "declared.sm_90a.cuda130.cubin",
        "launch.sm_90a.cuda130.cubin",
        "manifest.json",
    ]
    assert [op["kernels"][0]["images"] for op in manifest["ops"]] == [[0], [1], [1]]


def test_a_loaded_package_equals_the_saved_one(package, tmp_path) -> None:
    manifest = renamed(package)
    write(package, manifest)
    loaded = torch_cubin.load_package(package)
    name = next(iter(loaded))
    with pytest.raises(KeyError, match=f"expected '{name}'"):
        loaded[name.partition("::")[2]]
    assert list(loaded) == [op["schema"].split("(")[0] for op in manifest["ops"]]
    again = torch_cubin.load_package(package)
    assert all(again[name] is op for name, op in loaded.items())
    torch_cubin.save_package(tmp_path / "copy", list(loaded.values()))
    assert manifest_of(tmp_path / "copy") == manifest
    op = loaded[next(iter(loaded))]
    meta = torch.empty(3, device="meta")
    assert op(meta, meta).shape == (3,)
    with pytest.raises(errors.InputError, match="got cpu"):
        op(torch.ones(3), torch.ones(3))


def test_the_error_for_cpu_tensors_names_define_op_only_where_the_caller_called_it(package) -> None:
    write(package, renamed(package))
    loaded = next(iter(torch_cubin.load_package(package).values()))
    for op, names_define_op in ((vec_add(cpu=None), True), (loaded, False)):
        with pytest.raises(errors.InputError, match="got cpu") as caught:
            op(torch.ones(3), torch.ones(3))
        assert ("define_op" in str(caught.value)) == names_define_op
        assert ("package" in str(caught.value)) != names_define_op


def test_a_package_that_another_process_made(package, torch_python) -> None:
    """Packages of TORCH_CUBIN_PACKAGES are there after the import, fakes and backward included."""
    script = """
import os, sys, torch, torch_cubin
a, b = os.environ["NAMES"].split()
space, name = a.split("::")
op = getattr(getattr(torch.ops, space), name)
meta = torch.empty(3, device="meta")
assert op(meta, meta).shape == (3,)
from torch_cubin._declared import op as _declared
assert _declared.find(b)._formula is not None
"""
    ops = manifest_of(package)["ops"]
    names = " ".join(op["schema"].split("(")[0] for op in ops[:2])
    env = {**os.environ, "TORCH_CUBIN_PACKAGES": str(package), "NAMES": names}
    torch_python.output(script, env=env)
    env["TORCH_CUBIN_PACKAGES"] = str(package / "nowhere")
    done = torch_python.run(script, env=env)
    assert "torch_cubin [file]" in done.stderr


def change(path: str, value: object):
    """A mistake: the field at that path becomes `value`; ... takes it away."""

    def apply(manifest: dict) -> None:
        *parents, last = [int(p) if p.isdecimal() else p for p in path.split("/")]
        at = manifest
        for parent in parents:
            at = at[parent]
        if value is ...:
            del at[last]
        else:
            at[last] = value

    return apply


MISTAKES = [
    (change("version", 2), errors.FileError),
    (change("version", ...), errors.Error),
    (change("format", "something"), errors.FileError),
    (change("more", 1), errors.InputError),
    (change("images/0/more", 1), errors.InputError),
    (change("ops/0/more", 1), errors.InputError),
    (change("ops/0/tensors/x/more", 1), errors.InputError),
    (change("ops/0/kernels/0/more", 1), errors.InputError),
    (change("images/0/sha256", "0" * 64), errors.HashError),
    (change("images/0/sha256", "0" * 63), errors.InputError),
    (change("images/0/sha256", ...), errors.InputError),
    (change("images/0/file", "../x.cubin"), errors.FileError),
    (change("images/0/file", "/etc/passwd"), errors.FileError),
    (change("images/0/file", "nowhere.cubin"), errors.FileError),
    (change("images/0/file", "link.cubin"), errors.FileError),
    (change("ops/0/schema", "mylib::f(Tensr x) -> Tensor"), errors.InputError),
    (change("ops/0/kernels/0/images", [7]), errors.InputError),
    (change("ops/0/kernels/0/kernel", "nothing"), errors.NoKernelError),
    (change("ops/0/kernels/0/args", []), errors.ParamsError),
    (change("ops/0/kernels/0/grid", [["number", "q"], 1, 1]), errors.InputError),
    (change("ops/0/tensors/x/dtype", "float33"), errors.InputError),
    (change("ops/0/tensors/x", ...), errors.InputError),
]


@pytest.mark.fault_case(10)
@pytest.mark.parametrize(("mistake", "error"), MISTAKES, ids=range(len(MISTAKES)))
def test_wrong_packages_register_nothing(package, mistake, error) -> None:
    manifest = renamed(package)
    manifest["ops"].reverse()  # the wrong one last
    manifest["ops"].append(manifest["ops"].pop(0))
    manifest["ops"].reverse()
    outside = package.parent / "outside.cubin"
    outside.write_bytes((DATA / "launch.sm_90a.cuda130.cubin").read_bytes())
    (package / "link.cubin").symlink_to(outside)
    names = [op["schema"].split("(")[0] for op in manifest["ops"]]
    mistake(manifest)
    write(package, manifest)
    with pytest.raises(error):
        torch_cubin.load_package(package)
    for name in names:
        space, local = name.split("::")
        assert not hasattr(getattr(torch.ops, space), local)


@pytest.mark.fault_case(10)
def test_damaged_folders(package, tmp_path) -> None:
    with pytest.raises(errors.FileError):
        torch_cubin.load_package(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.FileError):
        torch_cubin.load_package(tmp_path / "empty")
    for text in ("", "{", "[" * 10_000, "[]", "null"):
        write(package, text)
        with pytest.raises(errors.Error):
            torch_cubin.load_package(package)


def test_the_same_op_with_other_content(package) -> None:
    manifest = renamed(package)
    write(package, manifest)
    torch_cubin.load_package(package)
    other = copy.deepcopy(manifest)
    other["ops"][0]["kernels"][0]["block"] = [128, 1, 1]
    write(package, other)
    with pytest.raises(errors.InputError, match="other content"):
        torch_cubin.load_package(package)


def test_wrong_saves(tmp_path) -> None:
    op = vec_add()
    torch_cubin.save_package(tmp_path, [op])
    with pytest.raises(errors.InputError, match="overwrite"):
        torch_cubin.save_package(tmp_path, [op])
    torch_cubin.save_package(tmp_path, [op.name], overwrite=True)
    for ops, says in (([], "no op"), ([5], "no declared op"), ([op, op], "twice")):
        with pytest.raises(errors.InputError, match=says):
            torch_cubin.save_package(tmp_path / "new", ops)
    with pytest.raises(errors.FileError):
        torch_cubin.save_package(tmp_path / "manifest.json" / "below", [op])


def test_arguments_of_wrong_types(tmp_path) -> None:
    op = vec_add()
    for folder, ops in (([op], tmp_path), (op, str(tmp_path)), (None, [op])):
        with pytest.raises(errors.InputError, match=r"'folder' has .* save_package\(folder, ops\)"):
            torch_cubin.save_package(folder, ops)
    with pytest.raises(errors.InputError, match="no declared op: expected an Op or its name"):
        torch_cubin.save_package(tmp_path, 5)
    with pytest.raises(errors.InputError, match="'folder' has a wrong type: .* got int"):
        torch_cubin.load_package(5)


def test_a_package_with_an_op_that_python_refuses_registers_nothing(package) -> None:
    manifest = renamed(package)
    manifest["ops"][1]["schema"] = manifest["ops"][1]["schema"].replace("x)", "grad_out)")
    text = json.dumps(manifest["ops"][1]).replace('"x"', '"grad_out"')
    manifest["ops"][1] = {**json.loads(text), "backward": "a::b"}
    write(package, manifest)
    for _ in range(2):
        with pytest.raises(errors.InputError, match="grad_out"):
            torch_cubin.load_package(package)
    for op in manifest["ops"]:
        space, local = op["schema"].split("(")[0].split("::")
        assert not hasattr(getattr(torch.ops, space), local)


def test_an_op_listed_twice_is_loaded_once(package) -> None:
    manifest = renamed(package)
    manifest["ops"].append(manifest["ops"][0])
    write(package, manifest)
    assert len(torch_cubin.load_package(package)) == 3


@pytest.mark.fault_case(15)
def test_a_name_is_not_truncated_at_a_nul(package) -> None:
    with pytest.raises(errors.InputError, match="NUL"):
        torch_cubin.load_package(f"{package}\0evil")


def test_saving_what_was_loaded_takes_the_images_that_were_loaded(package, tmp_path) -> None:
    manifest = renamed(package)
    write(package, manifest)
    ops = list(torch_cubin.load_package(package).values())
    torch_cubin.save_package(tmp_path / "one", ops[:1])  # and no image of the others
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["launch.sm_90a.cuda130.cubin", "manifest.json"]
    # The manifest of today numbers other images, out of the folder, too.
    other = copy.deepcopy(manifest)
    other["images"].reverse()
    other["images"][0]["file"] = "../../etc/passwd"
    write(package, other)
    torch_cubin.save_package(tmp_path / "two", ops)
    assert manifest_of(tmp_path / "two")["images"] == manifest["images"]
    # The image of today.
    (package / "launch.sm_90a.cuda130.cubin").write_bytes(b"other")
    with pytest.raises(errors.HashError):
        torch_cubin.save_package(tmp_path / "three", ops)
    assert not (tmp_path / "three").exists()


def test_saving_leaves_the_users_files_alone(tmp_path) -> None:
    mine = tmp_path / "launch.sm_90a.cuda130.cubin"
    mine.write_bytes(b"mine")
    op = vec_add()
    folder = torch_cubin.save_package(tmp_path, [op])
    assert mine.read_bytes() == b"mine"
    first = manifest_of(folder)
    (image,) = first["images"]
    assert image["file"] == f"{image['sha256']}.{mine.name}"
    # A newer kernel under the old name: the old package stays whole until its manifest goes.
    newer = tmp_path / "source" / "declared.sm_90a.cuda130.cubin"
    newer.parent.mkdir()
    newer.write_bytes(DECLARED.read_bytes())
    torch_cubin.save_package(tmp_path, [op, declared.cube()], overwrite=True)
    assert manifest_of(folder)["images"][0] == image
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    newer.write_bytes((DATA / "vec_add.sm_90a.cuda124.cubin").read_bytes())
    torch_cubin.save_package(tmp_path, [vec_add(kernel=(newer, "vec_add"))], overwrite=True)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert all(after[name] == data for name, data in before.items() if name != "manifest.json")


def test_images_of_equal_names_and_without_names(tmp_path) -> None:
    other = tmp_path / "declared.sm_90a.cuda130.cubin"
    other.write_bytes((DATA / "vec_add.sm_90a.cuda124.cubin").read_bytes())
    ops = [
        declared.cube(),
        vec_add(kernel=(other, "vec_add")),
        vec_add(kernel=((DATA / "vec_add.sm_80.cuda118.cubin").read_bytes(), "vec_add")),
    ]
    folder = torch_cubin.save_package(tmp_path / "package", ops)
    files = [image["file"] for image in manifest_of(folder)["images"]]
    assert files[0] == "declared.sm_90a.cuda130.cubin"
    assert files[1].endswith(".declared.sm_90a.cuda130.cubin")
    assert files[2] == "vec_add.sm_80.cubin"
    manifest = renamed(folder)
    write(folder, manifest)
    assert len(torch_cubin.load_package(folder)) == 3


def everything() -> dict:
    """A contract with every kind of field."""
    signature = _signature.parse(
        "mylib::f(Tensor x, Tensor? b, Tensor[] xs, int? k, str mode) -> (Tensor y, Tensor z)"
    )
    choice = _contract.Choice(
        [0],
        "k",
        lambda x, xs, k, partial: (
            x,
            xs[1],
            torch_cubin.select(k.defined, k, 0),
            torch_cubin.bfloat16(1.5),
            None,
            b"\x00",
            torch_cubin.TensorMap(x, box=(8, 8), element_strides=(1, 1)),
            partial,
        ),
        blocks,
        (8, 8),
        when=lambda x, mode, sm: (x.dtype == torch.float16) & (mode != "slow") & (sm >= 90),
        shared_memory=lambda m: 4 * m,
        cluster=(2, 1),
        priority=-1,
    )
    contract, _ = _contract.build(
        signature,
        tensors={
            "x": "T[m, *s] rows align=4",
            "b": "float32",
            "xs": "T[2 * m]",
            "y": torch_cubin.empty(3, "int8"),
            "z": lambda m: torch_cubin.empty(m + 1, "T"),
        },
        dtypes={"T": ["float16"]},
        scratch={"partial": "float32[m]"},
        choices=[choice],
        backward="a::b",
        jit=True,
    )
    return contract


def test_the_schema_knows_every_field_and_catches_mistakes() -> None:
    image = {"file": "k.cubin", "sha256": "0" * 64}
    good = {
        "format": "torch_cubin package",
        "version": 1,
        "images": [image],
        "ops": [everything()],
    }
    assert check_against_schema(json.loads(json.dumps(good))) == []
    caught = 0
    for mistake, _ in MISTAKES:
        bad = copy.deepcopy(good)
        mistake(bad)
        caught += bool(check_against_schema(json.loads(json.dumps(bad))))
    assert caught == 11  # the others are right by themselves, and wrong together


assert DECLARED.is_file()


def test_layout_and_align_may_be_omitted(package) -> None:
    """docs/manifest.md: contiguous, and the dtype's own alignment."""
    manifest = renamed(package)
    for op in manifest["ops"]:
        for tensor in op.get("tensors", {}).values():
            tensor.pop("layout", None)
            tensor.pop("align", None)
    write(package, manifest)
    ops = torch_cubin.load_package(package)
    x = torch.empty(8, device="meta")
    op = next(op for name, op in ops.items() if "vec_add" in name)
    assert op(x, x).shape == (8,)


@pytest.mark.fault_case(10)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": 1, "version": 1, "ops": [], "images": []}', "'version' stands twice"),
        (
            '{"version": 1, "ops": [], "images": [{"file": "a", "file": "b"}]}',
            "'file' stands twice",
        ),
        ('{"version": 1, "ops": [], "images": []}\0{"version": 2}', "NUL byte"),
        ("[" * 300 + "]" * 300, "nested too deeply"),
        ('{"version": 1, "ops": [}', "is not JSON"),
    ],
)
def test_json_with_duplicate_keys_is_refused(package, text: str, message: str) -> None:
    write(package, text)
    with pytest.raises(torch_cubin.Error, match=message):
        torch_cubin.load_package(package)


@pytest.mark.fault_case(9, 10)
def test_long_manifests_are_read_in_linear_time(package) -> None:
    """Of 400,000 objects in a list: quadratic, it took half a minute."""
    manifest = manifest_of(package)
    text = json.dumps(manifest)[:-1] + ', "more": [' + ",".join(["{}"] * 400_000) + "]}"
    write(package, text)
    start = time.process_time()
    with contextlib.suppress(torch_cubin.Error):  # whether it may have more, or not
        torch_cubin.load_package(package)
    assert time.process_time() - start < 5


def test_an_image_that_is_named_200_000_times_is_opened_once(package) -> None:
    """Opened each time, it took 13 s and a gigabyte."""
    manifest = renamed(package)
    manifest["images"] = [manifest["images"][0]] * 200_000
    manifest["ops"] = manifest["ops"][:1]
    manifest["ops"][0]["kernels"][0]["images"] = [199_999]
    write(package, manifest)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with contextlib.suppress(torch_cubin.Error):  # the first image may have another op's kernel
        torch_cubin.load_package(package)
    assert time.process_time() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 * 1024


def test_lists_repeated_for_every_op_are_bounded(package) -> None:
    manifest = renamed(package)
    manifest["images"] = [manifest["images"][0]] * 20_000
    manifest["ops"] = [manifest["ops"][0]] * 100
    write(package, manifest)
    with pytest.raises(torch_cubin.Error, match=r"\[file\].* names too many images and ops"):
        torch_cubin.load_package(package)


def test_a_folder_in_a_file_s_place(package) -> None:
    (package / "manifest.json").unlink()
    (package / "manifest.json").mkdir()
    with pytest.raises(torch_cubin.Error, match=r"\[file\].*got Is a directory"):
        torch_cubin.load_package(package)


@pytest.mark.fault_case(15)
@pytest.mark.parametrize("name", [chr(0xD800), f"a{chr(0xDFFF)}b", chr(0xDC80)], ids=ascii)
def test_names_that_are_not_text_find_no_kernel(name: str) -> None:
    with pytest.raises(torch_cubin.Error, match=r"\[no_kernel\]"):
        torch_cubin.load(DECLARED)[name]
