"""csrc/kernels/build/kernel_table.py: tables at the ends of sources; digests of parameters."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from kernel_sources import KERNELS, BuildError, kernel_table, table


def parse(*entries: dict, **top: object) -> list[kernel_table.Kernel]:
    return kernel_table.parse_table(table(*entries, **top), Path("matmul/simt.cu"))


def test_table_expands_cross_product() -> None:
    kernels = parse(
        {
            "name": "k_{layout}_{t.name}",
            "layout": "{layout}",
            "tile": "{t.tile}",
            "stages": "{t.s{layout}}",
            "defines": {"L_{layout}": 1},
            "for": {
                "layout": ["nn", "tt"],
                "t": [
                    {"name": "big", "tile": [128, 128, 8], "snn": 2, "stt": 3},
                    {"name": "small", "tile": [64, 64, 8], "snn": 4, "stt": 5},
                ],
            },
        }
    )
    assert [kernel.name for kernel in kernels] == [
        "k_nn_big",
        "k_nn_small",
        "k_tt_big",
        "k_tt_small",
    ]
    last = kernels[-1]
    assert last.fields["tile"] == [64, 64, 8]
    assert last.fields["stages"] == 5
    assert last.fields["family"] == "matmul"
    assert last.fields["cluster"] == [1, 1, 1]
    assert "defines" not in last.fields
    assert "for" not in last.fields
    macros = last.macros()
    assert (macros["TC_KERNEL"], macros["TC_TILE_M"], macros["L_tt"]) == ("k_tt_small", "64", "1")
    assert (macros["TC_THREADS"], macros["TC_STAGES"]) == ("64", "5")


def test_table_defaults_are_overridden_and_extra_fields_kept() -> None:
    text = table({"rows": 4}, defaults={"stages": 9, "color": "red"})
    (kernel,) = kernel_table.parse_table(text, Path("matmul/dot.cu"))
    assert (kernel.fields["stages"], kernel.fields["color"], kernel.fields["rows"]) == (2, "red", 4)


def test_loops_over_dtypes_and_tables() -> None:
    """Members of `for` and `defines` are added to those of the defaults; null omits a member."""
    entry = {
        "name": "k_{d.short}_{t.tile.0}x{t.tile.1}",
        "tile": "{t.tile}",
        "cost": {"fixed": "{t.fixed}", "lone": "{t.lone}"},
        "defines": {"TC_BYTES": "{d.bytes}"},
        "for": {"t": [["tile", "fixed", "lone"], [[64, 32, 8], 7, 0.5], [[8, 16, 8], 9, None]]},
    }
    defaults = {"for": {"d": "bf16 tf32"}, "defines": {"TC_DTYPE": "{d.dtype}"}}
    omitted = ("dtype", "math", "layout", "alignment", "stages", "dynamic_shared")
    full = json.loads(kernel_table.TABLE.findall(table(entry))[0])["kernels"][0]
    short = {key: value for key, value in full.items() if key not in omitted}
    block = json.dumps({"virtual_arch": ["90a"], "defaults": defaults, "kernels": [short]})
    kernels = kernel_table.parse_table(f"/* torch_cubin kernels\n{block}\n*/\n", Path("a/b.cu"))
    assert [kernel.name for kernel in kernels] == [
        *("k_bf16_64x32", "k_bf16_8x16", "k_tf32_64x32", "k_tf32_8x16"),
    ]
    last = kernels[-1]
    assert last.defines == {"TC_DTYPE": "float32", "TC_BYTES": "4"}
    assert [kernel.fields["cost"] for kernel in kernels[:2]] == [
        {"fixed": 7, "lone": 0.5},
        {"fixed": 9},
    ]
    assert [last.fields[field] for field in omitted] == ["float32", "tf32", "any", 16, 1, 0]
    assert last.archs == ("sm_90a",)


def test_the_documented_table_is_one() -> None:
    text = (KERNELS / "README.md").read_text()
    kernels = kernel_table.parse_table(text, KERNELS / "matmul" / "simt.cu")
    assert [kernel.name for kernel in kernels][:2] == [
        *("simt_matmul_f32_nn_128x128x8", "simt_matmul_f32_nn_64x64x16"),
    ]
    assert len(kernels) == 16


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"name": "k_{layot}"}, "unknown variable '{layot}'"),
        ({"name": "{t.x}", "for": {"t": [{"name": "a"}]}}, "unknown variable '{t.x}'"),
        ({"name": "{t.tile.3}", "for": {"t": [["tile"], [[1, 2, 3]]]}}, "variable '{t.tile.3}'"),
        ({"for": {"t": [["x", "y"], [1]]}}, "row of another length"),
        ({"for": {"d": "f16 f8"}}, "unknown dtypes ['f8']"),
        ({"tile": [64, 64]}, "wrong 'tile'"),
        ({"block": ["64", 1, 1]}, "wrong 'block'"),
    ],
)
def test_table_mistakes_are_named(entry: dict, says: str) -> None:
    with pytest.raises(BuildError, match=r"^torch_cubin \[file\]: ") as error:
        parse(entry)
    assert says in str(error.value)


def test_table_missing_fields_bad_json_and_duplicates(tmp_path: Path) -> None:
    text = table({}).replace('"math"', '"mth"').replace('"cost"', '"cst"')
    with pytest.raises(BuildError, match="no math, cost"):
        kernel_table.parse_table(text, Path("a.cu"))
    with pytest.raises(BuildError, match="is not JSON"):
        kernel_table.parse_table("/* torch_cubin kernels\n{,}\n*/\n", Path("a.cu"))
    for family in ("matmul", "softmax"):
        (tmp_path / family).mkdir()
        (tmp_path / family / "a.cu").write_text(table({}))
    with pytest.raises(BuildError, match=r"'softmax/a.cu' names kernel 'k' again.*matmul/a\.cu"):
        kernel_table.read_tables(tmp_path)


@pytest.mark.parametrize(
    ("virtual", "arch", "chosen"),
    [
        ([80], "sm_90a", "80"),
        ([80, 90], "sm_90a", "90"),
        ([80, "90a"], "sm_90a", "90a"),
        ([80, "90a"], "sm_100a", "80"),
        ([80, 89], "sm_86", "80"),
    ],
)
def test_virtual_arch_is_highest_usable(virtual: list, arch: str, chosen: str) -> None:
    (kernel,) = parse({}, virtual_arch=virtual)
    assert kernel.virtual_arch(arch) == chosen


def test_virtual_arch_none_usable() -> None:
    (kernel,) = parse({}, virtual_arch=["90a"])
    with pytest.raises(BuildError, match=r"\[arch\].*'k' cannot be built for sm_80"):
        kernel.virtual_arch("sm_80")


def test_kernel_tables_name_each_kernel_once() -> None:
    kernels = kernel_table.read_tables(KERNELS)
    assert {"simt", "dot", "reduce"} <= {kernel.fields["kind"] for kernel in kernels}
    for kernel in kernels:
        # A file whose name goes on from another's may go on with that one's kernels.
        prefixes = tuple(kernel_table.name_prefixes(kernel.source))
        assert kernel.name.startswith(prefixes), kernel.name
        wide = ("float16", "bfloat16", "float32", "float64", "any")
        assert kernel.fields["dtype"] in (*wide, "float8_e4m3fn")


def test_the_page_of_kernels_names_every_source() -> None:
    page = (KERNELS / "README.md").read_text()
    sources = [path.relative_to(KERNELS).as_posix() for path in KERNELS.rglob("*.cu")]
    assert sources
    assert [s for s in sources if not re.search(rf"[`/]{Path(s).name}`", page)] == []


def test_params_digest_is_of_the_declaration_alone(tmp_path: Path) -> None:
    header = tmp_path / "x_params.h"

    def digest(text: str) -> str:
        header.write_text(text)
        return kernel_table.params_digest(header)

    plain = digest("#pragma once\nstruct XParams {\n  int m;\n  int n;\n};\n")
    assert plain == digest(
        "// One.\n#pragma once\n\nstruct XParams { /* sizes\n */ int m;  // rows\n  int n; };"
    )
    assert plain != digest("#pragma once\nstruct XParams {\n  int n;\n  int m;\n};\n")
    assert plain != digest("#pragma once\nstruct XParams {\n  int m;\n  float n;\n};\n")


def test_params_digest_follows_includes(tmp_path: Path) -> None:
    header, common = tmp_path / "x_params.h", tmp_path / "common.h"
    header.write_text('#include "common.h"\nstruct XParams { Size m; };\n')
    digests = []
    for size in ("int", "long long", "int  /* 4 bytes */"):
        common.write_text(f"typedef {size} Size;\n")
        digests.append(kernel_table.params_digest(header))
    assert digests[0] == digests[2] != digests[1]


def test_includes_are_followed_across_folders(tmp_path: Path) -> None:
    """Beside the includer first, then from the folder of the families: as the compiler does."""
    for name in ("common", "matmul"):
        (tmp_path / name).mkdir()
    source, header = tmp_path / "matmul" / "mma.cu", tmp_path / "common" / "mma.cuh"
    source.write_text('#include "common/mma.cuh"\nint x;\n')
    header.write_text('#include "ptx.cuh"\n')
    digests = []
    for text in ("int y;\n", "int z;\n"):
        (tmp_path / "common" / "ptx.cuh").write_text(text)
        digests.append(kernel_table.source_digest(source))
    (tmp_path / "matmul" / "ptx.cuh").write_text("int other;\n")  # not the one that is meant
    assert kernel_table.source_digest(source) == digests[1] != digests[0]
    assert set(kernel_table.with_includes(source)) == {
        "matmul/mma.cu",
        "common/mma.cuh",
        "common/ptx.cuh",
    }


def test_a_kernel_may_have_a_parameters_header_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "matmul").mkdir()
    source = tmp_path / "matmul" / "sm90.cu"
    assert kernel_table.params_header(source) == tmp_path / "matmul" / "matmul_params.h"
    (tmp_path / "matmul" / "sm90_params.h").write_text("struct Sm90Params {};\n")
    assert kernel_table.params_header(source) == tmp_path / "matmul" / "sm90_params.h"


def test_sources_may_lie_in_folders_of_their_family(tmp_path: Path) -> None:
    """They use the family's headers, those of its other folders and the common ones."""
    for name in ("common", "attention/sm90", "attention/portable"):
        (tmp_path / name).mkdir(parents=True)
    source = tmp_path / "attention" / "sm90" / "backward_delta.cu"
    header = tmp_path / "attention" / "attention_params.h"
    own = tmp_path / "attention" / "sm90" / "backward_params.h"
    for path in (header, tmp_path / "attention" / "portable" / "tile.cuh"):
        path.write_text("int x;\n")
    source.write_text(
        '#include "attention/attention_params.h"\n#include "attention/portable/tile.cuh"\n'
    )
    assert kernel_table.params_header(source) == header
    own.write_text("int y;\n")
    assert kernel_table.params_header(source) == own
    keys = [kernel_table.params_key(path) for path in kernel_table.headers_of_params(tmp_path)]
    assert keys == ["attention", "attention/sm90/backward"]
    assert set(kernel_table.with_includes(source)) == {
        "attention/sm90/backward_delta.cu",
        "attention/attention_params.h",
        "attention/portable/tile.cuh",
    }
    assert kernel_table.family_of(source) == "attention"
    assert "sm90_backward_delta_attention" in kernel_table.name_prefixes(source)


def test_every_kernel_has_its_parameters_header() -> None:
    for kernel in kernel_table.read_tables(KERNELS):
        assert kernel_table.params_header(kernel.source).is_file(), kernel.source
