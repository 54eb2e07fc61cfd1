"""csrc/kernels/build/build.py: architectures, the toolkit, and whole packages from tiny kernels.

Over 500 lines, because all sections share the tiny kernels and their builds.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import cubin_check
import pytest
from kernel_sources import (
    KERNELS,
    BuildError,
    build,
    cubin_facts,
    kernel_cache,
    kernel_table,
    table,
    toolkit,
)


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


# --- whole packages -------------------------------------------------------------------------------

SOURCE = """\
#include "matmul_params.h"
#include "common/scale.cuh"
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
        for name in ("common", "matmul"):
            (self.sources / name).mkdir(parents=True)
        shutil.copy(KERNELS / "matmul" / "matmul_params.h", self.sources / "matmul")
        self.header("2.0f")
        self.table({"name": "k_{n}", "for": {"n": ["one", "two"]}})

    def header(self, factor: str) -> None:
        text = f"#pragma once\n__device__ float scale(float x) {{ return x * {factor}; }}\n"
        (self.sources / "common" / "scale.cuh").write_text(text)

    def table(self, *entries: dict, source: str = SOURCE) -> None:
        (self.sources / "matmul" / "simt.cu").write_text(source + table(*entries))

    def build(self, *archs: str, jobs: int = 2, other=None) -> list[str]:
        lines: list[str] = []
        folders = (self.sources, self.cache)
        build.build_package(self.out, archs, jobs, lines.append, *folders, self.tools, other)
        return lines

    def files(self) -> dict[str, bytes]:
        found = (path for path in self.out.rglob("*") if path.is_file())
        return {str(path.relative_to(self.out)): path.read_bytes() for path in found}

    def manifest(self) -> dict:
        return json.loads((self.out / "manifest.json").read_text())


@pytest.fixture
def package(tmp_path: Path, tools: toolkit.Toolkit) -> Package:
    return Package(tmp_path / "a", tools)


# Of each family, kernels with products on tensor cores and without.
SAMPLES = (
    "mma_matmul_bf16_nt_64x64x64",
    "dot_matmul_f32_nt_4x4",
    "mma_attention_f16_full_64x32x256",
)


@pytest.mark.parametrize("name", SAMPLES)
def test_sm_89_runs_the_code_of_sm_86(name: str, tools: toolkit.Toolkit, tmp_path) -> None:
    """This is why a complete wheel has no sm_89: sm_86's kernels serve it."""
    (kernel,) = [k for k in kernel_table.read_tables(KERNELS) if k.name == name]
    builder = build.Builder(tools, KERNELS)
    with kernel_cache.locked(build.ROOT / builder.cache):
        builder.compile([kernel], "80")
    code = {}
    for arch in ("sm_86", "sm_89", "sm_80"):
        ptx, cubin = builder.ptx_path(kernel, "80"), tmp_path / arch
        build.run([tools.ptxas, *build.PTXAS_FLAGS, f"-arch={arch}", "-o", cubin, ptx], name)
        code[arch] = cubin_facts.sections(cubin.read_bytes())[f".text.{name}"]
    assert code["sm_86"] == code["sm_89"]
    assert code["sm_86"] != code["sm_80"]
    own, other = (cubin_facts.limits_of(arch) for arch in ("sm_89", "sm_86"))
    assert dataclasses.replace(own, blocks=other.blocks) == other


@pytest.mark.parametrize(("arch", "which"), [("sm_80", 0), ("sm_120a", -1)])
def test_a_sample_is_built_for_an_older_and_a_newer_arch(
    arch: str, which: int, tools: toolkit.Toolkit
) -> None:
    """Of each source and kind of kernel one, with all of a build's checks; `make test` builds the
    package for one architecture, because each takes minutes."""
    kinds: dict[tuple[Path, str], list[kernel_table.Kernel]] = {}
    for kernel in kernel_table.read_tables(KERNELS):
        if kernel.archs is None or arch in kernel.archs:
            kinds.setdefault((kernel.source, kernel.fields["kind"]), []).append(kernel)
    jobs = [(kernels[which], arch) for kernels in kinds.values()]
    builder = build.Builder(tools, KERNELS)
    with kernel_cache.locked(build.ROOT / builder.cache):
        entries = builder.build(jobs, 1, print)
    assert [entry["name"] for entry in entries] == [kernel.name for kernel, _ in jobs]
    assert len({kernel.source for kernel, _ in jobs}) >= 18


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
        header = package.sources / "matmul" / "matmul_params.h"
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


TMA_HEADER = """\
#pragma once
#include <cuda.h>
namespace torch_cubin {
struct TmaParams {
  CUtensorMap a;
  void* c;
  unsigned n, rows;
};
}  // namespace torch_cubin
"""
TMA_SOURCE = """\
#include "matmul/tma_params.h"
extern "C" __global__ void TC_KERNEL(const __grid_constant__ torch_cubin::TmaParams p) {
  __shared__ alignas(128) float tile[64];
  __shared__ alignas(8) unsigned long long barrier;
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  const unsigned bar = static_cast<unsigned>(__cvta_generic_to_shared(&barrier));
  asm volatile("prefetch.tensormap [%0];" ::"l"(&p.a) : "memory");
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar) : "memory");
  BEFORE
  asm volatile(
      "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%0],"
      " [%1, {%2}], [%3];" ::"r"(at), "l"(&p.a), "r"(0), "r"(bar) : "memory");
  AFTER
  static_cast<float*>(p.c)[threadIdx.x] = tile[threadIdx.x] * p.n;
}
"""


@pytest.mark.parametrize("waits", ["before", "after"])
def test_a_kernel_that_reads_by_tma(package: Package, waits: str) -> None:
    """Its struct holds a tensor map, aligned as only the compiler knows, and it must wait first."""
    wait = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
    source = TMA_SOURCE.replace(waits.upper(), wait)
    source = source.replace("BEFORE", "").replace("AFTER", "")
    family = package.sources / "matmul"
    (family / "tma_params.h").write_text(TMA_HEADER)
    (family / "tma.cu").write_text(source + table({"name": "tma"}, virtual_arch=[90]))
    if waits == "after":
        with pytest.raises(
            BuildError, match=r"'tma' for sm_90a does not wait.*cp\.async\.bulk\.ten"
        ):
            package.build("sm_90a")
        return
    package.build("sm_90a")
    (entry,) = [kernel for kernel in package.manifest()["kernels"] if kernel["name"] == "tma"]
    assert [param["size"] for param in entry["params"]] == [256]


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

    package.table({"name": "k_one"})  # kernels removed from the table are removed from the package
    package.build("sm_90a")
    assert set(package.files()) == {"manifest.json", "sm_90a/k_one.cubin"}


def test_a_changed_comment_assembles_nothing(package: Package) -> None:
    def assembled() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in package.cache.glob("sm_*/*.cubin")}

    package.table({"name": "k"})
    package.build("sm_80", "sm_90a")
    before, files = assembled(), package.files()
    package.header("/* twice */ 2.0f")
    package.build("sm_80", "sm_90a")
    assert (assembled(), package.files()) == (before, files)
    package.header("3.0f")
    package.build("sm_80", "sm_90a")
    assert all(assembled()[name] > time for name, time in before.items())


TOGETHER = """\
#include "matmul_params.h"
#include "common/scale.cuh"
namespace torch_cubin::TC_KERNEL {
constexpr int kTileM = TC_TILE_M;
extern "C" __global__ void TC_KERNEL(const __grid_constant__ MatmulParams p) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  extern __shared__ float all[];
  __shared__ float some[kTileM];
  auto c = static_cast<float*>(p.c);
  some[threadIdx.x % kTileM] = all[threadIdx.x] = scale(c[threadIdx.x]);
  __syncthreads();
  for (int i = 0; i < p.n; ++i) c[i] = some[(threadIdx.x + i) % kTileM] + all[i];
}
}
"""


def test_kernels_compiled_together_are_those_compiled_alone(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Package(tmp_path / "alone", package.tools)
    entries = [
        {
            "name": f"k_{m}",
            "tile": [m, 64, 8],
            "dynamic_shared": 256,
        }
        for m in (16, 32, 64)
    ]
    compiled = []
    run = build.run

    def counting(command: list, what: str) -> str:
        compiled.append(command[0] == package.tools.nvcc)
        return run(command, what)

    monkeypatch.setattr(build, "run", counting)
    package.table(*entries, source=TOGETHER)
    package.build("sm_80", "sm_90a")
    assert sum(compiled) == 3  # of compute_80 and compute_90, and the size of the parameters
    monkeypatch.setattr(build, "TOGETHER", 1)
    alone.table(*entries, source=TOGETHER)
    alone.build("sm_80", "sm_90a")
    assert sum(compiled) == 3 + 7
    assert package.files() == alone.files()


def test_sources_of_one_header_share_compilers() -> None:
    """Those of another one may declare other things by the same name."""
    jobs = [
        (kernel, "sm_90a")
        for kernel in kernel_table.read_tables(KERNELS)
        if kernel.archs is None or "sm_90a" in kernel.archs
    ]
    batches = build.batches_of(jobs)
    compiled = [(kernel, virtual) for virtual, kernels in batches for kernel in kernels]
    assert sorted((kernel.name, virtual) for kernel, virtual in compiled) == sorted(
        (kernel.name, kernel.virtual_arch(arch)) for kernel, arch in jobs
    )
    headers = [{kernel_table.params_header(k.source) for k in kernels} for _, kernels in batches]
    assert all(len(of_batch) == 1 for of_batch in headers)
    sizes = collections.Counter(
        (kernel_table.params_header(kernel.source), virtual) for kernel, virtual in compiled
    )
    assert len(batches) == sum(-(-count // build.TOGETHER) for count in sizes.values())


def test_a_failure_among_kernels_compiled_together_names_its_kernel(package: Package) -> None:
    entries = [{"name": "k_one"}, {"name": "k_two", "defines": {"WRONG": 1}}, {"name": "k_three"}]
    package.table(*entries, source="#ifdef WRONG\nint x = nonsense;\n#endif\n" + SOURCE)
    with pytest.raises(BuildError, match=r"(?s)kernel 'k_two' does not compile.*nonsense"):
        package.build("sm_80")


def test_kernels_that_compile_only_one_by_one_are_refused(package: Package) -> None:
    package.table({"name": "k_one"}, {"name": "k_two"}, source="const int twice = 2;\n" + SOURCE)
    says = r"(?s)kernels of 'matmul/simt.cu' compile one by one but not together.*twice"
    with pytest.raises(BuildError, match=says):
        package.build("sm_80")


@pytest.mark.parametrize("jobs", [1, 2, 4])
def test_other_work_is_done_beside_the_kernels(package: Package, jobs: int) -> None:
    """On half of the compilers; on all of them, where every cubin is up to date."""
    given = []
    lines = package.build("sm_80", "sm_90a", jobs=jobs, other=given.append)
    assert lines[-2].startswith("[4/4] ")
    assert given == [max(1, jobs // 2)]
    lines = package.build("sm_80", "sm_90a", jobs=jobs, other=given.append)
    assert lines[1] == "4 of 4 cubins are up to date"
    assert given[1:] == [jobs]


def test_the_first_error_ends_kernels_and_other_work(package: Package) -> None:
    def fails(compilers: int) -> None:
        raise RuntimeError("the C++ does not compile")

    def runs(compilers: int) -> None:
        ran.append(compilers)

    package.table({"name": "k_{n}", "for": {"n": list("abcdefghijklmnopqrstuvwx")}})
    with pytest.raises(RuntimeError, match=r"the C\+\+ does not compile"):
        package.build("sm_80", jobs=1, other=fails)
    cubins = list(package.cache.glob("sm_80/*.cubin"))
    assert 0 < len(cubins) < 24, "the kernels ahead of it are there, those behind it are not"
    assert not (package.out / "manifest.json").exists()

    ran: list[int] = []
    package.header("no C++")
    with pytest.raises(BuildError, match="does not compile"):
        package.build("sm_80", jobs=4, other=runs)
    assert not ran, "nothing else is compiled with a CUDA compiler that does not work"


def test_a_build_ends_whichever_worker_takes_the_last_item(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other work is withdrawn, and before what waits for it is, a worker begins that."""
    shutdown = concurrent.futures.ThreadPoolExecutor.shutdown

    def withdraw(pool, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while cancel_futures and not pool._work_queue.empty():
            item = pool._work_queue.get_nowait()
            item.future.cancel()
            if "run_other" in str(item.fn):
                time.sleep(0.5)
                break
        shutdown(pool, wait, cancel_futures=cancel_futures)

    def assemble(builder, kernel, arch: str) -> None:
        if kernel.name == "k_a":
            raise BuildError("input", "k_a", "fails")
        time.sleep(0.2)

    monkeypatch.setattr(concurrent.futures.ThreadPoolExecutor, "shutdown", withdraw)
    monkeypatch.setattr(build.Builder, "compile", lambda *arguments: None)
    monkeypatch.setattr(build.Builder, "assemble", assemble)
    monkeypatch.setattr(build.Builder, "entry", lambda *arguments: {})
    package.table({"name": "k_{n}", "for": {"n": list("abcdefghijklmnopqrstuvwx")}})
    errors: list[BuildError] = []

    def run() -> None:
        with pytest.raises(BuildError, match="k_a") as error:
            package.build("sm_80", jobs=4, other=lambda compilers: None)
        errors.append(error.value)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert errors


def test_a_worktree_reuses_kernels_of_its_main_checkout(tmp_path: Path) -> None:
    main, tree = tmp_path / "main", tmp_path / "tree"
    git = main / ".git" / "worktrees" / "tree"
    for folder in (git, tree, main / "build" / "kernels" / "sm_80"):
        folder.mkdir(parents=True)
    (git / "commondir").write_text("../..\n")
    assert kernel_cache.main_checkout(tree) is None
    (tree / ".git").write_text(f"gitdir: {git}\n")
    assert kernel_cache.main_checkout(tree) == main
    assert kernel_cache.main_checkout(main) is None

    cache = kernel_cache.Cache(tree, shares=True)
    output = Path("build") / "kernels" / "sm_80" / "k.cubin"
    (main / output).write_bytes(b"cubin")
    (main / output.with_suffix(".log")).write_text("log")
    assert not cache.fresh(output, "key")  # no key: unfinished
    (main / output.with_suffix(".key")).write_text(kernel_cache.stamp(main / output, "key"))
    assert not cache.fresh(output, "another key")
    assert cache.fresh(output, "key")
    names = sorted(path.name for path in (tree / output).parent.iterdir())
    assert names == ["k.cubin", "k.key", "k.log"]
    assert (tree / output).read_bytes() == b"cubin"


def test_a_file_of_another_cache_is_stale(tmp_path: Path) -> None:
    cache = kernel_cache.Cache(tmp_path, shares=False)
    output = Path("k.cubin")
    (tmp_path / output).write_bytes(b"cubin")
    cache.finish(output, "key")
    assert cache.fresh(output, "key")
    (tmp_path / output).write_bytes(b"older")
    assert not cache.fresh(output, "key")


def test_a_file_whose_build_was_interrupted_is_stale(tmp_path: Path) -> None:
    """Its log, written after it, may be that of an earlier build."""
    cache = kernel_cache.Cache(tmp_path, shares=False)
    output = Path("sm_80") / "k.cubin"
    cache.begin(output)
    (tmp_path / output).write_bytes(b"cubin")
    cache.finish(output, "key")
    assert cache.fresh(output, "key")
    cache.begin(output)
    assert not cache.fresh(output, "key")


def test_package_skips_other_archs(package: Package) -> None:
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
    program = KERNELS / "build" / "build.py"
    done = subprocess.run(
        [sys.executable, str(program), "--archs", "sm_9", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("torch_cubin [arch]: architecture 'sm_9'")
    done = subprocess.run(
        [sys.executable, str(KERNELS / "build" / "toolkit.py"), "--requirements"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == list(toolkit.REQUIREMENTS)
