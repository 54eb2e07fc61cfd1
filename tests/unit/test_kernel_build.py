"""csrc/kernels/build.py: kernel tables, logs, occupancy, and whole packages from tiny kernels."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import cubin_check
import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "csrc" / "kernels"
sys.path.insert(0, str(KERNELS))

import build  # noqa: E402
import cubin_facts  # noqa: E402
import kernel_table  # noqa: E402
import toolkit  # noqa: E402
from toolkit import BuildError  # noqa: E402

FIELDS = {
    "name": "k",
    "kind": "simt",
    "dtype": "float32",
    "math": "float32",
    "layout": "nn",
    "alignment": 16,
    "tile": [64, 64, 8],
    "stages": 2,
    "block": [64, 1, 1],
    "dynamic_shared": 0,
    "cost": {"k_tile": 1, "fixed": 2},
}


def table(*entries: dict, **top: object) -> str:
    block = json.dumps({**top, "kernels": [{**FIELDS, **entry} for entry in entries]}, indent=1)
    return f"int x;\n\n/* torch_cubin kernels\n{block}\n*/\n"


def parse(*entries: dict, **top: object) -> list[kernel_table.Kernel]:
    return kernel_table.parse_table(table(*entries, **top), Path("simt_matmul.cu"))


# --- tables ---------------------------------------------------------------------------------------


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
    (kernel,) = kernel_table.parse_table(text, Path("dot_matmul.cu"))
    assert (kernel.fields["stages"], kernel.fields["color"], kernel.fields["rows"]) == (2, "red", 4)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"name": "k_{layot}"}, "unknown variable '{layot}'"),
        ({"name": "{t.x}", "for": {"t": [{"name": "a"}]}}, "unknown variable '{t.x}'"),
        ({"tile": [64, 64]}, "wrong 'tile'"),
        ({"block": ["64", 1, 1]}, "wrong 'block'"),
    ],
)
def test_table_mistakes_are_named(entry: dict, says: str) -> None:
    with pytest.raises(BuildError, match=r"^torch_cubin \[file\]: ") as error:
        parse(entry)
    assert says in str(error.value)


def test_table_missing_fields_bad_json_and_duplicates(tmp_path: Path) -> None:
    text = table({}).replace('"layout"', '"lay"').replace('"cost"', '"cst"')
    with pytest.raises(BuildError, match="no layout, cost"):
        kernel_table.parse_table(text, Path("a.cu"))
    with pytest.raises(BuildError, match="is not JSON"):
        kernel_table.parse_table("/* torch_cubin kernels\n{,}\n*/\n", Path("a.cu"))
    (tmp_path / "a_matmul.cu").write_text(table({}))
    (tmp_path / "b_matmul.cu").write_text(table({}))
    with pytest.raises(BuildError, match=r"names kernel 'k' again.*a_matmul\.cu"):
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


def test_own_tables_have_one_entry_a_name() -> None:
    kernels = kernel_table.read_tables(KERNELS)
    assert {"simt", "dot", "reduce"} <= {kernel.fields["kind"] for kernel in kernels}
    for kernel in kernels:
        assert kernel.name.startswith(kernel.source.stem), kernel.name
        assert kernel.fields["dtype"] in ("float16", "bfloat16", "float32", "float64")


# --- logs and occupancy ---------------------------------------------------------------------------

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'wgmma_mma_async' for 'sm_90a'
ptxas info    : Function properties for wgmma_mma_async
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 128 registers, used 2 barriers, 104 bytes cumulative stack size, 32768 bytes \
smem
ptxas info    : Compile time = 16.924 ms
"""
SERIALISED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources for the wgmma pipeline in function 'k'\n"
)


def test_log_facts() -> None:
    facts = cubin_facts.parse_log(LOG.format(stack=0, stores=0, loads=0))
    assert (facts.registers, facts.static_shared, facts.barriers) == (128, 32768, 2)
    assert (facts.spill, facts.warnings) == (0, ())
    cubin_facts.check_log(facts, "k", "sm_90a", 0)


def test_log_spill_fails_unless_accepted() -> None:
    facts = cubin_facts.parse_log(LOG.format(stack=8, stores=8, loads=12))
    with pytest.raises(
        BuildError, match=r"kernel 'k' for sm_90a spills.*at most 8 bytes.*20 bytes"
    ):
        cubin_facts.check_log(facts, "k", "sm_90a", 8)
    cubin_facts.check_log(facts, "k", "sm_90a", 20)


@pytest.mark.parametrize(
    "line",
    [
        SERIALISED,
        SERIALISED.replace("C7510", "C7515"),
        "ptxas warning : (C7508) setmaxnreg ignored to maintain minimum register requirements.\n",
    ],
)
def test_log_serialised_tensor_cores_fail(line: str) -> None:
    facts = cubin_facts.parse_log(LOG.format(stack=0, stores=0, loads=0) + line)
    with pytest.raises(BuildError, match=r"kernel 'k' for sm_90a was compiled with"):
        cubin_facts.check_log(facts, "k", "sm_90a", 0)


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks"),
    [
        ("sm_90a", 128, 96, 8448, 5),  # registers: 20 warps of 96
        ("sm_90a", 256, 128, 16384, 2),
        ("sm_90a", 384, 168, 229376, 1),  # shared memory
        ("sm_80", 256, 32, 0, 8),  # threads
        ("sm_86", 256, 32, 0, 6),
        ("sm_90a", 32, 16, 0, 32),  # blocks
        ("sm_89", 128, 64, 49152, 2),
        ("sm_90a", 1024, 128, 0, 0),  # cannot run at all
    ],
)
def test_occupancy(arch: str, threads: int, registers: int, shared: int, blocks: int) -> None:
    assert cubin_facts.blocks_per_multiprocessor(arch, threads, registers, shared) == blocks


def test_shared_memory_limit() -> None:
    cubin_facts.check_shared("k", "sm_90a", 232448)
    with pytest.raises(BuildError, match=r"'k' for sm_86 needs too much.*101376 bytes.*101377"):
        cubin_facts.check_shared("k", "sm_86", 101377)


def test_unknown_arch() -> None:
    for text in ("sm90", "sm_42", "compute_90"):
        with pytest.raises(BuildError, match=r"^torch_cubin \[arch\]: "):
            build.choose_archs(text)
    assert build.choose_archs("sm_80, sm_90a;sm_80") == ("sm_80", "sm_90a")


def test_archs_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUBIN_ARCHS", "sm_89")
    assert build.choose_archs(None) == ("sm_89",)
    monkeypatch.delenv("TORCH_CUBIN_ARCHS")
    assert build.choose_archs(None) == build.DEFAULT_ARCHS


# --- the toolkit ----------------------------------------------------------------------------------


def test_missing_compiler_says_how_to_get_one(tmp_path: Path) -> None:
    env = {"CUDA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path)}
    with pytest.raises(BuildError, match=r"^torch_cubin \[file\]: the CUDA compiler") as error:
        toolkit.find_toolkit(env, [tmp_path / "site-packages"], tmp_path / "cuda")
    text = str(error.value)
    assert f"none in {tmp_path / 'home'}, {tmp_path / 'cuda'}" in text
    assert all(f"'{wheel}'" in text for wheel in toolkit.REQUIREMENTS)
    assert len(toolkit.REQUIREMENTS) == 5


def fake_toolkit(root: Path, release: str, include: str) -> None:
    for folder in ("bin", include):
        (root / folder).mkdir(parents=True)
    for tool in ("nvcc", "ptxas"):
        (root / "bin" / tool).write_text(f"#!/bin/sh\necho 'release {release[:4]}, V{release}'\n")
        (root / "bin" / tool).chmod(0o755)
    (root / include / "cuda.h").touch()


def test_toolkit_order(tmp_path: Path) -> None:
    site, system = tmp_path / "site-packages", tmp_path / "cuda"
    fake_toolkit(toolkit.wheel_root(site), "13.0.1", "include")
    env = {"PATH": "/usr/bin:/bin"}
    assert toolkit.find_toolkit(env, [site], system).release == "13.0.1"
    fake_toolkit(system, "13.0.2", "targets/x86_64-linux/include")
    found = toolkit.find_toolkit(env, [site], system)
    assert (found.release, found.include.parts[-1]) == ("13.0.2", "include")
    fake_toolkit(tmp_path / "home", "13.0.3", "include")
    env["CUDA_PATH"] = str(tmp_path / "home")
    assert toolkit.find_toolkit(env, [site], system).release == "13.0.3"
    (tmp_path / "home" / "include" / "cuda.h").unlink()  # incomplete: the next one
    assert toolkit.find_toolkit(env, [site], system).release == "13.0.2"


# --- parameters -----------------------------------------------------------------------------------


def test_params_size_is_what_the_compiler_says(tmp_path: Path) -> None:
    size = cubin_facts.params_size(KERNELS / "matmul_params.h")
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "no C++ compiler"
    source = tmp_path / "size.cpp"
    source.write_text(
        '#include "matmul_params.h"\n'
        f'static_assert(sizeof(torch_cubin::MatmulParams) == {size}, "");\n'
    )
    subprocess.run([compiler, "-fsyntax-only", f"-I{KERNELS}", str(source)], check=True)


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


def test_every_family_has_its_parameters_header() -> None:
    families = {kernel.fields["family"] for kernel in kernel_table.read_tables(KERNELS)}
    for family in families:
        assert (KERNELS / f"{family}_params.h").is_file(), family


@pytest.mark.parametrize(
    ("arch", "body", "right"),
    [
        ("sm_80", "ld.global.f32 %f1, [%rd1]; ret;", True),
        ("sm_90a", "griddepcontrol.wait; ld.global.f32 %f1, [%rd1]; ret;", True),
        (
            "sm_120a",
            "ld.param.u64 %r, [p]; griddepcontrol.wait; st.global.f32 [%r], %f;",
            True,
        ),
        ("sm_90a", "ld.global.f32 %f1, [%rd1]; ret;", False),
        ("sm_100a", "ld.global.f32 %f1, [%rd1]; griddepcontrol.wait; ret;", False),
        ("sm_90a", "@%p1 ret; griddepcontrol.wait; ret;", False),
        ("sm_90a", "ld.relaxed.gpu.global.u32 %r1, [%rd1]; griddepcontrol.wait; ret;", False),
        ("sm_90a", "cp.async.cg.shared.global [%r1], [%rd1], 16; griddepcontrol.wait;", False),
    ],
)
def test_kernels_wait_before_they_touch_memory(arch: str, body: str, right: bool) -> None:
    ptx = f".func helper () {{ ret; }} .visible .entry k (.param .u64 p) {{ {body} }}"
    if right:
        cubin_facts.check_waits("k", arch, ptx)
        return
    with pytest.raises(BuildError, match=rf"kernel 'k' for {arch} does not wait"):
        cubin_facts.check_waits("k", arch, ptx)


# --- whole packages -------------------------------------------------------------------------------

SOURCE = """\
#include "matmul_params.h"
#include "scale.cuh"
extern "C" __global__ void TC_KERNEL(const __grid_constant__ torch_cubin::MatmulParams p) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  static_cast<float*>(p.c)[threadIdx.x] = scale(static_cast<const float*>(p.a)[threadIdx.x]);
}
"""


@pytest.fixture(scope="module")
def tools() -> toolkit.Toolkit:
    try:
        return toolkit.find_toolkit()
    except BuildError as error:
        pytest.skip(str(error))


class Package:
    """A checkout's kernels in a folder of its own, and what its builds say."""

    def __init__(self, folder: Path, tools: toolkit.Toolkit):
        self.sources, self.cache, self.out = folder / "src", folder / "cache", folder / "out"
        self.tools = tools
        self.sources.mkdir(parents=True)
        shutil.copy(KERNELS / "matmul_params.h", self.sources)
        self.header("2.0f")
        self.table({"name": "k_{n}", "for": {"n": ["one", "two"]}})

    def header(self, factor: str) -> None:
        text = f"__device__ float scale(float x) {{ return x * {factor}; }}\n"
        (self.sources / "scale.cuh").write_text(text)

    def table(self, *entries: dict, source: str = SOURCE) -> None:
        (self.sources / "simt_matmul.cu").write_text(source + table(*entries))

    def build(self, *archs: str) -> list[str]:
        lines: list[str] = []
        build.build_package(self.out, archs, 2, lines.append, self.sources, self.cache, self.tools)
        return lines

    def files(self) -> dict[str, bytes]:
        found = (path for path in self.out.rglob("*") if path.is_file())
        return {str(path.relative_to(self.out)): path.read_bytes() for path in found}

    def manifest(self) -> dict:
        return json.loads((self.out / "manifest.json").read_text())


@pytest.fixture
def package(tmp_path: Path, tools: toolkit.Toolkit) -> Package:
    return Package(tmp_path / "a", tools)


def test_package_matches_its_manifest(package: Package, tmp_path: Path) -> None:
    lines = package.build("sm_80", "sm_90a")
    assert sum(line.startswith("[") for line in lines) == 4
    assert lines[-1].startswith("4 cubins, ")
    files, manifest = package.files(), package.manifest()
    assert manifest["compiler"] == f"nvcc {package.tools.release}"
    assert (manifest["version"], manifest["package"]) == (1, "torch_cubin")
    assert len(files) == 5
    for entry in manifest["kernels"]:
        assert entry["sha256"] == hashlib.sha256(files[entry["file"]]).hexdigest()
        assert entry["params"] == [{"index": 0, "offset": 0, "size": 256}]
        header = package.sources / "matmul_params.h"
        assert entry["params_digest"] == kernel_table.params_digest(header)
        assert entry["symbol"] == entry["name"]
        assert entry["tile"] == [64, 64, 8]
        assert 0 < entry["registers"] < 64
        assert entry["blocks_per_multiprocessor"] == 32
    # Another checkout, another folder: the same bytes.
    other = Package(tmp_path / "elsewhere" / "b", package.tools)
    other.build("sm_80", "sm_90a")
    assert other.files() == files


def test_package_facts_are_those_of_the_parser(package: Package) -> None:
    """csrc/cubin reads the same facts from the cubins as the build from ptxas' log."""
    body = """\
  __shared__ float s[3000];
  s[threadIdx.x] = 1.0f;
  __syncthreads();
  static_cast<float*>(p.c)[threadIdx.x] = scale(s[threadIdx.x ^ 1]);
}
"""
    package.table({"name": "k"}, source=SOURCE[: SOURCE.index("  static_cast")] + body)
    package.build("sm_80", "sm_90a", "sm_120a")
    for entry in package.manifest()["kernels"]:
        facts = cubin_check.facts(package.out / entry["file"])
        assert facts["arch"] == entry["arch"]
        (kernel,) = facts["kernels"]
        assert kernel["name"] == entry["symbol"]
        assert kernel["registers"] == entry["registers"]
        assert kernel["static_shared"] == entry["static_shared"] == 12000
        params = [{key: p[key] for key in ("index", "offset", "size")} for p in kernel["params"]]
        assert params == entry["params"]


def test_package_is_rebuilt_where_something_changed(package: Package) -> None:
    package.build("sm_80", "sm_90a")
    before = package.files()
    lines = package.build("sm_80", "sm_90a")
    assert not any(line.startswith("[") for line in lines), lines
    assert package.files() == before

    package.header("3.0f")  # a header: everything
    lines = package.build("sm_80", "sm_90a")
    assert sum(line.startswith("[") for line in lines) == 4
    assert package.files()["sm_80/k_one.cubin"] != before["sm_80/k_one.cubin"]

    entry = {"name": "k_{n}", "for": {"n": ["one", "two"]}, "cost": {"k_tile": 7, "fixed": 7}}
    package.table(entry)  # data for the host only: nothing
    lines = package.build("sm_80", "sm_90a")
    assert not any(line.startswith("[") for line in lines), lines
    assert package.manifest()["kernels"][0]["cost"] == {"k_tile": 7, "fixed": 7}

    package.table({"name": "k_one"}, {"name": "k_two", "defines": {"X": 1}})  # one kernel
    assert sum(line.startswith("[") for line in package.build("sm_80", "sm_90a")) == 2

    package.table({"name": "k_one"})  # what is gone from the table goes from the package
    package.build("sm_90a")
    assert set(package.files()) == {"manifest.json", "sm_90a/k_one.cubin"}


def test_package_leaves_out_other_archs(package: Package) -> None:
    package.table({"name": "k", "archs": ["sm_90a"]}, {"name": "l"})
    package.build("sm_80", "sm_90a")
    found = [(entry["name"], entry["arch"]) for entry in package.manifest()["kernels"]]
    assert found == [("k", "sm_90a"), ("l", "sm_80"), ("l", "sm_90a")]


@pytest.mark.parametrize(
    ("entry", "source", "says"),
    [
        ({}, "int y = nonsense;\n", r"\[image\]: kernel 'k' does not compile: got \n.*nonsense"),
        (
            {},
            'extern "C" __global__ void TC_KERNEL(int* a, int n) { a[n] = n; }\n',
            r"\[params\]: kernel 'k' for sm_80 has other parameters.*256 bytes",
        ),
        ({"dynamic_shared": 200000}, SOURCE, r"\[image\]: kernel 'k' for sm_80 needs too much"),
        (
            {"block": [512, 1, 1]},
            # 32 registers are too few for 64 values that live across the whole kernel.
            '#include "matmul_params.h"\n'
            'extern "C" __global__ void __launch_bounds__(1024, 2)\n'
            "TC_KERNEL(const __grid_constant__ torch_cubin::MatmulParams p) {\n"
            "  volatile float* a = static_cast<float*>(p.c); float v[64];\n"
            "#pragma unroll\n"
            "  for (int i = 0; i < 64; ++i) v[i] = a[i];\n"
            "#pragma unroll\n"
            "  for (int i = 0; i < 64; ++i) a[i * 7] = v[63 - i];\n"
            "}\n",
            r"\[image\]: kernel 'k' for sm_80 spills registers: expected at most 0 bytes, got \d+",
        ),
    ],
)
def test_package_failures(package: Package, entry: dict, source: str, says: str) -> None:
    package.table({"name": "k", **entry}, source=source)
    for _ in range(2):  # a cubin in the cache is no less wrong
        with pytest.raises(BuildError, match="(?s)" + says):
            package.build("sm_80")
        assert not (package.out / "manifest.json").exists()


def test_command_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(KERNELS / "build.py"), "--archs", "sm_9", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("torch_cubin [arch]: architecture 'sm_9'")
    done = subprocess.run(
        [sys.executable, str(KERNELS / "toolkit.py"), "--requirements"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == list(toolkit.REQUIREMENTS)
