"""parse_cubin on real cubins: every fact, of both ELF layouts and of every arch."""

from __future__ import annotations

import json
from pathlib import Path

import cubin_check
import pytest
import real_cubins
from real_cubins import ARCHS, DATA

needs_nvcc = pytest.mark.skipif(real_cubins.nvcc() is None, reason="needs nvcc, found none")


def kernel(params: list[tuple[int, int, str]], cpp_types: tuple = (), **facts: object) -> dict:
    """A kernel as image_to_json writes it; params are (offset, size, kind)."""
    types = cpp_types or ("",) * len(params)
    return {
        "params": [
            {"index": i, "offset": offset, "size": size, "kind": kind, "cpp_type": types[i]}
            for i, (offset, size, kind) in enumerate(params)
        ],
        "param_bytes": params[-1][0] + params[-1][1] if params else 0,
        "static_shared": 0,
        "stack": 0,
        "barriers": 0,
        "required_block": None,
        "max_block": None,
        "cluster": None,
        "uses_dynamic_shared": False,
        "grid_in_clusters": False,
        "cpp_name": "",
        **facts,
    }


U, P, V = "unknown", "pointer", "value"
VEC_ADD = [(0, 8, U), (8, 8, U), (16, 8, U), (24, 4, V)]
LARGE = [(0, 4500, V), (4504, 8, P), (4512, 8, U), (4520, 8, P)]
SPACES = [(0, 8, P), (8, 8, P), (16, 8, U), (24, 4, V)]

# file: (arch, layout, toolkit, kernels)
EXPECTED = {
    "vec_add.sm_80.cuda118": ("sm_80", 7, "11.8", {"vec_add": kernel(VEC_ADD, registers=12)}),
    "vec_add.sm_90a.cuda124": ("sm_90a", 7, "12.4", {"vec_add": kernel(VEC_ADD, registers=12)}),
    "vec_add.sm_120a.cuda130": (
        "sm_120a",
        8,
        "13.0",
        {"vec_add": kernel([(0, 8, P), (8, 8, P), (16, 8, P), (24, 4, V)], registers=12)},
    ),
    "pointers.sm_90.cuda124": (
        "sm_90",
        7,
        "12.4",
        {
            "large": kernel(LARGE, registers=4, max_block=[256, 2, 1]),
            "spaces": kernel([*SPACES, (48, 128, V)], registers=4, required_block=[128, 1, 1]),
        },
    ),
    "pointers.sm_100f.cuda129": (
        "sm_100f",
        8,
        "12.9",
        {
            "large": kernel(LARGE, registers=4, max_block=[256, 2, 1]),
            "spaces": kernel([*SPACES, (64, 128, V)], registers=4, required_block=[128, 1, 1]),
        },
    ),
    "launch.sm_90a.cuda130": (
        "sm_90a",
        8,
        "13.0",
        {
            "cluster_of_two": kernel([(0, 8, U)], registers=10, cluster=[2, 1, 1]),
            "cluster_ranks": kernel([(0, 8, U)], registers=10, barriers=1),
            "echo": kernel(
                [
                    *((0, 1, V), (1, 1, V), (2, 1, V), (4, 2, V), (6, 2, V), (8, 4, V)),
                    *((12, 4, V), (16, 4, V), (24, 8, U), (32, 8, U), (40, 8, U), (48, 8, U)),
                ],
                registers=20,
            ),
            "grid_sum": kernel([(0, 8, U), (8, 8, U), (16, 8, U)], registers=18),
            "reverse": kernel(
                [(0, 8, U), (8, 8, U), (16, 4, V)],
                registers=14,
                barriers=1,
                uses_dynamic_shared=True,
            ),
            "scale": kernel([(0, 24, V), (24, 8, U), (32, 8, U), (40, 4, V)], registers=12),
            # As above: the descriptor stands first, and not at 0.
            "tma_box": kernel(
                [(48, 128, V), (176, 4, V), (180, 4, V), (184, 4, V), (192, 8, U)],
                registers=12,
                static_shared=4112,
                barriers=1,
            ),
            "use_globals": kernel([(0, 8, U)], registers=14),
            "vec_add": kernel(VEC_ADD, registers=12),
            "wait_and_write": kernel([(0, 8, U), (8, 8, U), (16, 4, V)], registers=8),
        },
    ),
    "several.sm_90a.cuda130": (
        "sm_90a",
        8,
        "13.0",
        {
            "_Z4fillIiEvPT_S0_": kernel(
                [(0, 8, P), (8, 4, V)],
                cpp_types=("int*", "int"),
                cpp_name="void fill<int>(int*, int)",
                registers=8,
            ),
            "cluster": kernel([(0, 8, U)], registers=8, cluster=[2, 1, 1]),
            "no_params": kernel([], registers=4),
            "small": kernel(
                [(0, 1, V), (1, 1, V), (2, 2, V), (8, 8, U), (16, 1, V), (24, 8, U)], registers=8
            ),
            "stack": kernel([(0, 8, U), (8, 4, V)], registers=32, stack=1200),
            "static_shared": kernel(
                [(0, 8, U)], registers=12, static_shared=1024, barriers=1, max_block=[128, 1, 1]
            ),
            # The alignas(64) struct: aligned from bank 0, where sm_90 puts parameters at 0x210.
            "structs": kernel([(0, 4, V), (4, 12, V), (48, 128, V), (176, 8, U)], registers=8),
            "vec_add": kernel(VEC_ADD, registers=12),
        },
    ),
    "declared.sm_90a.cuda130": (
        "sm_90a",
        8,
        "13.0",
        {
            "add_three": kernel(
                [(0, 8, U), (8, 8, U), (16, 8, U), (24, 8, U), (32, 4, V)], registers=14
            ),
            "add_two": kernel(VEC_ADD, registers=12),
            "affine": kernel(
                [
                    *((0, 8, U), (8, 8, U), (16, 8, U), (24, 4, V)),
                    *((28, 4, V), (32, 1, V), (36, 4, V), (40, 4, V)),
                ],
                registers=11,
            ),
            "axpy": kernel([(0, 4, V), (8, 8, U), (16, 8, U), (24, 4, V)], registers=10),
            "copy_16": kernel([(0, 8, U), (8, 8, U), (16, 8, U)], registers=8),
            "copy_32": kernel([(0, 8, U), (8, 8, U), (16, 8, U)], registers=8),
            "cube": kernel([(0, 8, U), (8, 8, U), (16, 4, V)], registers=10),
            "cube_backward": kernel(VEC_ADD, registers=12),
            "fill_64": kernel(  # __block_size__ names a cluster as well
                [(0, 8, U), (8, 4, V)],
                registers=8,
                required_block=[64, 1, 1],
                cluster=[1, 1, 1],
                grid_in_clusters=True,
            ),
            "repeat_columns": kernel([(0, 8, U), (8, 8, U), (16, 4, V), (20, 4, V)], registers=22),
            "row_limits": kernel(
                [(0, 8, U), (8, 8, U), (16, 8, U), (24, 8, U), (32, 4, V), (36, 4, V)],
                registers=31,
            ),
            "sum_through": kernel(VEC_ADD, registers=31, barriers=1),
        },
    ),
}


VARIABLES = {"launch.sm_90a.cuda130": {"counter": 4, "table": 16}}


def test_parse_cubin_lists_every_committed_file() -> None:
    assert {path.stem for path in real_cubins.COMMITTED} == set(EXPECTED)


@pytest.mark.fault_case(16)
@pytest.mark.parametrize("stem", EXPECTED)
def test_parse_cubin_reads_committed(stem: str) -> None:
    path = DATA / f"{stem}.cubin"
    facts = cubin_check.facts(path)
    arch, layout, toolkit, kernels = EXPECTED[stem]
    found = {entry.pop("name"): entry for entry in facts.pop("kernels")}
    assert found == kernels
    variables = {entry["name"]: entry["size"] for entry in facts.pop("variables")}
    assert variables == VARIABLES.get(stem, {})
    assert facts == {
        "kind": "cubin",
        "arch": arch,
        "sm": int(arch[3:].rstrip("af")),
        "abi_version": layout,
        "toolkit": toolkit,
        "size": path.stat().st_size,
    }


def bank_base(sm: int) -> int:
    """Where parameters start in constant bank 0; alignment beyond 16 counts from the bank."""
    return 0x160 if sm < 90 else 0x210 if sm < 100 else 0x380


def aligned(offset: int, alignment: int, base: int) -> int:
    return -(-(offset + base) // alignment) * alignment - base


@needs_nvcc
@pytest.mark.parametrize("arch", ARCHS)
def test_parse_cubin_reads_what_nvcc_writes(arch: str) -> None:
    path, log = real_cubins.compiled()[arch]
    facts = cubin_check.facts(path)
    assert (facts["arch"], facts["abi_version"]) == (arch, 8), path
    kernels = {entry["name"]: entry for entry in facts["kernels"]}
    sm = facts["sm"]
    p = "pointer" if sm >= 100 else "unknown"  # nvcc 13 records `.ptr` from there on

    def params(name: str) -> list[tuple[int, int, str]]:
        return [(q["offset"], q["size"], q["kind"]) for q in kernels[name]["params"]]

    descriptor = aligned(16, 64, bank_base(sm))
    assert params("vec_add") == [(0, 8, p), (8, 8, p), (16, 8, p), (24, 4, "value")]
    assert params("structs") == [
        (0, 4, "value"),
        (4, 12, "value"),
        (descriptor, 128, "value"),
        (descriptor + 128, 8, p),
    ]
    assert [q[:2] for q in params("small")] == [(0, 1), (1, 1), (2, 2), (8, 8), (16, 1), (24, 8)]
    assert params("large") == [(0, 4200, "value"), (4200, 8, p), (4208, 4, "value")]
    assert params("no_params") == []
    assert params("_Z4fillIiEvPT_S0_") == [(0, 8, "pointer"), (8, 4, "value")]  # its name says so
    for name, entry in kernels.items():
        assert entry["param_bytes"] == max((o + s for o, s, _ in params(name)), default=0), name
        assert entry["max_block"] == ([128, 1, 1] if name == "static_shared" else None), name
        assert entry["cluster"] == ([2, 1, 1] if name == "cluster" else None), name
        assert entry["required_block"] is None, name

    usage = real_cubins.ptxas_usage(log)
    assert set(kernels) == set(usage)
    assert ("cluster" in kernels) == (sm >= 90)
    for name, used in usage.items():
        entry = kernels[name]
        assert entry["registers"] == used["registers"], name
        assert entry["barriers"] == used["barriers"], name
        assert entry["static_shared"] == used["smem"], name
        assert entry["stack"] == used["stack"], name


@needs_nvcc
def test_parse_cubin_detects_dynamic_shared_memory_of_a_lone_kernel(tmp_path: Path) -> None:
    """A lone kernel whose shared memory is all dynamic is distinguished from one without, or with
    both."""
    import subprocess

    bodies = {
        "dynamic": "extern __shared__ int s[]; s[*o] = 1; __syncthreads(); *o = s[2];",
        "both": "extern __shared__ int s[]; __shared__ int t[12]; t[*o] = s[*o] = 1; "
        "__syncthreads(); *o = s[2] + t[3];",
        "none": "*o = 1;",
    }
    for arch in ("sm_80", "sm_90", "sm_100a"):
        for name, body in bodies.items():
            source, out = tmp_path / "k.cu", tmp_path / f"{name}.{arch}.cubin"
            source.write_text(f'extern "C" __global__ void k(int* o) {{ {body} }}\n')
            command = [real_cubins.nvcc(), "-cubin", f"-arch={arch}", source, "-o", out]
            subprocess.run(command, check=True, capture_output=True)
            entry = cubin_check.facts(out)["kernels"][0]
            assert entry["uses_dynamic_shared"] == (name == "dynamic"), (arch, name)
            assert entry["static_shared"] == (48 if name == "both" else 0), (arch, name)


SHARED = """\
extern __shared__ float dyn[];
#define KERNEL(name) extern "C" __global__ void name(float* o, unsigned n)
KERNEL(none) { o[threadIdx.x] = 1.f; }
KERNEL(fixed) { __shared__ float s[256]; s[n] = *o; __syncthreads(); *o = s[n ^ 1]; }
KERNEL(both) { __shared__ float s[256]; s[n] = dyn[n] = *o; __syncthreads(); *o = s[3] + dyn[5]; }
KERNEL(load_store) { dyn[n] = *o; __syncthreads(); *o = dyn[n ^ 1]; }
KERNEL(adds) { atomicAdd(&dyn[n], 1.f); }
__device__ __noinline__ float helper(unsigned i) { return dyn[i]; }
KERNEL(calls) { *o = helper(n); }
KERNEL(matrix) {
  unsigned r, at = static_cast<unsigned>(__cvta_generic_to_shared(dyn));
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(at + n));
  *o = r;
}
#if __CUDA_ARCH__ >= 800
KERNEL(copies) {
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(dyn));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at + n), "l"(o));
}
#endif
#if __CUDA_ARCH__ >= 900
KERNEL(tma) {
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(dyn));
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %1}], [%2];"
               ::"l"(o), "r"(0), "r"(at + n));
}
KERNEL(barrier) {
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(dyn));
  asm volatile("mbarrier.init.shared.b64 [%0], 32;" ::"r"(at + n));
}
#endif
"""


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_parse_cubin_detects_dynamic_shared_memory_among_many_kernels(
    tmp_path: Path, arch: str
) -> None:
    """In a file of many kernels the code tells: shared memory is used, and none is reserved."""
    import subprocess

    source, out = tmp_path / "k.cu", tmp_path / "k.cubin"
    source.write_text(SHARED)
    command = [real_cubins.nvcc(), "-cubin", f"-arch={arch}", source, "-o", out]
    subprocess.run(command, check=True, capture_output=True)
    kernels = {entry["name"]: entry for entry in cubin_check.facts(out)["kernels"]}
    newer = {"sm_75": 0, "sm_80": 1, "sm_89": 1}  # kernels of what only newer archs have
    assert len(kernels) == 7 + newer.get(arch, 3)
    for name, entry in kernels.items():
        uses = name not in ("none", "fixed", "both")
        assert entry["uses_dynamic_shared"] == uses, name
        assert entry["static_shared"] == (1024 if name in ("fixed", "both") else 0), name


FENCES = """\
#define KERNEL(name) extern "C" __global__ void name(int* o)
KERNEL(gpu) { *o = 1; asm volatile("fence.acq_rel.gpu;" ::: "memory"); o[1] = 2; }
KERNEL(release) { asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(o) : "memory"); }
KERNEL(none) { *o = 1; }
"""


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_loads_that_never_run_are_no_use_of_shared_memory(tmp_path: Path, arch: str) -> None:
    """With -G, the assembler puts LDS instructions that are never executed before fences."""
    import subprocess

    source, out = tmp_path / "k.cu", tmp_path / "k.cubin"
    source.write_text(FENCES)
    command = [real_cubins.nvcc(), "-cubin", "-G", f"-arch={arch}", source, "-o", out]
    subprocess.run(command, check=True, capture_output=True)
    kernels = {entry["name"]: entry for entry in cubin_check.facts(out)["kernels"]}
    assert sorted(kernels) == ["gpu", "none", "release"]
    for name, entry in kernels.items():
        assert not entry["uses_dynamic_shared"], name


RUNS_ON = {
    "sm_75": {75},
    "sm_80": {80, 86, 87, 89},
    "sm_86": {86, 87, 89},
    "sm_90": {90},
    "sm_90a": {90},
    "sm_100": {100, 101, 103},
    "sm_100a": {100},
    "sm_100f": {100, 103},
    "sm_101f": {101},
    "sm_103a": {103},
    "sm_103f": {103},
    "sm_110f": {110},
    "sm_120": {120, 121},
    "sm_120a": {120},
    "sm_120f": {120, 121},
    "sm_121a": {121},
}


@pytest.mark.fault_case(13)
def test_arch_runs_on() -> None:
    devices = (70, 75, 80, 86, 87, 89, 90, 100, 101, 103, 110, 120, 121)
    for arch, wanted in RUNS_ON.items():
        number = arch[3:].rstrip("af")
        suffix = arch[3 + len(number) :] or "-"
        answers = cubin_check.run(*[("runs_on", number, suffix, device) for device in devices])
        found = {device for device, answer in zip(devices, answers, strict=True) if answer == "1"}
        assert found == wanted, arch


@pytest.mark.fault_case(15)
@pytest.mark.parametrize(
    ("wanted", "nearest"),
    [
        ("vec_ad", "vec_add"),
        ("VEC_ADD", "vec_add"),
        ("fill", "_Z4fillIiEvPT_S0_"),
        ("statik_shared", "static_shared"),
        ("", None),
        ("x" * 70000, None),
    ],
)
def test_kernel_lookup_names_the_nearest(wanted: str, nearest: str | None) -> None:
    path = DATA / "several.sm_90a.cuda130.cubin"
    error = json.loads(cubin_check.run(("lookup", path, wanted))[0])["error"]
    assert error["tag"] == "no_kernel"
    assert len(error["message"]) < 1000
    if nearest is not None:
        assert error["message"].split("expected ")[1].startswith(f"'{nearest}'"), error


def test_kernel_lookup_finds_each() -> None:
    path = DATA / "several.sm_90a.cuda130.cubin"
    names = list(EXPECTED[path.stem][3])
    assert cubin_check.run(*[("lookup", path, name) for name in names]) == names
