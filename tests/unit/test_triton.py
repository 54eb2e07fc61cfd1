"""Triton's kernels as ops, without a GPU: from the compiler where Triton can be imported, and from
files that Triton 3.4, 3.6 and 3.9 made (tests/data/make_triton.py), which is tested everywhere.
Longer than files should be: what becomes of a definition is the same whatever it was made from, and
the helpers that define ops are shared by all sections.
"""

from __future__ import annotations

import collections
import copy
import json
import random
import shutil
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

import torch_cubin
import torch_cubin.producers.triton as tct
from torch_cubin import errors
from torch_cubin._triton import files, kernel, live

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "triton"
VERSIONS = ("3.4.0", "3.6.0", "3.9.0")
_numbers = iter(range(1_000_000))

try:
    import triton_table as table
except ImportError:
    table = None
needs_triton = pytest.mark.skipif(table is None, reason="Triton is not installed")
needs_later = pytest.mark.skipif(
    table is None or table.triton.__version__ < "3.4",
    reason="Triton 3.3 makes no autotuner without a GPU, and has no listener for compilations",
)


def namespace() -> str:
    return f"test_triton_{next(_numbers)}"


def contract_of(op: torch_cubin.Op, index: int = 0) -> dict[str, Any]:
    return op.contract["kernels"][index]


# --- packages that other versions made ---


@pytest.mark.parametrize("version", VERSIONS)
def test_packages_of_every_version_load(version: str) -> None:
    ops = torch_cubin.load_package(DATA / f"package_{version}")
    by_name = {name.partition("::")[2]: op for name, op in ops.items()}
    hidden = 1 if version == "3.4.0" else 2
    for op in ops.values():
        entry = contract_of(op)
        assert entry["producer"]["version"] == version
        assert len(entry["args"]) > hidden
    scratch = contract_of(by_name["descriptors_made_on_the_device_in_scratch"])["args"][-hidden]
    assert scratch == ["workspace", {"bytes_per_block": 256, "align": 128}]
    clusters = contract_of(by_name["matmul_in_clusters_of_2"])
    assert clusters["cluster"] == [2, 1, 1]
    assert clusters["grid"][0][0] == "mul"
    assert clusters["grid"][0][2] == 2
    described = contract_of(by_name["a_host_descriptor_fp16"])["args"][0][1]
    assert (described["box"], described["swizzle"]) == ([32, 64], "128B")
    assert contract_of(by_name["a_cooperative_grid"])["cooperative"] is True
    # The warps of a specialised kernel are more than num_warps said.
    if version != "3.4.0":
        specialised = contract_of(by_name["matmul_of_specialised_warps"])
        assert specialised["block"] == [384, 1, 1]
        dependent = contract_of(by_name["programmatic_dependent_launch"])
        assert dependent["programmatic_dependent_launch"] is True
    assert contract_of(by_name["matmul_fp16"])["shared_memory"] > 0
    assert contract_of(by_name["floats_of_every_width"])["args"][2][0] == "bfloat16_truncated"
    (required,) = contract_of(by_name["an_int_that_is_1_and_a_64_bit_one"])["requires"]
    assert required == {"argument": "factor", "value": ["number", "factor"], "equals": 1}
    (required,) = contract_of(by_name["an_optional_tensor_that_is_None"])["requires"]
    assert required == {"argument": "bias_ptr", "value": ["defined", "bias"], "equals": False}


def test_packages_need_no_triton(torch_python) -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch_cubin, torch_cubin.producers.triton as tct\n"
        f"ops = torch_cubin.load_package({str(DATA / 'package_3.9.0')!r})\n"
        f"assert tct.read({str(DATA / 'cache_3.9.0_sm_80')!r})\n"
        "try:\n    tct.compile(None, '', 'sm_90a')\n"
        "except torch_cubin.Error as error:\n    print(len(ops), error.tag)\n"
    )
    done = torch_python.run(code)
    assert done.stdout.split() == ["18", "input"], done.stderr


# --- folders of Triton's cache ---

FOLDED = {"BLOCK_M": 32, "BLOCK_N": 64}


def copy_tile(folder: Any, **more: Any) -> torch_cubin.Op:
    return tct.define_op(
        f"{namespace()}::copy_tile(Tensor x) -> Tensor",
        **{
            "kernel": folder,
            "tensors": {"x": "float16[m, columns] rows", "out": "float16[m, columns]"},
            "args": ("x", "out", lambda columns: columns),
            "grid": (
                lambda m, BLOCK_M: m // BLOCK_M,
                lambda columns, BLOCK_N: torch_cubin.cdiv(columns, BLOCK_N),
            ),
            "folded": FOLDED,
            **more,
        },
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_cache_folders(version: str) -> None:
    (found,) = tct.read(DATA / f"cache_{version}_sm_90a" / "copy_tile.cubin")
    types = ["tensordesc<fp16[32,64]>", "*fp16", "i32"]
    assert [parameter.type for parameter in found.parameters] == types
    assert (found.arch, found.version, found.knows_folded) == ("sm_90a", version, False)
    assert found.hidden == (1 if version == "3.4.0" else 2)
    op = copy_tile([found])
    args = contract_of(op)["args"]
    assert args[0][0] == "tensor_map"
    assert args[1:5] == [
        *(["int32", ["size", "x", i]] for i in range(2)),
        *(["int64", ["stride", "x", i]] for i in range(2)),
    ]
    assert contract_of(op)["grid"][:2] == [
        ["floordiv", ["number", "m"], 32],
        ["neg", ["floordiv", ["neg", ["number", "columns"]], 64]],
    ]
    if version != "3.4.0":  # which does not keep names
        assert [parameter.name for parameter in found.parameters] == ["x", "out_ptr", "columns"]
        by_name = copy_tile([found], args={"out_ptr": "out"})
        assert contract_of(by_name)["args"] == args


@pytest.mark.parametrize("version", VERSIONS)
def test_descriptors_without_maps(version: str) -> None:
    """Before compute capability 9.0 a descriptor is a pointer, sizes, strides and flags."""
    (found,) = tct.read(DATA / f"cache_{version}_sm_80")
    flags = {"3.4.0": 0, "3.6.0": 1, "3.9.0": 2}[version]
    types = [parameter.type for parameter in found.parameters]
    assert types == [
        *("*fp16", "i64", "i64", "i64", "i64"),
        *["i1"] * flags,
        *("i32", "i32", "i64", "i64"),
        *("*fp16", "i32"),
    ]


def test_facts_missing_in_a_cache_folder_must_be_given() -> None:
    (found,) = [k for k in tct.read(DATA / "cache_3.9.0_sm_90a") if k.name == "add"]
    given = {
        "kernel": [found],
        "tensors": {"x": "float32[n]", "y": "float32[n]", "out": "float32[n]"},
        "args": {"x_ptr": "x", "y_ptr": "y", "out_ptr": "out", "stride": 1},
        "grid": lambda n: n,
    }
    schema = f"{namespace()}::add(Tensor x, Tensor y) -> Tensor"
    with pytest.raises(errors.InputError, match=r"folded=dict\(stride=VALUE\)"):
        tct.define_op(schema, **given)
    op = tct.define_op(schema, **given, folded={"stride": 1})
    assert "requires" in contract_of(op)  # n % 16


def test_folded_arguments_that_the_op_names_are_checked() -> None:
    """A cache folder's kernel for stride 1 must not quietly serve a call with stride 2."""
    (found,) = [k for k in tct.read(DATA / "cache_3.9.0_sm_90a") if k.name == "add"]

    def define(extra: str, kernel: Any = found, **more: Any) -> dict[str, Any]:
        op = tct.define_op(
            f"{namespace()}::add(Tensor x, Tensor y, {extra}) -> Tensor",
            kernel=kernel,
            tensors={"x": "float32[n]", "y": "float32[n]", "out": "float32[n]", "bias": "float32"}
            if "bias" in extra else {"x": "float32[n]", "y": "float32[n]", "out": "float32[n]"},
            args={"x_ptr": "x", "y_ptr": "y", "out_ptr": "out"}, grid=lambda n: n, **more,
        )  # fmt: skip
        return contract_of(op)

    requires = define("int stride", folded={"stride": 1})["requires"]
    assert {"argument": "stride", "value": ["number", "stride"], "equals": 1} in requires
    requires = define("Tensor? bias", folded={"bias": None})["requires"]
    assert {"argument": "bias", "value": ["defined", "bias"], "equals": False} in requires
    for extra in ("int stride", "float? scale", "bool causal", "str mode", "Tensor? bias"):
        with pytest.raises(errors.InputError, match=r"reaches no argument of the kernel's"):
            define(extra)
    when = torch_cubin.KernelChoice(found, when=lambda stride: stride == 1)
    assert define("int stride", kernel=when)["when"] == ["eq", ["number", "stride"], 1]


@pytest.mark.parametrize(
    ("extra", "given"),
    [
        ("int stride", {"n": lambda x: x.stride(0) * x.shape[0]}),
        ("int size", {"n": lambda x: x.shape[0]}),
        ("int numel", {"n": lambda x: x.numel()}),
        ("bool number", {}),
        ("float pointer", {}),
        ("int add", {"n": lambda n: n + 1}),
        ("int n_ptr", {}),
    ],
)
def test_an_argument_with_the_name_of_an_operation_does_not_reach_the_kernel_by_it(
    extra: str, given: dict[str, Any]
) -> None:
    """What was folded of it would be the compilation's value at every call."""
    (found,) = [k for k in tct.read(DATA / "cache_3.9.0_sm_90a") if k.name == "add"]
    name = extra.split()[1]

    def define(**more: Any) -> dict[str, Any]:
        op = tct.define_op(
            f"{namespace()}::add(Tensor x, Tensor y, {extra}) -> Tensor", kernel=found,
            tensors={"x": "float32[n]", "y": "float32[n]", "out": "float32[n]"},
            args={"x_ptr": "x", "y_ptr": "y", "out_ptr": "out", **given}, grid=lambda n: n,
            **more,
        )  # fmt: skip
        return contract_of(op)

    with pytest.raises(errors.InputError, match=rf"'{name}' reaches no argument"):
        define()
    (wanted,) = [r for r in define(folded={name: 1})["requires"] if r["argument"] == name]
    assert wanted["value"] == ["number", name]


def copied(tmp_path: Path, folder: str = "cache_3.6.0_sm_90a") -> Path:
    shutil.copytree(DATA / folder, tmp_path / folder)
    return tmp_path / folder


def changed_metadata(folder: Path, **changes: Any) -> Path:
    path = folder / "copy_tile.json"
    metadata = json.loads(path.read_text())
    metadata.update(changes)
    path.write_text(json.dumps({k: v for k, v in metadata.items() if v is not ...}))
    return path


DESCRIBED = {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [32, 64],
             "fp4_padded": False}  # fmt: skip
REFUSED = {
    "instrumented": ({"instrumentation_mode": "consan"}, "instrumented"),
    "a profile": ({"profile_scratch_size": 128}, "profile"),
    "im2col": ({"tensordesc_meta": [{**DESCRIBED, "is_im2col": True}]}, "im2col"),
    "fp4": ({"tensordesc_meta": [{**DESCRIBED, "fp4_padded": True}]}, "4-bit"),
    "tf32": ({"tensordesc_meta": [{**DESCRIBED, "elem_type": 11}]}, "TF32"),
    "a swizzle": ({"tensordesc_meta": [{**DESCRIBED, "swizzle": 7}]}, "swizzle"),
    "two descriptors": ({"tensordesc_meta": [DESCRIBED] * 2}, "1 entry"),
    "no maps": ({"tensordesc_meta": []}, "other parameters than its binary"),
    "another generation": ({"profile_scratch_size": ...}, "other parameters than its binary"),
    "another kernel": ({"name": "other"}, "a kernel 'other'"),
    "another backend": ({"target": {"backend": "hip"}}, "another backend"),
    "shared memory": ({"shared": -1}, "shared"),
    "a size that is text": ({"shared": "4096"}, "shared"),
    "a cluster": ({"cluster_dims": [0, 1, 1]}, "cluster_dims"),
    "warps of another configuration": ({"num_warps": 8}, "num_warps at most 4, got 8"),
    "a cluster of another": ({"num_ctas": 2}, "clusters of 1, got clusters of 2"),
    "a name of two lines": ({"name": "a\nb"}, r"a kernel 'a.+b', got"),
    "many ctas": ({"num_ctas": 64}, "num_ctas"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_notes_that_cannot_be_launched(case: str, tmp_path: Path) -> None:
    changes, says = REFUSED[case]
    path = changed_metadata(copied(tmp_path), **changes)
    with pytest.raises(errors.Error, match=says):
        tct.read(path)


@pytest.mark.parametrize(
    ("version", "said"), [("4.0.0", "4.0.0"), ("3.10.1", "3.10.1"), ("2.2.0", "2.2.0"), (..., "")]
)
def test_notes_of_an_unknown_version_warn(version: Any, said: str, tmp_path: Path) -> None:
    """Their parameters fit, which is all that can be checked."""
    path = changed_metadata(copied(tmp_path), triton_version=version)
    words = rf"compiled by Triton {said or '.unknown.'}, and launches are known of 3\.3 to 3\.9"
    with pytest.warns(UserWarning, match=words) as caught:
        (found,) = tct.read(path)
    assert [warning.filename for warning in caught] == [__file__]
    assert found.version == said
    op = copy_tile([found])  # and can be launched
    assert contract_of(op)["producer"]["version"] == said


@pytest.mark.parametrize("version", ["3.3.0", "3.6.0", "3.9.7", "3.9.0+git1234"])
def test_notes_of_a_known_version_do_not_warn(version: str, tmp_path: Path) -> None:
    path = changed_metadata(copied(tmp_path), triton_version=version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tct.read(path)


def test_folders_that_hold_no_kernel(tmp_path: Path) -> None:
    with pytest.raises(errors.FileError, match="holds no Triton kernel"):
        tct.read(tmp_path)
    with pytest.raises(errors.FileError, match="no folder"):
        tct.read(tmp_path / "nothing")
    for wrong in (None, 5, [tmp_path]):
        with pytest.raises(errors.InputError, match="takes a path"):
            tct.read(wrong)
    folder = copied(tmp_path)
    (folder / "copy_tile.ttir").unlink()
    with pytest.raises(errors.FileError, match="TRITON_STORE_BINARY_ONLY"):
        tct.read(folder / "copy_tile.json")
    (folder / "add.json").write_text("[" * 100_000)
    with pytest.raises(errors.InputError, match="no JSON"):
        tct.read(folder / "add.json")
    (folder / "add.json").write_text("[]")
    with pytest.raises(errors.InputError, match="does not describe"):
        tct.read(folder / "add.json")


def test_hostile_notes_and_ir(tmp_path: Path) -> None:
    """For all contents of the files, the errors are ours."""
    r = random.Random(3)
    folder = copied(tmp_path)
    metadata = json.loads((folder / "copy_tile.json").read_text())
    ir = (folder / "copy_tile.ttir").read_text()
    outcomes: collections.Counter[str] = collections.Counter()
    values = [None, -1, 2**70, 1e308, "", "x" * 1000, [], [[]], {}, {"a": 1}, True, [1] * 99]
    for round_ in range(300):
        changed = copy.deepcopy(metadata)
        for key in r.sample(sorted(changed), 3):
            changed[key] = r.choice(values)
        if round_ % 3 == 0:
            changed["tensordesc_meta"] = [{**DESCRIBED, r.choice([*DESCRIBED]): r.choice(values)}]
        (folder / "copy_tile.json").write_text(json.dumps(changed))
        text = list(ir)
        for _ in range(r.choice((0, 1, 30))):
            at = r.randrange(len(text))
            text[at] = r.choice(["", "(", ")", "<", ">", "{", '"', ",", "%", text[at] * 2])
        (folder / "copy_tile.ttir").write_text("".join(text))
        try:
            (found,) = tct.read(folder / "copy_tile.json")
            copy_tile([found])
            outcomes["defined"] += 1
        except errors.Error as error:
            outcomes[error.tag] += 1
    assert outcomes["internal"] == 0, outcomes
    assert outcomes["input"] > 100, outcomes
    assert outcomes["defined"] > 10, outcomes


# --- errors of a definition by hand ---


def test_hidden_parameters_are_explained() -> None:
    path = DATA / "cache_3.6.0_sm_90a" / "add.cubin"
    given = {
        "kernel": (path, "add"),
        "tensors": {"x": "float32[n]", "y": "float32[n]", "out": "float32[n]"},
        "grid": lambda n: n,
    }
    schema = f"{namespace()}::add(Tensor x, Tensor y) -> Tensor"
    with pytest.raises(errors.ParamsError) as caught:
        torch_cubin.define_op(schema, **given, args=lambda x, y, out, n: (x, y, out, n))
    assert "expected 6, got 4" in str(caught.value)
    assert "the last 2 pointers are its own, to scratch memory" in str(caught.value)
    with pytest.raises(errors.ParamsError) as caught:
        torch_cubin.define_op(schema, **given, args=lambda x, y, out: (x, y, out))
    assert "scratch" not in str(caught.value)


def test_images_with_other_parameters_are_explained() -> None:
    """sm_80 has no tensor maps, and other parameters."""
    paths = [DATA / f"cache_3.6.0_{arch}" / "copy_tile.cubin" for arch in ("sm_80", "sm_90a")]
    with pytest.raises(errors.ParamsError, match="each is a kernel of its own"):
        torch_cubin.load(paths)["copy_tile"]


def test_folders_and_notes_name_the_cubin() -> None:
    folder = DATA / "cache_3.6.0_sm_90a"
    for path in (folder / "add.json", folder / "add.ttir"):
        with pytest.raises(errors.FileError, match="The cubin beside it is 'add.cubin'"):
            torch_cubin.load(path)
    with pytest.raises(errors.FileError, match="It holds 'add.cubin', 'copy_tile.cubin': pass"):
        torch_cubin.inspect(folder)


# --- what write() makes ---


def test_written_kernels_are_read_back(tmp_path: Path) -> None:
    kernels = [k for v in VERSIONS for k in tct.read(DATA / f"cache_{v}_sm_90a")]
    tct.write(tmp_path, kernels)
    again = tct.read(tmp_path)
    strip = [(k.cubin, k.name, k.parameters, dict(k.metadata), k.knows_folded) for k in kernels]
    assert strip == [
        (k.cubin, k.name, k.parameters, dict(k.metadata), k.knows_folded) for k in again
    ]
    with pytest.raises(errors.InputError, match="holds Triton kernels already"):
        tct.write(tmp_path, kernels)
    damaged = next(tmp_path.glob("*.cubin"))
    damaged.write_bytes(damaged.read_bytes() + b"\0")
    with pytest.raises(errors.HashError):
        tct.read(tmp_path)
    listed = json.loads((tmp_path / files.LIST).read_text())
    for wrong in ("../x.cubin", "/etc/passwd", 5, None):
        listed["kernels"][0]["cubin"] = wrong
        (tmp_path / files.LIST).write_text(json.dumps(listed))
        with pytest.raises(errors.InputError, match="names no cubin"):
            tct.read(tmp_path)


# --- definitions that do not fit ---


def parameter(name: str, type_: str, **more: Any) -> tct.Parameter:
    return tct.Parameter(name, type_, **more)


def add_kernel(*parameters: tct.Parameter, **metadata: Any) -> tct.TritonKernel:
    """The committed `add` with other notes on its five parameters: three pointers and an int."""
    (found,) = [k for k in tct.read(DATA / "cache_3.6.0_sm_90a") if k.name == "add"]
    return kernel.make(found.cubin, {**found.metadata, **metadata}, list(parameters), "add")


POINTERS = [parameter(name, "*fp32", multiple_of=16) for name in ("x_ptr", "y_ptr", "out_ptr")]
N = parameter("n", "i32", multiple_of=16)


def define_add(*parameters: tct.Parameter, schema: str = "", **more: Any) -> torch_cubin.Op:
    given = [*POINTERS, N, *parameters]
    return tct.define_op(
        f"{namespace()}::add({schema or 'Tensor x, Tensor y'}) -> Tensor",
        **{
            "kernel": [add_kernel(*given)],
            "tensors": {"x": "float32[n]", "y": "float32[n]", "out": "float32[n]"},
            "args": {"x_ptr": "x", "y_ptr": "y", "out_ptr": "out"},
            "grid": lambda n: torch_cubin.cdiv(n, 1024),
            **more,
        },
    )


def test_arguments_named_as_in_the_op_may_be_omitted() -> None:
    entry = contract_of(define_add())
    assert entry["args"][3] == ["int32", ["number", "n"]]
    assert entry["args"][4:] == [["uint64", 0]] * 2
    assert entry["requires"] == [{"argument": "n", "value": ["number", "n"], "multiple_of": 16}]
    assert contract_of(define_add(tensors={
        "x": "float32[n] align=4", "y": "float32[n] align=64", "out": "float32[n]"
    }))["requires"][0] == {"argument": "x_ptr", "address_of": "x", "multiple_of": 16}  # fmt: skip


ONE = parameter("stride", "constexpr", value=1)
WRONG = {
    "no value": ({"args": {"x_ptr": "x", "y_ptr": "y"}}, "'out_ptr' of type"),
    "an unknown name": ({"args": {"x_pt": "x"}}, "'x_ptr'"),
    "a number for a pointer": ({"args": {"x_ptr": 5}}, "a tensor of the op's"),
    "an unknown tensor": ({"args": {"x_ptr": "z"}}, "'z', which is no name"),
    "another dtype": (
        {"tensors": {"x": "float16[n]", "y": "float32[n]", "out": "float32[n]"}},
        "points to fp32, and tensor 'x' is another: expected float32, got float16",
    ),
    "a constant out of step": ({"args": {"n": 1000}}, "expected a multiple of 16, got 1000"),
    "a float for an int": ({"args": {"n": lambda x: x.numel() / 2}}, "of type i32"),
    "a bool for an int": ({"args": {"n": True}}, "of type i32"),
    "args that are one name": ({"args": "x"}, "a dict by name"),
    "too few in a row": ({"args": ("x", "y", "out")}, "4 (x_ptr, y_ptr, out_ptr, n)"),
    "no kernel": ({"kernel": 5}, "is no Triton kernel"),
    "no kernels": ({"kernel": []}, "is none"),
    "a launch of its own": (
        {"kernel": torch_cubin.KernelChoice("x", block=32)},
        "The compiler's notes say the rest",
    ),
    "a grid that needs a constant": ({"grid": lambda n, BLOCK: n // BLOCK}, "'BLOCK'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_definitions(case: str) -> None:
    changes, says = WRONG[case]
    if isinstance(changes.get("args"), dict):
        changes = {
            "args": {"x_ptr": "x", "y_ptr": "y", **changes["args"]}
            if "out_ptr" in says else {"out_ptr": "out", "x_ptr": "x", "y_ptr": "y",
                                       **changes["args"]}
        }  # fmt: skip
    with pytest.raises(errors.InputError) as caught:
        define_add(**changes)
    assert says in str(caught.value)


def test_folded_arguments_are_asked_for_and_checked() -> None:
    with pytest.raises(errors.InputError, match="'stride' was 1 when the kernel was compiled"):
        define_add(ONE)
    args = {"x_ptr": "x", "y_ptr": "y", "out_ptr": "out"}
    op = define_add(ONE, args={**args, "stride": lambda x: x.stride(0)})
    assert contract_of(op)["requires"][-1] == {
        "argument": "stride", "value": ["stride", "x", 0], "equals": 1
    }  # fmt: skip
    assert len(contract_of(define_add(ONE, args={**args, "stride": 1}))["requires"]) == 1
    with pytest.raises(errors.InputError, match="another constant than the kernel"):
        define_add(ONE, args={**args, "stride": 2})
    # A constant of the kernel's own need not be said; a name of the op's own is compared.
    size = parameter("SIZE", "constexpr", value=64, is_declared=True)
    op = define_add(size, grid=lambda n, SIZE: n // SIZE)
    assert contract_of(op)["grid"][0] == ["floordiv", ["number", "n"], 64]
    op = define_add(size, schema="Tensor x, Tensor y, int SIZE")
    assert contract_of(op)["requires"][-1]["equals"] == 64
    mode = parameter("MODE", "constexpr", value="relu", is_declared=True)
    op = define_add(mode, schema="Tensor x, Tensor y, str MODE")
    assert contract_of(op)["requires"][-1]["value"] == ["is", "MODE", "relu"]
    missing = parameter("bias", "constexpr", value=None)
    op = define_add(missing)
    assert len(contract_of(op)["requires"]) == 1
    with pytest.raises(errors.InputError, match="was None"):
        define_add(missing, args={**args, "bias": "x"})


def test_values_of_heuristics_must_be_given_and_are_checked() -> None:
    """@triton.heuristics({"EVEN": ...}): a constant of the kernel that depends on the call."""
    even = parameter("EVEN", "constexpr", value=True, is_declared=True)
    decorated = types.SimpleNamespace(
        values={"EVEN": lambda given: given["n"] % 64 == 0},
        fn=types.SimpleNamespace(
            fn=types.SimpleNamespace(params=[])
        ),  # autotuned, then the function
    )
    made = live.with_decorators([add_kernel(*POINTERS, N, even)], decorated)
    with pytest.raises(errors.InputError, match="'EVEN' was True when the kernel was compiled"):
        define_add(kernel=made)
    args = {"x_ptr": "x", "y_ptr": "y", "out_ptr": "out", "EVEN": lambda n: n % 64 == 0}
    entry = contract_of(define_add(kernel=made, args=args))
    assert entry["requires"][-1] == {
        "argument": "EVEN", "value": ["eq", ["mod", ["number", "n"], 64], 0], "equals": True
    }  # fmt: skip
    plain = live.with_decorators([add_kernel(*POINTERS, N, even)], decorated.fn)
    define_add(kernel=plain)  # without heuristics it is what it is


def test_kernels_that_take_the_same_calls_are_refused() -> None:
    plain = [parameter(p.name, p.type) for p in (*POINTERS, N)]
    first = add_kernel(*POINTERS, N)
    op = define_add(kernel=[add_kernel(*plain), first])
    assert [len(entry.get("requires", ())) for entry in op.contract["kernels"]] == [3, 0]
    assert op.contract["tensors"]["x"]["align"] == 4  # the second takes any address
    size = [parameter("SIZE", "constexpr", value=n, is_declared=True) for n in (64, 128)]
    (cache,) = [k for k in tct.read(DATA / "cache_3.9.0_sm_90a") if k.name == "add"]
    other = kernel.make(cache.cubin, cache.metadata, [*POINTERS, N, size[1]], "add")
    both = [add_kernel(*POINTERS, N, size[0]), other]
    with pytest.raises(errors.InputError, match="takes the same calls as another"):
        define_add(kernel=both)
    choices = [torch_cubin.KernelChoice(both[0], when=lambda n: n < 1000), both[1]]
    assert contract_of(define_add(kernel=choices))["when"] == ["lt", ["number", "n"], 1000]
    assert len(define_add(kernel=[first, first]).contract["kernels"]) == 1


def test_kernels_that_differ_in_types_are_chosen_by_range() -> None:
    wide = [parameter("n", "i64")]
    (found,) = [k for k in tct.read(DATA / "cache_3.6.0_sm_90a") if k.name == "add"]
    with pytest.raises(errors.ParamsError, match="other parameters than its binary"):
        kernel.make(found.cubin, found.metadata, [*POINTERS, *wide], "add")


# --- the compiler, where it is installed ---


@needs_triton
@pytest.mark.parametrize("name", sorted(table.known()) if table else ["(none)"])
def test_the_compilers_kernels_become_ops(name: str, tmp_path: Path) -> None:
    case = table.CASES[name]
    kernels = table.kernels_of(case)
    op = table.define(name, namespace(), kernels)
    assert len(op.contract["kernels"]) == len(case.archs)
    tct.write(tmp_path / "kernels", kernels)
    again = table.define(name, namespace(), tmp_path / "kernels")
    assert again.contract["kernels"] == op.contract["kernels"]
    torch_cubin.save_package(tmp_path / "package", [op])


@needs_triton
@pytest.mark.parametrize("kind", sorted(table.KINDS) if table else ["(none)"])
def test_each_kind_that_must_be_shown_has_cases(kind: str) -> None:
    """tests/gpu/test_cuda_producers.py compares all cases with Triton's own launches."""
    names, is_shown = table.KINDS[kind]
    shown = 0
    for name in names:
        case = table.CASES[name]
        if case.least > table.VERSION:
            continue
        (kernel_,) = table.kernels_of(case, ("sm_90a",))
        op = table.define(name, namespace(), [kernel_])
        assert is_shown(case, contract_of(op)), (kind, name, contract_of(op))
        shown += 1
    assert shown > 0 or table.VERSION < (3, 6), kind


@needs_triton
def test_enough_kernels_are_compared() -> None:
    count = len(table.different_kernels())
    print(f"{count} different kernels of {len(table.known())} cases")
    assert count >= table.LEAST_KERNELS


@needs_triton
def test_signatures() -> None:
    for signature, says in (
        ("*fp32:16, *fp32, *fp32, i32:7, 256", "16 or :1"),
        ("*fp32, *fp32, *fp32, i32", "lacks the type of 'BLOCK'"),
        ("*fp32, *fp32, *fp32, i32, i32", "takes 'BLOCK' as a constant"),
        ("*fp32, *fp32, *fp32, i32, 256, 5", "too many"),
        ({"z": "i32"}, "has no argument 'z'"),
    ):
        with pytest.raises(errors.InputError) as caught:
            tct.compile(table.add, signature, "sm_90a")
        assert says in str(caught.value)
    with pytest.raises(errors.InputError, match="'num_warps'.*, got 'num_warp'"):
        tct.compile(table.add, "*fp32, *fp32, *fp32, i32, 256", "sm_90a", num_warp=8)
    with pytest.raises(errors.InputError, match="no such target"):
        tct.compile(table.add, "*fp32, *fp32, *fp32, i32, 256", "gfx942")


@needs_triton
def test_the_command_line(tmp_path: Path, torch_python) -> None:
    source = tmp_path / "kernels.py"
    source.write_text(
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
        "def double(x_ptr, out_ptr, n, BLOCK: tl.constexpr):\n"
        "    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
        "    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n) * 2, mask=at < n)\n"
    )
    code = "import runpy; runpy.run_module('torch_cubin', run_name='__main__')"
    command = ["torch_cubin", "export", "triton", f"{source}:double"]
    command += ["--signature", "*fp32:16, *fp32:16, i32, 1024", "--arch", "sm_80,sm_90a"]
    command += ["--num-warps", "8", "--output", str(tmp_path / "out")]
    torch_python.output(code, argv=command)
    kernels = tct.read(tmp_path / "out")
    assert [k.arch for k in kernels] == ["sm_80", "sm_90a"]
    assert {k.metadata["num_warps"] for k in kernels} == {8}
    assert kernels[0].constants == {"BLOCK": 1024}
    done = torch_python.run(code, argv=command)
    assert done.returncode == 1
    assert "holds Triton kernels already" in done.stderr


# --- copies that never end ---


def halved(rows: int) -> list[Any]:
    signature = f"tensordesc<fp16[{rows},64]>, tensordesc<fp16[128,64]>, *fp16:16, i32:16, i32:16"
    return tct.compile(
        table.halved_matmul, f"{signature}, {rows}, 128, 64", "sm_90a", num_warps=4, num_stages=3
    )


@needs_triton
def test_a_kernel_that_never_ends_is_refused() -> None:
    import triton

    if triton.__version__.split(".")[:2] != ["3", "6"]:
        pytest.skip("a fault of Triton 3.6")
    with pytest.raises(errors.InputError, match="would never end.*128x64 elements, got 64x64"):
        halved(128)
    assert len(halved(64)) == 1


# --- what the autotuner found ---

TUNED = {"x": "float32[n]", "y": "float32[n]", "out": "float32[n]"}
TUNED_ARGS = {"x_ptr": "x", "y_ptr": "y", "out_ptr": "out"}


def autotuned(results: dict[tuple[int, ...], tuple[int, int]], dtypes: int = 3) -> Any:
    """`add` as @triton.autotune has it, after calls that found these configurations."""
    import triton

    configs = {
        pair: triton.Config({"BLOCK": pair[0]}, num_warps=pair[1])
        for pair in ((256, 4), (512, 4), (512, 8))
    }
    made = triton.autotune(list(configs.values()), key=["n"])(table.add)
    for key, pair in results.items():
        made.cache[(*key, *["torch.float32"] * dtypes)] = configs[pair]
    return made


def define_tuned(kernel_: Any, **more: Any) -> torch_cubin.Op:
    return tct.define_op(
        f"{namespace()}::add(Tensor x, Tensor y) -> Tensor",
        **{
            "kernel": kernel_,
            "tuned": True,
            "signature": "*fp32:16, *fp32:16, *fp32:16, i32",
            "archs": ["sm_80", "sm_90a"],
            "tensors": TUNED,
            "args": TUNED_ARGS,
            "grid": lambda n, BLOCK: torch_cubin.cdiv(n, BLOCK),
            **more,
        },
    )


@needs_later
def test_autotuned_kernels_are_found_by_their_key() -> None:
    results = {(1024,): (256, 4), (2048,): (512, 8), (4096,): (512, 8)}
    op = define_tuned(autotuned(results))
    tuned = op.contract["tuned"]
    assert tuned["key"] == [["number", "n"], ["dtype", "x"], ["dtype", "y"]]
    by_n = {values[0]: group for values, group in tuned["entries"]}
    assert by_n == {1024: 0, 2048: 1, 4096: 1}
    assert tuned["otherwise"] == 1  # which won most often
    warps = {(k.get("group", 0), k["producer"]["target"]): k["block"][0]
             for k in op.contract["kernels"]}  # fmt: skip
    assert warps == {(0, "sm_80"): 128, (0, "sm_90a"): 128, (1, "sm_80"): 256, (1, "sm_90a"): 256}
    assert op.contract["kernels"][0]["grid"][0][1][2] in (256, 512)


@needs_later
def test_all_configs_are_kept_as_candidates_for_tune() -> None:
    op = define_tuned(autotuned({}), tuned="all")
    kernels = op.contract["kernels"]
    assert {(k.get("group", 0), k["block"][0]) for k in kernels} == {(0, 128), (1, 128), (2, 256)}
    assert len(kernels) == 6  # for two architectures
    assert (op.contract["tuned"]["entries"], op.contract["tuned"]["otherwise"]) == ([], 0)
    op = define_tuned(autotuned({(1024,): (512, 8)}), tuned="all")
    assert {(k.get("group", 0), k["block"][0]) for k in op.contract["kernels"]} == {
        *((0, 256), (1, 128), (2, 128))
    }
    assert [group for _, group in op.contract["tuned"]["entries"]] == [0]
    with pytest.raises(errors.InputError, match="goes with another kernel"):
        define_tuned(table.add, tuned="all")


def test_configurations_that_python_prunes_are_not_taken_for_every_shape() -> None:
    from types import SimpleNamespace

    from torch_cubin._triton import tuned

    pruned = SimpleNamespace(configs=[], cache={}, keys=[], fn=None, early_config_prune=None)
    with pytest.raises(errors.InputError, match="has no results"):
        tuned.of(pruned, "all", None, None, None, None, "op 'a::b'")
    pruned.early_config_prune = lambda configs, named, **more: configs
    with pytest.raises(errors.InputError, match="early_config_prune"):
        tuned.of(pruned, "all", None, None, None, None, "op 'a::b'")


@needs_later
def test_an_autotuners_files(tmp_path: Path) -> None:
    def timing(block: int, warps: int, time: float) -> list:
        fields = {"kwargs": {"BLOCK": block}, "num_warps": warps, "num_ctas": 1, "num_stages": 3}
        fields |= {"maxnreg": None, "pre_hook": None, "ir_override": None}
        return [fields, [time, time, time]]

    paths = []
    for n, times in ((1024, (1.0, 1.5, 4.0)), (2048, (3.0, 1.4, 1.2)), (8192, (9.0, 1.3, 1.2))):
        listed = [timing(256, 4, times[0]), timing(512, 4, times[1]), timing(512, 8, times[2])]
        key = [n, *["torch.float32"] * 3]
        paths.append(tmp_path / f"{n}.autotune.json")
        paths[-1].write_text(json.dumps({"key": key, "configs_timings": listed}))
    op = define_tuned(autotuned({}), tuned=paths)
    tuned = op.contract["tuned"]
    assert {values[0]: group for values, group in tuned["entries"]} == {1024: 0, 2048: 1, 8192: 1}
    assert tuned["otherwise"] == 1
    for text, says in (
        ("{}", "no results of"),
        ('{"key": [1], "configs_timings": []}', "has no results"),
        ('{"key": [[]], "configs_timings": [[]]}', "no data"),
        ('{"key": [1], "configs_timings": [[{}, [1]]]}', "without kwargs"),
        ('{"key": [1], "configs_timings": [[{"kwargs": {}}, ["a"]]]}', "times"),
        ("[", "no JSON"),
    ):
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(errors.InputError, match=says):
            define_tuned(autotuned({}), tuned=tmp_path / "wrong.json")


@needs_later
def test_unsupported_autotuners_are_refused() -> None:
    with pytest.raises(errors.InputError, match="has no results"):
        define_tuned(autotuned({}))
    with pytest.raises(errors.InputError, match="goes with another kernel"):
        define_tuned(table.add)
    with pytest.raises(errors.InputError, match="is autotuned"):
        define_tuned(autotuned({}), tuned=None)
    hooked = autotuned({(1,): (256, 4)})
    next(iter(hooked.cache.values())).pre_hook = lambda arguments: None
    with pytest.raises(errors.InputError, match="pre_hook"):
        define_tuned(hooked)
    with pytest.raises(errors.InputError, match="a key of another kind"):
        define_tuned(autotuned({(1,): (256, 4)}, dtypes=2))
    with pytest.raises(errors.InputError, match="whose kernel is not here"):
        define_tuned(autotuned({(1,): (256, 4)}), signature=None, archs=None)


@needs_later
def test_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with tct.record() as seen:
        (made,) = tct.compile(table.add, "*fp32:16, *fp32:16, *fp32:16, i32, 128", "sm_90a")
        (again,) = tct.compile(table.add, "*fp32:16, *fp32:16, *fp32:16, i32, 128", "sm_90a")
    assert again == made
    assert [one.name for one in seen.kernels] == ["add"]
    assert seen.kernels[0].kernel == made
    assert "x_ptr: *fp32 (a multiple of 16), " in str(seen)
    assert "BLOCK = 128) for sm_90a" in str(seen)
    assert tct.read(seen.save(tmp_path / "kernels"))[0].parameters == made.parameters
    with tct.record() as nothing:
        pass
    assert str(nothing) == "no kernel was compiled"
    with pytest.raises(errors.InputError, match="would hold no kernel"):
        nothing.save(tmp_path / "none")
