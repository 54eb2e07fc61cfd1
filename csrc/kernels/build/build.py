"""Builds csrc/kernels to the kernel package: a cubin per kernel and arch, and a manifest.

    python csrc/kernels/build/build.py --out torch_cubin/cubins [--archs sm_80,sm_90a] [--jobs N]

setup.py calls `build_package()`. Needs a CUDA compiler (toolkit.py finds it), no torch and no GPU.
A kernel is compiled to PTX once per virtual architecture and assembled once per architecture. Both
are cached in build/kernels/ (kernel_cache.py) by the hash of their inputs: the sources for PTX,
the PTX for a cubin.
So a changed comment reassembles nothing.
The package is reproducible: the same sources and compiler give the same bytes, whatever the path of
the checkout. The manifest is written last, atomically.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
SOURCES = HERE.parent
ROOT = SOURCES.parent.parent
sys.path.insert(0, str(HERE))  # setup.py loads this file by its path

import cubin_facts  # noqa: E402
import kernel_table  # noqa: E402
import ptx_modules  # noqa: E402
import toolkit as cuda_toolkit  # noqa: E402
from kernel_cache import Cache, locked, replace_file  # noqa: E402
from toolkit import BuildError, Toolkit  # noqa: E402

# The architectures of a release wheel. GPUs of compute capability 8.9 run sm_86's cubins: ptxas
# generates the same instructions for both, and no kernel reaches the limit in which they differ.
DEFAULT_ARCHS = ("sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120a")
CACHE = pathlib.Path("build") / "kernels"  # relative: commands run in the root, see `run`
NVCC_FLAGS = ("-ptx", "-O3", "-Werror", "all-warnings")
PTXAS_FLAGS = ("-O3", "-v")
# glibc's heap in pages of 2 MB: ptxas takes a seventh less time (nvcc does not), most of all on a
# virtual machine.
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
TOGETHER = 16  # kernels per nvcc process: see ptx_modules.py
PROBE_ARCH = "80"  # sizes are the same on every arch
MANIFEST_VERSION = 1

Log = Callable[[str], None]
# Other work that runs in parallel; its argument is the number of compilers it may run at a time.
OtherWork = Callable[[int], object]


def run(
    command: Sequence[str | pathlib.Path], what: str, variables: Mapping[str, str] | None = None
) -> str:
    """Runs a compiler in the repository's root with relative paths, so that the output does not
    depend on the path of the checkout. Returns what it printed. The user's environment variables
    come before `variables`."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**(variables or {}), **os.environ},
    )
    if done.returncode != 0:
        raise BuildError(
            "image", what, "does not compile", got=f"\n{(done.stdout + done.stderr).strip()}\n"
        )
    return done.stdout + done.stderr


class Builder:
    """Builds the cubins of one package in build/kernels."""

    def __init__(self, tools: Toolkit, sources: pathlib.Path, cache: pathlib.Path = CACHE):
        self.tools = tools
        self.sources = sources
        self.cache = cache
        self.include = os.path.relpath(sources, ROOT)
        self.digests: dict[pathlib.Path, str] = {}
        self.headers: set[pathlib.Path] = set()  # of the kernels' parameters
        self.sizes: dict[pathlib.Path, int] = {}  # bytes of the structs that they declare
        self.sizes_lock = threading.Lock()
        self.files = Cache(ROOT, shares=not cache.is_absolute())

    def ptx_key(self, kernel: kernel_table.Kernel, virtual: str) -> str:
        if kernel.source not in self.digests:
            self.digests[kernel.source] = kernel_table.source_digest(kernel.source)
        macros = json.dumps(kernel.macros(), sort_keys=True)
        flags = " ".join(NVCC_FLAGS)
        return kernel_table.digest(
            self.digests[kernel.source], macros, virtual, flags, self.tools.release
        )

    def cubin_key(self, kernel: kernel_table.Kernel, arch: str) -> str:
        """The cache key of a cubin whose PTX is up to date."""
        ptx = (ROOT / self.ptx_path(kernel, kernel.virtual_arch(arch))).read_bytes()
        return kernel_table.digest(ptx, arch, " ".join(PTXAS_FLAGS), self.tools.release)

    def cubin_fresh(self, kernel: kernel_table.Kernel, arch: str) -> bool:
        virtual = kernel.virtual_arch(arch)
        ptx = self.ptx_path(kernel, virtual)
        if not self.files.fresh(ptx, self.ptx_key(kernel, virtual)):
            return False
        return self.files.fresh(self.cubin_path(kernel, arch), self.cubin_key(kernel, arch))

    def ptx_path(self, kernel: kernel_table.Kernel, virtual: str) -> pathlib.Path:
        return self.cache / f"compute_{virtual}" / f"{kernel.name}.ptx"

    def cubin_path(self, kernel: kernel_table.Kernel, arch: str) -> pathlib.Path:
        return self.cache / arch / f"{kernel.name}.cubin"

    def compile(self, kernels: Sequence[kernel_table.Kernel], virtual: str) -> None:
        """Compiles several kernels to PTX."""
        stale = [
            kernel
            for kernel in kernels
            if not self.files.fresh(self.ptx_path(kernel, virtual), self.ptx_key(kernel, virtual))
        ]
        if not stale:
            return
        try:
            modules = self.compile_together(stale, virtual)
        except BuildError as error:
            for kernel in stale if len(stale) > 1 else ():
                self.compile_together([kernel], virtual)  # so that the error names the kernel
            if len(stale) == 1:
                raise
            sources = dict.fromkeys(kernel_table.name_of(kernel.source) for kernel in stale)
            raise BuildError(
                "image",
                "the kernels of " + ", ".join(f"'{name}'" for name in sources),
                "compile one by one but not together, which takes several times as long",
                expected="all of a file within `namespace torch_cubin::TC_KERNEL`",
                got=f"\n{error}\n",
            ) from None
        for kernel in stale:
            output = self.ptx_path(kernel, virtual)
            self.files.begin(output)
            replace_file(ROOT / output, modules[kernel.name].encode())
            self.files.finish(output, self.ptx_key(kernel, virtual))

    def compile_together(
        self, kernels: Sequence[kernel_table.Kernel], virtual: str
    ) -> dict[str, str]:
        """PTX by kernel."""
        text = ""
        for kernel in kernels:
            macros = kernel.macros()
            text += "".join(f"#define {name} {value}\n" for name, value in macros.items())
            text += f'#include "{kernel_table.name_of(kernel.source)}"\n'
            text += "".join(f"#undef {name}\n" for name in macros)
        what = f"kernel '{kernels[0].name}'"
        if len(kernels) > 1:
            what += f" or one of the {len(kernels) - 1} behind it"
        source = self.cache / f"compute_{virtual}" / f"{kernels[0].name}.together.cu"
        output = source.with_suffix(".out")
        replace_file(ROOT / source, text.encode())
        command = [self.tools.nvcc, *NVCC_FLAGS, f"-arch=compute_{virtual}", "-I", self.include]
        run([*command, "-o", output, source], what)
        modules = ptx_modules.split((ROOT / output).read_text())
        for path in (source, output):
            (ROOT / path).unlink()
        for kernel in kernels:
            if kernel.name not in modules:
                raise BuildError(
                    "image", f"kernel '{kernel.name}'", "is not what its source defines"
                )
        return modules

    def assemble(self, kernel: kernel_table.Kernel, arch: str) -> None:
        """Assembles PTX to a cubin, and keeps ptxas's log."""
        output, key = self.cubin_path(kernel, arch), self.cubin_key(kernel, arch)
        if self.files.fresh(output, key):
            return
        self.files.begin(output)
        ptx = self.ptx_path(kernel, kernel.virtual_arch(arch))
        cubin_facts.check_waits(kernel.name, arch, (ROOT / ptx).read_text())
        command = [self.tools.ptxas, *PTXAS_FLAGS, f"-arch={arch}", "-o", output, ptx]
        log = run(command, f"kernel '{kernel.name}' for {arch}", LARGE_PAGES)
        (ROOT / output.with_suffix(".log")).write_text(log)
        self.files.finish(output, key)

    def params_size(self, header: pathlib.Path) -> int:
        """Bytes of the struct that the header declares, according to the compiler."""
        with self.sizes_lock:
            if header not in self.sizes:
                self.sizes |= self.probe_sizes(sorted(self.headers | {header}))
            return self.sizes[header]

    def probe_sizes(self, headers: Sequence[pathlib.Path]) -> dict[pathlib.Path, int]:
        output = self.cache / "params" / "sizes.ptx"
        probe, flags = cubin_facts.size_probe(headers), " ".join(NVCC_FLAGS)
        digests = map(kernel_table.source_digest, headers)
        key = kernel_table.digest(*digests, probe, flags, self.tools.release)
        if not self.files.fresh(output, key):
            source = output.with_suffix(".cu")
            replace_file(ROOT / source, probe.encode())
            command = [self.tools.nvcc, *NVCC_FLAGS, f"-arch=compute_{PROBE_ARCH}"]
            run([*command, "-I", self.include, "-o", output, source], "a header of parameters")
            self.files.finish(output, key)
        return cubin_facts.probed_sizes((ROOT / output).read_text(), headers)

    def entry(self, kernel: kernel_table.Kernel, arch: str) -> dict[str, Any]:
        """Checks a finished cubin and returns its manifest entry."""
        header = kernel_table.params_header(kernel.source)
        parameter_bytes = self.params_size(header)
        path = ROOT / self.cubin_path(kernel, arch)
        cubin = path.read_bytes()
        facts = cubin_facts.parse_log(path.with_suffix(".log").read_text())
        cubin_facts.check_log(facts, kernel.name, arch, kernel.accepted_spill.get(arch, 0))
        shared = facts.static_shared + kernel.fields["dynamic_shared"]
        cubin_facts.check_shared(kernel.name, arch, shared)
        blocks = cubin_facts.blocks_per_multiprocessor(
            arch, kernel.threads, facts.registers, shared
        )
        params = cubin_facts.read_params(cubin, kernel.name)
        # The offset is not checked: ptxas aligns a struct with a tensor map within the constant
        # bank, not within the parameters (0x70 for sm_90). The driver handles it.
        if [param["size"] for param in params] != [parameter_bytes]:
            raise BuildError(
                "params",
                f"kernel '{kernel.name}' for {arch}",
                "has other parameters than the host passes",
                expected=f"one struct of {parameter_bytes} bytes ({header.name})",
                got=json.dumps(params),
            )
        if blocks < 1:
            raise BuildError(
                "image", f"kernel '{kernel.name}' for {arch}", "fits no multiprocessor"
            )
        return {
            "name": kernel.name,
            "arch": arch,
            "file": f"{arch}/{kernel.name}.cubin",
            "sha256": hashlib.sha256(cubin).hexdigest(),
            "symbol": kernel.name,
            "params": params,
            "params_header": kernel_table.params_key(header),
            "params_digest": kernel_table.params_digest(header),
            **kernel.fields,
            "registers": facts.registers,
            "static_shared": facts.static_shared,
            "spill": facts.spill,
            "blocks_per_multiprocessor": blocks,
        }

    def build(
        self,
        jobs: list[tuple[kernel_table.Kernel, str]],
        workers: int,
        log: Log,
        other: OtherWork | None = None,
    ) -> list[dict[str, Any]]:
        """Rebuilds stale cubins in parallel with `other`; returns the entries in the order of
        `jobs`. The first error is raised once the jobs that have begun are done."""
        self.headers = {kernel_table.params_header(kernel.source) for kernel, _ in jobs}
        stale = [(kernel, arch) for kernel, arch in jobs if not self.cubin_fresh(kernel, arch)]
        if len(stale) < len(jobs):
            log(f"{len(jobs) - len(stale)} of {len(jobs)} cubins are up to date")
        done = 0
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:

            def assemble(kernel: kernel_table.Kernel, arch: str) -> float:
                start = time.monotonic()
                ptx[(kernel.name, kernel.virtual_arch(arch))].result()
                self.assemble(kernel, arch)
                self.entry(kernel, arch)  # runs its checks as early as possible
                return time.monotonic() - start

            # The queue is first in, first out. A cubin is queued behind its PTX, after as many
            # other PTX jobs as there are workers. So no worker waits long, or for a job that cannot
            # start.
            ptx: dict[tuple[str, str], concurrent.futures.Future[None]] = {}
            waiting: dict[concurrent.futures.Future[Any], tuple[kernel_table.Kernel, str] | None]
            waiting = {}

            def queue_cubins(virtual: str, kernels: list[kernel_table.Kernel]) -> None:
                for kernel, arch in stale:
                    if kernel in kernels and kernel.virtual_arch(arch) == virtual:
                        waiting[pool.submit(assemble, kernel, arch)] = (kernel, arch)

            def queue_other(other: OtherWork) -> None:
                first = next(iter(waiting), None)
                places = max(1, workers // 2) if first else workers

                def run_other() -> None:
                    # A broken CUDA compiler fails here, before the other compilers start.
                    if first is not None:
                        first.result()
                    other(places)

                future = pool.submit(run_other)
                waiting[future] = None
                # Idle workers that leave their processors to the other work's compilers.
                # NOTE: futures.wait() never returns for work that is cancelled before it starts.
                for _ in range(places - 1):
                    pool.submit(future.exception)

            batches = batches_of(stale)
            for index, (virtual, kernels) in enumerate(batches):
                future = pool.submit(self.compile, kernels, virtual)
                ptx |= {(kernel.name, virtual): future for kernel in kernels}
                if index >= workers:
                    queue_cubins(*batches[index - workers])
                if index == workers and other is not None:
                    queue_other(other)
            for batch in batches[-workers:]:
                queue_cubins(*batch)
            if len(batches) <= workers and other is not None:
                queue_other(other)
            try:
                for future in concurrent.futures.as_completed(waiting):
                    seconds, job = future.result(), waiting[future]
                    if job is None:
                        continue
                    kernel, arch = job
                    done += 1
                    log(f"[{done}/{len(stale)}] {arch}/{kernel.name}.cubin {seconds:.1f} s")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [self.entry(kernel, arch) for kernel, arch in jobs]


def batches_of(
    jobs: list[tuple[kernel_table.Kernel, str]],
) -> list[tuple[str, list[kernel_table.Kernel]]]:
    """The batches for one nvcc process each: kernels of one virtual architecture, whose sources
    share a header of parameters."""
    groups: dict[tuple[pathlib.Path, str], dict[str, kernel_table.Kernel]] = {}
    for kernel, arch in jobs:
        key = kernel_table.params_header(kernel.source), kernel.virtual_arch(arch)
        groups.setdefault(key, {})[kernel.name] = kernel
    batches = []
    for (_, virtual), group in groups.items():
        kernels = list(group.values())
        batches += [
            (virtual, kernels[at : at + TOGETHER]) for at in range(0, len(kernels), TOGETHER)
        ]
    return batches


def install(
    out_dir: pathlib.Path, entries: list[dict[str, Any]], builder: Builder, compiler: str
) -> int:
    """Writes the package: cubins, then the manifest; removes other files. Returns total bytes."""
    total = 0
    for entry in entries:
        data = (ROOT / builder.cache / entry["file"]).read_bytes()
        replace_file(out_dir / entry["file"], data)
        total += len(data)
    manifest = {
        "version": MANIFEST_VERSION,
        "package": "torch_cubin",
        "compiler": compiler,
        "kernels": sorted(entries, key=lambda entry: (entry["name"], entry["arch"])),
    }
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    replace_file(out_dir / "manifest.json", text.encode())
    wanted = {out_dir / entry["file"] for entry in entries}
    for path in out_dir.glob("*/*.cubin"):
        if path not in wanted:
            path.unlink()
            if not any(path.parent.iterdir()):
                path.parent.rmdir()
    return total


def choose_archs(text: str | None) -> tuple[str, ...]:
    """From --archs, else TORCH_CUBIN_ARCHS, else the default; "all" is the default, too."""
    text = text or os.environ.get("TORCH_CUBIN_ARCHS", "")
    if text.strip() == "all":
        return DEFAULT_ARCHS
    archs = tuple(dict.fromkeys(re.split(r"[\s,;]+", text.strip()))) if text.strip() else ()
    for arch in archs:
        cubin_facts.limits_of(arch)
    return archs or DEFAULT_ARCHS


def build_package(
    out_dir: str | os.PathLike[str],
    archs: Sequence[str] | None = None,
    jobs: int | None = None,
    log: Log = print,
    sources: pathlib.Path = SOURCES,
    cache: pathlib.Path = CACHE,
    tools: Toolkit | None = None,
    other: OtherWork | None = None,
) -> None:
    """Builds every kernel of `sources` for `archs` into `out_dir`. Raises BuildError.

    `other` runs in parallel on half of the `jobs`, so that all processors stay busy.
    """
    start = time.monotonic()
    archs = tuple(archs) if archs else choose_archs(None)
    tools = tools or cuda_toolkit.find_toolkit()
    kernels = kernel_table.read_tables(sources)
    pairs = [
        (kernel, arch)
        for kernel in kernels
        for arch in archs
        if kernel.archs is None or arch in kernel.archs
    ]
    log(f"{len(kernels)} kernels, {len(pairs)} cubins for {', '.join(archs)}: nvcc {tools.release}")
    builder = Builder(tools, sources, cache)
    with locked(ROOT / cache):
        # One more than processors: a worker also reads, hashes and checks its compiler's output.
        entries = builder.build(pairs, jobs or (os.cpu_count() or 1) + 1, log, other)
        total = install(pathlib.Path(out_dir), entries, builder, f"nvcc {tools.release}")
    seconds = time.monotonic() - start
    log(f"{len(entries)} cubins, {total / 1e6:.1f} MB in {out_dir} ({seconds:.0f} s)")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the kernel package of torch_cubin.")
    parser.add_argument("--out", default=str(ROOT / "torch_cubin" / "cubins"))
    parser.add_argument(
        "--archs", help=f"default: TORCH_CUBIN_ARCHS, else {','.join(DEFAULT_ARCHS)}"
    )
    parser.add_argument("--jobs", type=int, help="compilers at a time; default: processors + 1")
    parser.add_argument("--clean", action="store_true", help="compile everything again")
    options = parser.parse_args(arguments)
    try:
        if options.clean and (ROOT / CACHE).is_dir():
            for key in (ROOT / CACHE).rglob("*.key"):
                key.unlink()
        build_package(
            options.out,
            choose_archs(options.archs),
            options.jobs,
            log=lambda line: print(line, flush=True),
        )
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
