"""The part of the catalog that needs no GPU: fields of a manifest, and refused manifests.

The library reads its catalog once; a catalog that it cannot read it asks for again. So one process
tries all the broken ones, and each manifest that can be read has a process of its own.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from kernel_sources import KERNELS, kernel_table
from preloaded import PreloadedPython

ROOT = Path(__file__).resolve().parents[2]
DIGEST = kernel_table.params_digest(KERNELS / "matmul" / "matmul_params.h")
ENTRY = {
    "name": "k",
    "family": "matmul",
    "kind": "mma",
    "arch": "sm_90a",
    "file": "sm_90a/k.cubin",
    "sha256": "0" * 64,
    "symbol": "k",
    "dtype": "bfloat16",
    "math": "bfloat16",
    "layout": "nn",
    "alignment": 16,
    "tile": [128, 128, 32],
    "block": [256, 1, 1],
    "cluster": [1, 1, 1],
    "dynamic_shared": 0,
    "blocks_per_multiprocessor": 2,
    "cost": {"k_tile": 100, "fixed": 200},
    "params": [{"index": 0, "offset": 0, "size": 256}],
    "params_digest": DIGEST,
}

# Reads one catalog after the other, as `folders` says, and prints what came of each.
READ = """
import json, os, sys
from torch_cubin import errors
from torch_cubin._native import library as _lib

for folder in sys.argv[1:]:
    os.environ["TORCH_CUBIN_CATALOG"] = folder
    try:
        print(json.dumps(_lib.catalog()))
    except errors.Error as error:
        print(json.dumps({"tag": error.tag, "text": str(error)}))
"""


def changed(**fields: object) -> dict:
    return {**copy.deepcopy(ENTRY), **fields}


def without(*path: str) -> dict:
    entry = copy.deepcopy(ENTRY)
    inner = entry
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return entry


def write(folder: Path, *entries: dict, **top: object) -> str:
    folder.mkdir(parents=True)
    manifest = {"version": 1, "compiler": "none", "kernels": list(entries), **top}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return str(folder)


@pytest.fixture(scope="session")
def read(torch_python: PreloadedPython) -> Callable[..., list[dict]]:
    """What a fresh process, the same for all of the folders, makes of their manifests."""

    def answers(*folders: str) -> list[dict]:
        printed = torch_python.output(READ, argv=("-c", *folders))
        return [json.loads(line) for line in printed.splitlines()]

    return answers


OUT_OF_RANGE = {
    "block of no threads": changed(block=[0, 1, 1]),
    "block of 1025 threads": changed(block=[1025, 1, 1]),
    # 2^32 threads: more than 32 bits hold.
    "block that overflows": changed(block=[65536, 65536, 1]),
    "cluster of no blocks": changed(cluster=[1, 0, 1]),
    "cluster of 17 blocks": changed(cluster=[17, 1, 1]),
}
MALFORMED = {
    "two sizes of a block": changed(block=[128, 1]),
    "a size that is a text": changed(block=["128", 1, 1]),
    "no symbol": without("symbol"),
    "parameters that are a number": changed(params=3),
    "an arch by another name": changed(arch="compute_90"),
    "an arch with a tail": changed(arch="sm_90ax"),
    "a file outside": changed(file="../k.cubin"),
    "a file from the root": changed(file="/k.cubin"),
}
# Fields that only the kernel's own host code understands: the entry's error, not the package's.
FIELDS = {
    "tile of no rows": ("tile", changed(tile=[0, 128, 32])),
    "tile of no columns": ("tile", changed(tile=[128, 0, 32])),
    "negative tile": ("tile", changed(tile=[128, 128, -32])),
    "two sizes of a tile": ("tile", changed(tile=[128, 128])),
    "a size that is a text": ("tile", changed(tile=["128", 128, 32])),
    "no alignment": ("alignment", changed(alignment=0)),
    "no alignment field": ("alignment", without("alignment")),
    "no occupancy": ("blocks_per_multiprocessor", changed(blocks_per_multiprocessor=0)),
    "negative cost of a tile": ("k_tile", changed(cost={"k_tile": -1, "fixed": 0})),
    "negative fixed cost": ("fixed", changed(cost={"k_tile": 1, "fixed": -0.5})),
    "negative lone cost": ("lone", changed(cost={"k_tile": 1, "fixed": 1, "lone": -1})),
    "no cost of a tile": ("k_tile", without("cost", "k_tile")),
    "a layout that is unknown": ("layout", changed(layout="ns")),
    "a math that is unknown": ("math", changed(math="float4")),
}


@pytest.fixture(scope="module")
def answers(read, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What the library says to each broken manifest, in one process, and to a good one after."""
    folder = tmp_path_factory.mktemp("catalogs")
    cases = {name: (entry,) for name, entry in {**OUT_OF_RANGE, **MALFORMED}.items()}
    cases["twice"] = (ENTRY, ENTRY)
    folders = [write(folder / str(i), *entries) for i, entries in enumerate(cases.values())]
    folders.append(write(folder / "version", ENTRY, version=2))
    folders.append(write(folder / "good", ENTRY))
    return dict(zip([*cases, "version", "good"], read(*folders), strict=True))


@pytest.mark.parametrize("case", OUT_OF_RANGE)
def test_a_number_out_of_range_is_a_file_error(answers: dict, case: str) -> None:
    assert answers[case]["tag"] == "file"
    assert "kernel 'k' has a number out of range" in answers[case]["text"]


@pytest.mark.fault_case(10)
@pytest.mark.parametrize("case", [*MALFORMED, "twice", "version"])
def test_a_malformed_manifest_is_a_file_error(answers: dict, case: str) -> None:
    assert answers[case]["tag"] == "file"
    assert "expected a version 1 kernel manifest, got " in answers[case]["text"]


def test_an_unreadable_catalog_is_read_again(answers: dict) -> None:
    good = answers["good"]
    assert [kernel["name"] for kernel in good["kernels"]] == ["k"]
    assert (good["archs"], good["loaded"], good["refused"]) == (["sm_90a"], [], [])


def test_numbers_at_the_edge_of_their_range_are_taken(read, tmp_path: Path) -> None:
    free = {"k_tile": 0, "fixed": 0, "lone": 0}
    edge = changed(block=[8, 8, 16], cluster=[4, 2, 2], tile=[1, 1, 1], alignment=1, cost=free)
    (answer,) = read(write(tmp_path / "edge", edge))
    assert answer["refused"] == []


def test_an_invalid_field_refuses_only_its_entry(read, tmp_path: Path) -> None:
    entries = [{**entry, "name": case} for case, (_, entry) in FIELDS.items()]
    (answer,) = read(write(tmp_path / "package", changed(name="good"), *entries))
    texts = {refused["name"]: refused["message"] for refused in answer["refused"]}
    assert set(texts) == set(FIELDS)
    for case, (field, _) in FIELDS.items():
        start = f"torch_cubin [file]: catalog kernel '{case}' has a field '{field}' that this "
        assert texts[case].startswith(start), texts[case]


def test_an_unknown_kind_refuses_only_its_entry(read, tmp_path: Path) -> None:
    (answer,) = read(write(tmp_path / "package", ENTRY, changed(name="new", kind="sm999")))
    (refused,) = answer["refused"]
    assert refused["name"] == "new"
    assert (
        "[params]: catalog kernel 'new' is of a kind that the matmul family does not know"
        in (refused["message"])
    )
    assert "got 'sm999'" in refused["message"]


@pytest.mark.fault_case(18)
def test_every_kernel_of_the_package_has_a_backend(read) -> None:
    """What the build made is what this library knows: no entry is refused."""
    manifest = ROOT / "torch_cubin" / "cubins" / "manifest.json"
    if not manifest.is_file():
        pytest.skip("no kernels are built")
    (answer,) = read(str(manifest.parent))
    assert answer["refused"] == []


def test_a_kernel_of_other_parameters_is_refused(read, tmp_path: Path) -> None:
    entries = [
        changed(name="own"),
        changed(name="other", params_digest="0" * 64),
        {**without("params_digest"), "name": "unsaid"},
        changed(name="unknown", family="convolution"),
    ]
    (answer,) = read(write(tmp_path / "package", *entries))
    texts = {refused["name"]: refused["message"] for refused in answer["refused"]}
    assert set(texts) == {"other", "unsaid", "unknown"}
    for name, text in texts.items():
        assert text.startswith(f"torch_cubin [params]: catalog kernel '{name}' takes other param")
    assert f"expected params_digest {DIGEST}, got {'0' * 64}. " in texts["other"]
    assert "got none. " in texts["unsaid"]
    assert "got family 'convolution'. " in texts["unknown"]


def test_the_packages_own_kernels_are_of_this_library(read) -> None:
    manifest = ROOT / "torch_cubin" / "cubins" / "manifest.json"
    if not manifest.is_file():
        pytest.skip("no kernels are built here")
    (answer,) = read(str(manifest.parent))
    assert answer["kernels"]
    assert answer["refused"] == []
