"""Every kernel under compute-sanitizer, and the record of it: tests/gpu/last_sanitized.json.

What a tool said of a kernel holds as long as its cubin is the same. So the record keeps each
cubin's hash, and is joined from several runs: `python tools/gpu_sanitize.py kernels` runs what it
lacks. `python tests/gpu/sanitized.py` says in one line what it has;
`python tests/gpu/sanitized.py FILE ...` first joins records of other trees into it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

RECORD = "tests/gpu/last_sanitized.json"
TOOLS = ("memcheck", "synccheck", "initcheck", "racecheck")  # the slowest last
DIGITS = 16  # of a cubin's sha256
PRINTED = 100_000  # reports of a scenario, at most: run_child.py's --print-limit
# Of these kernels, by parts of their names, a tool cannot follow the copies. racecheck: their
# warps read sums that raw bulk copies bring, or weights that other warps store, meet, and one
# thread of each arrives at the mbarrier; it takes the next copy or store to the slot for a race (it
# follows no copy by a tensor map). initcheck: they read sums or results that the TMA wrote, which
# it would report (experts' kernels of float32, of the same source, read none and are watched);
# parts of split attention are requested before it is known which of them are empty, and none of
# those is used.
UNTRACKED: dict[str, tuple[str, ...]] = {
    "racecheck": (
        *("sm90_backward_attention", "sm90_e4m3_backward_attention"),
        *("sm90_attention_bf16_8x128", "sm90_attention_f16_8x128"),
    ),
    "initcheck": (
        *("sm90_backward_convert_attention", "sm90_e4m3_backward_convert_attention"),
        *("finish_matmul", "mirror_matmul", "combine_attention"),
        *("gate_experts_bf16", "gate_experts_f16", "sum_experts_bf16", "sum_experts_f16"),
        *("gate_experts_backward_bf16", "gate_experts_backward_f16"),
    ),
}


class Scenario(NamedTuple):
    """One that run_child.py knows, and a pattern of the kernels that it is for."""

    name: str
    arguments: tuple[str, ...]
    kernels: str


def _scenarios() -> Iterator[Scenario]:
    short = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}
    sixteen = ("bfloat16", "float16")
    of_layers = {
        name: rf"(parts|skinny|fused|gated)\w*_{short[name]}|pad_\w*2_|f32_splits"
        for name in sixteen
    }
    of_layers |= {"float32": "f32_any_16x32|pad_|transpose_|_tf32_tn", "float64": "mirror_matmul_8"}
    for dtype, pattern in of_layers.items():
        yield Scenario("layers_sanitize", (dtype,), pattern)
    # As many turns as kernels are alike at most: run_child.turned_catalog.
    for dtype, turns in (("bfloat16", 6), ("float16", 6), ("float8_e4m3fn", 3)):
        for turn in range(turns):
            own = short.get(dtype)
            pattern = rf"attention\w*_{own}" if own else r"sm90_e4m3\w*_attention"
            yield Scenario("attention_turns_sanitize", (dtype, str(turn)), pattern)
    for dtype in sixteen:
        pattern = rf"decode_\w*_({short[dtype]}|e4m3)|combine_\w*_{short[dtype]}"
        yield Scenario("attention_caches_sanitize", (dtype,), pattern)
    for dtype in (*sixteen, "float32"):
        pattern = rf"_rows(_few|_general)?_{short[dtype]}|norm_parts|losses_sum"
        yield Scenario("rows_sanitize", (dtype,), pattern)
    of_attention = {"float32": "tf32x3|gradient_|rows_softmax_f32", "float64": "rows_softmax_f64"}
    for dtype in short:
        pattern = (
            rf"attention_({short[dtype]}|keys|queries)|attention$|{of_attention.get(dtype, '$^')}"
        )
        yield Scenario("attention_sanitize", (dtype,), pattern)
    yield Scenario("attention_sanitize", ("float8_e4m3fn",), "e4m3")
    yield Scenario("experts_sanitize", (), "scaled|group|experts|quantize")
    for mode in (*sixteen, "tf32"):
        pattern = rf"symmetric_matmul_{short.get(mode, mode)}|mirror_matmul_[24]"
        yield Scenario("symmetric_sanitize", (mode,), pattern)
    for mode in (*short, "tf32"):
        for layout in ("nn", "nt", "tn", "tt"):
            if (mode, layout) != ("tf32", "tn"):  # one operand is copied first
                pattern = rf"matmul_{short.get(mode, mode)}(_{layout}|$|_[^nt])"
                yield Scenario("configs_sanitize", (mode, layout), pattern)


SCENARIOS = list(_scenarios())


def is_untracked(tool: str, kernel: str) -> bool:
    return any(part in kernel for part in UNTRACKED.get(tool, ()))


def built(root: Path) -> dict[str, str]:
    """The built kernels for Hopper, with their cubins' hashes; none if there is no manifest."""
    try:
        kernels = json.loads((root / "torch_cubin/cubins/manifest.json").read_text())["kernels"]
    except FileNotFoundError:
        return {}
    return {k["name"]: k["sha256"][:DIGITS] for k in kernels if k["arch"] == "sm_90a"}


def read(root: Path) -> dict[str, Any]:
    """The record; an empty one if there is none."""
    try:
        return json.loads((root / RECORD).read_text())
    except FileNotFoundError:
        return {"runs": [], "kernels": {}, "reports": {}}


def missing(record: dict[str, Any], kernels: dict[str, str], tool: str) -> list[str]:
    """The kernels whose cubins of today the tool has not seen."""
    seen = record["kernels"]
    return sorted(
        name
        for name, cubin in kernels.items()
        if not is_untracked(tool, name)
        and (seen.get(name, {}).get("cubin") != cubin or tool not in seen[name])
    )


def join(record: dict[str, Any], run: dict[str, Any], tool: str, kernels: dict[str, str],
         reports: dict[str, str]) -> None:  # fmt: skip
    """Adds that a run's tool has seen these kernels, by name with their cubins' hashes, and its
    first report of each that it named."""
    if run not in record["runs"]:
        record["runs"].append(run)
    for name, cubin in kernels.items():
        entry = record["kernels"].get(name, {})
        if entry.get("cubin") != cubin:  # what was said of another one no longer holds
            entry = {"cubin": cubin}
            for named in record["reports"].values():
                named.pop(name, None)
        if not is_untracked(tool, name):
            entry[tool] = record["runs"].index(run)
            record["kernels"][name] = entry
            record["reports"].setdefault(tool, {}).pop(name, None)
    record["reports"].setdefault(tool, {}).update(reports)


def merge(record: dict[str, Any], other: dict[str, Any], kernels: dict[str, str]) -> None:
    """Joins what another tree's record says of kernels as they are built here, where this one says
    nothing or the other one has a report."""
    for tool in TOOLS:
        reports = other["reports"].get(tool, {})
        wanted = {*missing(record, kernels, tool), *reports}
        for number, run in enumerate(other["runs"]):
            seen = {
                name: cubin
                for name, cubin in kernels.items()
                if name in wanted
                and (entry := other["kernels"].get(name, {})).get(tool) == number
                and entry["cubin"] == cubin
            }
            if seen:
                named = {name: text for name, text in reports.items() if name in seen}
                join(record, run, tool, seen, named)


def write(root: Path, record: dict[str, Any], kernels: dict[str, str]) -> None:
    """Skips kernels that are gone, and runs that no entry names any more."""
    entries = {k: v for k, v in sorted(record["kernels"].items()) if k in kernels}
    used = sorted({at for entry in entries.values() for tool, at in entry.items() if tool in TOOLS})
    moved = {at: index for index, at in enumerate(used)}
    lines = []
    for name, entry in entries.items():
        at = {tool: moved[entry[tool]] for tool in TOOLS if tool in entry}
        lines.append(f"  {json.dumps(name)}: {json.dumps({'cubin': entry['cubin'], **at})}")
    reports = {
        tool: {k: text for k, text in found.items() if k in kernels and not is_untracked(tool, k)}
        for tool, found in record["reports"].items()
    }
    rest = {
        "runs": [record["runs"][at] for at in used],
        "reports": {tool: found for tool, found in sorted(reports.items()) if found},
    }
    text = json.dumps(rest, indent=1)[:-2] + ',\n "kernels": {\n' + ",\n".join(lines) + "\n }\n}\n"
    unfinished = (root / RECORD).with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(root / RECORD)


def describe(root: Path) -> str:
    """One line: how many of the built kernels each tool has seen, and what it reported."""
    try:
        record, kernels = read(root), built(root)
        return _description(record, kernels)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"Sanitizers: {RECORD} or the kernels' manifest cannot be read ({error!r})"


def _description(record: dict[str, Any], kernels: dict[str, str]) -> str:
    if not record["runs"]:
        return f"Sanitizers: no record ({RECORD}): run tools/gpu_sanitize.py kernels on a GPU"
    if not kernels:
        return "Sanitizers: a record, but no kernels for sm_90a are built to compare with"
    parts = []
    for tool in TOOLS:
        without = sum(is_untracked(tool, name) for name in kernels)
        seen = len(kernels) - without - len(missing(record, kernels, tool))
        found = len(record["reports"].get(tool, {}))
        parts.append(f"{tool} {seen} of {len(kernels) - without} ({found} with reports)")
    last = max(run["date"] for run in record["runs"])
    return f"Sanitizers, of {len(kernels)} kernels as they are built: {', '.join(parts)}; {last}"


def is_cut_off(output: str) -> bool:
    """Whether a tool may have had more reports than it prints."""
    return any(int(count) >= PRINTED for count in re.findall(r"SUMMARY: (\d+)", output))


def named_in(output: str, kernels: dict[str, str]) -> dict[str, str]:
    """The kernels that a tool's output names, each with the first line that does."""
    found: dict[str, str] = {}
    for line in output.splitlines():
        if line.startswith("========="):
            for word in re.findall(r"\w+", line):
                if word in kernels:
                    found.setdefault(word, line.strip("= "))
    return found


if __name__ == "__main__":
    ROOT = Path(__file__).resolve().parents[2]
    joined, of_tree = read(ROOT), built(ROOT)
    for file in sys.argv[1:]:
        merge(joined, json.loads(Path(file).read_text()), of_tree)
    if sys.argv[1:]:
        write(ROOT, joined, of_tree)
    print(describe(ROOT))
