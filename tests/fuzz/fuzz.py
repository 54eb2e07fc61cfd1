"""Fuzzes what reads bytes, texts and arguments, with libFuzzer, AddressSanitizer and UBSan.

    python tests/fuzz/fuzz.py list                  the formats
    python tests/fuzz/fuzz.py run FORMAT SECONDS    one format (`all`: each in turn)
    python tests/fuzz/fuzz.py minimise FORMAT       its committed inputs anew, from what was found
    python tests/fuzz/fuzz.py report                tests/fuzz/report.json, from the runs' log

Every run adds a line to tests/fuzz/runs.jsonl, which is committed with the report: `report` sums it
up. Its first lines are sums themselves: of the runs until 2026-11-22, whose log was not kept.
Runs leave what they find in build/fuzz, and `report` counts the lines that it reaches, too. Needs
clang++ with libFuzzer (Debian: clang-14 libclang-rt-14-dev, and llvm-14 for `report`). A crashing
input is left in build/fuzz/crashes; once the bug is mended, put it into tests/fuzz/corpus/FORMAT
under a name in words: tests/unit/test_fuzz_replay.py runs all of these with any compiler.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OUT = ROOT / "build" / "fuzz"
RUNS = HERE / "runs.jsonl"
CORPUS = HERE / "corpus"

# The longest input that is tried, in bytes, by format: small ones are quick.
FORMATS = {
    "cubin": 8192,
    "fatbin": 2048,
    "host_elf": 4096,
    "static_library": 2048,
    "bundle": 512,
    "c_arrays": 768,
    "ptx": 1024,
    "zstd": 768,
    "lz4": 256,
    "lzma": 512,
    "inspect": 8192,
    "schema": 256,
    "expression": 128,
    "contract": 4096,
    "manifest": 4096,
    "call": 128,
    "tuned": 1024,
}
DECLARED = ("schema", "expression", "contract", "manifest", "call", "tuned")
# Files that need PyTorch or a driver: torch_shims.cpp and declared.cpp replace them.
REPLACED = {
    *("slots.cpp", "catalog.cpp", "stream.cpp", "internals.cpp", "settings.cpp", "dl.cpp"),
    "aten_norms.cpp",
}

# What only makes messages, checks or hashes: coverage there would count as progress.
UNCOUNTED = (
    *("src:*/cubin/error.cpp", "src:*/cubin/sha256.cpp", "src:*/tests/fuzz/*"),
    *("fun:_ZNSt*", "fun:_ZNKSt*", "fun:_ZSt*", "fun:*nlohmann*", "fun:_ZN5torch*", "fun:_ZN3c10*"),
)

# Finding leaks needs ptrace; stack depots and quarantines cost half the speed.
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0:malloc_context_size=0:quarantine_size_mb=1"
    ":detect_stack_use_after_return=0:use_sigaltstack=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
# With the operands of comparisons traced new paths are found sooner, at half the speed: a quarter
# of a run is so.
BUILDS = {
    "quick": ("-fsanitize=fuzzer,address,undefined", "-fno-sanitize-coverage=trace-cmp"),
    "traced": ("-fsanitize=fuzzer,address,undefined",),
    "lines": ("-fprofile-instr-generate", "-fcoverage-mapping", "-DTORCH_CUBIN_REPLAY", "-O0"),
}


# The files that read each format: whose lines are counted.
_IMAGE = (
    "cubin/elf.cpp",
    "cubin/image.cpp",
    "cubin/nv_info.cpp",
    "cubin/sass.cpp",
    "cubin/arch.cpp",
)
READERS = {
    "cubin": _IMAGE,
    "fatbin": ("cubin/fatbin.cpp", "cubin/container.cpp"),
    "host_elf": ("cubin/host_elf.cpp", "cubin/embedded.cpp"),
    "static_library": ("cubin/static_library.cpp",),
    "bundle": ("cubin/embedded.cpp",),
    "c_arrays": ("cubin/c_arrays.cpp",),
    "ptx": ("cubin/ptx.cpp", "cubin/ptx_scanner.cpp"),
    "zstd": ("cubin/zstd.cpp", "cubin/zstd_entropy.cpp"),
    "lz4": ("cubin/lz4.cpp",),
    "lzma": ("cubin/lzma.cpp",),
    "inspect": (
        *("cubin/inspect.cpp", "cubin/sniff.cpp", "cubin/json_facts.cpp", *_IMAGE),
        *("cubin/demangle.cpp", "cubin/cpp_spelling.cpp", "cubin/stated_type.cpp"),
    ),
    "schema": ("declared/schema.cpp", "declared/schema_parser.cpp"),
    "expression": ("declared/expression.cpp", "declared/expression_evaluate.cpp"),
    "contract": (
        *("declared/contract.cpp", "declared/contract_images.cpp", "declared/names.cpp"),
        *("declared/launch_limits.cpp", "declared/packing.cpp", "declared/pattern.cpp"),
        "declared/tensor_map_argument.cpp",
    ),
    "manifest": (
        *("declared/declared_package.cpp", "package/fields.cpp", "package/package.cpp"),
        *("package/package_files.cpp", "package/package_kernel.cpp"),
    ),
    "call": (
        *("declared/call.cpp", "declared/choice.cpp", "declared/boxed_arguments.cpp"),
        "declared/pattern_match.cpp",
        *("declared/packing_write.cpp", "declared/tensor_map_argument.cpp", "runtime/launch.cpp"),
    ),
    "tuned": ("declared/tuned_calls.cpp", "declared/tuning.cpp"),
}
MOST_INPUTS = 20  # of a format, in CORPUS
# What runs have found, for the report; each is mended, and its input is in CORPUS under that name.
MENDED = {
    "call/a_stride_beyond_any_memory": "whether tensors of 2^63 bytes share memory: an overflow",
    "call/a_size_beyond_any_memory": "the same, of a size",
    "call/a_pointer_into_more_than_any_memory": "an address within such a tensor: an overflow",
    "contract/like_an_item_of_a_list": "an output `like` an item of a list read past an array",
    "manifest/version_out_of_range": "a number of a manifest that no int holds: undefined",
}


def group_of(name: str) -> str:
    """The program that has the format: one without PyTorch's headers, or the other."""
    return "declared" if name in DECLARED else "bytes"


@functools.cache
def compiler() -> str:
    """The first clang++ that has libFuzzer."""
    for name in ("clang++", *(f"clang++-{version}" for version in range(21, 13, -1))):
        if shutil.which(name) is None:
            continue
        asked = subprocess.run([name, "-print-resource-dir"], capture_output=True, text=True)
        if any(Path(asked.stdout.strip()).rglob("libclang_rt.fuzzer*.a")):
            return name
    raise SystemExit("fuzz.py: no clang++ with libFuzzer (Debian: clang-14 libclang-rt-14-dev)")


def json_include() -> Path:
    sys.path.insert(0, str(ROOT / "tests" / "unit"))
    sys.path.insert(0, str(ROOT / "tests"))
    import cubin_check

    return cubin_check.json_include()


def sources(group: str) -> list[Path]:
    own = {"bytes": ("images", "containers", "compressed"), "declared": ("declared", "torch_shims")}
    folders = {"bytes": (), "declared": ("declared", "package", "pytorch", "runtime", "driver")}
    found = [HERE / f"{name}.cpp" for name in ("main", *own[group])]
    found += sorted((ROOT / "csrc" / "cubin").glob("*.cpp"))
    # The other folders as one file each: PyTorch's headers take the compiler seconds.
    for folder in folders[group]:
        unit = OUT / "units" / f"{folder}.cpp"
        unit.parent.mkdir(parents=True, exist_ok=True)
        paths = sorted((ROOT / "csrc" / folder).glob("*.cpp"))
        text = "".join(f'#include "{p}"\n' for p in paths if p.name not in REPLACED)
        if not unit.exists() or unit.read_text() != text:
            unit.write_text(text)
        found.append(unit)
    return found


def parts_of(source: Path) -> list[Path]:
    """The file itself; for a file of units/, the files that it includes."""
    return [source, *map(Path, re.findall(r'^#include "(/.*)"$', source.read_text(), re.MULTILINE))]


def sources_hash(group: str) -> str:
    """Of what the group's programs are compiled from in this tree."""
    headers = [*HERE.glob("*.h"), *(ROOT / "csrc").rglob("*.h")]
    files = {part for source in sources(group) for part in parts_of(source)}
    files = {path for path in files | set(headers) if OUT not in path.parents}
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def headers_of_torch() -> list[str]:
    """The compiler's flags for what csrc/declared includes of PyTorch and CUDA."""
    from fake_driver.build import cuda_include
    from torch.utils.cpp_extension import include_paths

    folders = [*include_paths(), str(cuda_include())]
    return ["-DTORCH_TARGET_VERSION=0x020b000000000000", *(f"-isystem{path}" for path in folders)]


def build(group: str, kind: str) -> Path:
    """The fuzzer of a group of formats; compiled again where a source or header is newer."""
    folder = OUT / kind / group
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "fuzz"
    headers = [*HERE.glob("*.h"), *(ROOT / "csrc").rglob("*.h"), Path(__file__)]
    newest = max(path.stat().st_mtime for path in headers)
    ignored = folder / "uncounted.txt"
    ignored.write_text("".join(f"{pattern}\n" for pattern in UNCOUNTED))
    flags = [
        "-std=c++17" if group == "bytes" else "-std=c++20",
        "-O2",
        "-g1",
        "-Wall",
        "-Wextra",
        f"-I{ROOT / 'csrc'}",
        f"-I{HERE}",
    ]
    flags += [f"-isystem{json_include()}", *BUILDS[kind]]
    if group == "declared":
        flags += ["-pthread", *headers_of_torch(), f'-DFUZZ_DATA="{ROOT / "tests" / "data"}"']
    if kind != "lines":
        flags += ["-fno-sanitize-recover=all", "-fno-sanitize=vptr"]
        flags += [f"-fsanitize-coverage-ignorelist={ignored}"]
    objects, stale = [], not program.exists()
    for source in sources(group):
        output = folder / f"{source.parent.name}_{source.stem}.o"
        objects.append(output)
        changed = max(newest, *(path.stat().st_mtime for path in parts_of(source)))
        if output.exists() and output.stat().st_mtime > changed:
            continue
        subprocess.run([compiler(), *flags, "-c", source, "-o", output], check=True)
        stale = True
    if stale:
        subprocess.run([compiler(), *flags, *objects, "-o", program], check=True)
    return program


def run_slice(name: str, kind: str, seconds: int) -> bool:
    """One run of libFuzzer, noted in RUNS; whether it ended without a finding."""
    program = build(group_of(name), kind)
    compiled_from = sources_hash(group_of(name))
    found = OUT / "found" / name
    crashes = OUT / "crashes" / name
    for folder in (found, crashes, CORPUS / name):
        folder.mkdir(parents=True, exist_ok=True)
    command = [program, found, CORPUS / name, f"-max_total_time={seconds}"]
    command += [f"-max_len={FORMATS[name]}", "-timeout=10", "-rss_limit_mb=1024"]
    command += [f"-artifact_prefix={crashes}/", "-print_final_stats=1", "-use_value_profile=0"]
    words = HERE / f"{name}.dict"
    if words.exists():
        command.append(f"-dict={words}")
    begun = time.time()
    environment = dict(os.environ, FUZZ_FORMAT=name, **ENVIRONMENT)
    done = subprocess.run(
        list(map(str, command)),
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    executions = re.findall(r"number_of_executed_units: (\d+)", done.stderr)
    edges = re.findall(r"cov: (\d+)", done.stderr)
    noted = {
        "date": time.strftime("%Y-%m-%d", time.gmtime(begun)),
        "format": name,
        "build": kind,
        "seconds": round(time.time() - begun, 1),
        "executions": int(executions[-1]) if executions else 0,
        "edges": int(edges[-1]) if edges else 0,
        "failed_runs": int(done.returncode != 0),
        "sources": compiled_from,
    }
    with RUNS.open("a") as file:
        file.write(json.dumps(noted) + "\n")
    print(json.dumps(noted), flush=True)
    if done.returncode != 0:
        (crashes / f"log-{int(begun)}.txt").write_text(done.stderr[-20000:])
        print(done.stderr[-3000:], flush=True)
    return done.returncode == 0


def run(name: str, seconds: int, *, quick: bool = False) -> bool:
    traced = 0 if quick else seconds // 4
    slices = [("traced", traced), ("quick", seconds - traced)]
    done = [run_slice(name, kind, time) for kind, time in slices if time > 0]
    return all(done)  # after a finding the other slice runs, too


def minimise(name: str) -> None:
    """Makes CORPUS of what was found: inputs that together reach every edge, the widest first."""
    program, merged = build(group_of(name), "quick"), OUT / "merged" / name
    shutil.rmtree(merged, ignore_errors=True)
    merged.mkdir(parents=True)
    known = [folder for folder in (OUT / "found" / name, CORPUS / name) if folder.is_dir()]
    command = [program, "-set_cover_merge=1", "-use_counters=0", f"-max_len={FORMATS[name]}"]
    environment = dict(os.environ, FUZZ_FORMAT=name, **ENVIRONMENT)
    command = [*map(str, command), str(merged), *map(str, known)]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    best = sorted(merged.iterdir(), key=lambda path: path.stat().st_mtime_ns)[:MOST_INPUTS]
    keep = {path.name: path.read_bytes() for path in best}
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():  # what once failed has a name in words, and stays
        if path.name not in keep and re.fullmatch("[0-9a-f]{40}", path.name):
            path.unlink()
    for file, content in keep.items():
        (folder / file).write_bytes(content)
    print(f"{name}: {len(list(folder.iterdir()))} inputs")


def covered(name: str) -> dict[str, list[int]]:
    """[lines that the inputs reach, all lines] of each source file that the format is read by."""
    program, profile = build(group_of(name), "lines"), OUT / f"{name}.profraw"
    inputs = [p for f in (OUT / "found" / name, CORPUS / name) if f.is_dir() for p in f.iterdir()]
    listed = OUT / f"{name}.inputs"
    listed.write_text("".join(f"{name}={path}\n" for path in inputs))
    environment = dict(os.environ, LLVM_PROFILE_FILE=str(profile))
    subprocess.run([program, f"@{listed}"], env=environment, check=True, capture_output=True)
    suffix = compiler().removeprefix("clang++")
    merged = profile.with_suffix(".profdata")
    subprocess.run([f"llvm-profdata{suffix}", "merge", "-o", merged, profile], check=True)
    sources = [ROOT / "csrc" / file for file in READERS[name]]
    export = [f"llvm-cov{suffix}", "export", "-summary-only", program, "-instr-profile", merged]
    done = subprocess.run([*map(str, [*export, *sources])], check=True, capture_output=True)
    lines = {}
    for file in json.loads(done.stdout)["data"][0]["files"]:
        counts = file["summary"]["lines"]
        path = Path(file["filename"]).resolve()
        lines[str(path.relative_to(ROOT / "csrc"))] = [counts["covered"], counts["count"]]
    return lines


def totals() -> dict[str, dict[str, Any]]:
    """What the runs in RUNS came to, by format; the edges are those of the last day's."""
    runs = [json.loads(line) for line in RUNS.read_text().splitlines()]
    formats = {}
    for name in FORMATS:
        own = [run for run in runs if run["format"] == name]
        last = max((run["date"] for run in own), default="")
        formats[name] = {
            "executions": sum(run["executions"] for run in own),
            "seconds": round(sum(run["seconds"] for run in own)),
            "failed_runs": sum(run["failed_runs"] for run in own),
            "last_run": last,
            "edges": max((run["edges"] for run in own if run["date"] == last), default=0),
        }
    return formats


def report() -> dict[str, Any]:
    """What all runs in RUNS came to, and the lines that the inputs reach now."""
    formats = totals()
    for name, entry in formats.items():
        lines = covered(name)
        reached, count = (sum(numbers) for numbers in zip(*lines.values(), strict=True))
        entry |= {"lines_percent": round(100 * reached / count, 1), "lines": lines}
    version = subprocess.run([compiler(), "--version"], check=True, capture_output=True, text=True)
    return {
        "commands": [
            "python tests/fuzz/fuzz.py run all SECONDS",
            "python tests/fuzz/fuzz.py minimise FORMAT",
            "python tests/fuzz/fuzz.py report",
        ],
        "sanitizers": "AddressSanitizer, UndefinedBehaviorSanitizer",
        "compiler": version.stdout.splitlines()[0],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "executions": sum(entry["executions"] for entry in formats.values()),
        "failed_runs": sum(entry["failed_runs"] for entry in formats.values()),
        "found_and_mended": MENDED,
        "formats": formats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list")
    one = commands.add_parser("run")
    one.add_argument("format", choices=[*FORMATS, "all"])
    one.add_argument("seconds", type=int)
    one.add_argument("--quick", action="store_true", help="skip the slice that is traced")
    commands.add_parser("minimise").add_argument("format", choices=[*FORMATS, "all"])
    commands.add_parser("report")
    options = parser.parse_args()
    if options.command == "list":
        print("\n".join(FORMATS))
    elif options.command == "minimise":
        for name in FORMATS if options.format == "all" else [options.format]:
            minimise(name)
    elif options.command == "report":
        found = report()
        (HERE / "report.json").write_text(json.dumps(found, indent=1) + "\n")
        for name, entry in found["formats"].items():
            print(
                f"{name:11}{entry['executions']:>12,}  {entry['lines_percent']:>5} % of its lines"
                f"  last run {entry['last_run']}"
            )
        print(f"{'all':11}{found['executions']:>12,}  {found['failed_runs']} runs failed")
    elif options.command == "run":
        names = FORMATS if options.format == "all" else [options.format]
        done = [run(name, options.seconds, quick=options.quick) for name in names]
        if not all(done):
            raise SystemExit("fuzz.py: something was found: see build/fuzz/crashes")


if __name__ == "__main__":
    main()
