"""The results of Triton's autotuner as a table of the contract: the quickest configuration for each
key. Calls need no Triton; csrc/declared/tuned_table.h looks them up.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch_cubin import errors
from torch_cubin._declared.contract import Produced, Scope
from torch_cubin._declared.expressions import Traced, TracedTensor, TracedText
from torch_cubin._triton import files, live
from torch_cubin._triton.arguments import Resolver, TritonArguments
from torch_cubin._triton.kernel import FOLDED, Parameter, TritonKernel

ALL = "all"  # all configurations of an autotuner, not only those that won

_OPTIONS = ("num_warps", "num_ctas", "num_stages", "maxnreg")


@dataclasses.dataclass(frozen=True)
class Config:
    """A configuration: constants of the kernel, and options of the compiler."""

    kwargs: Mapping[str, Any]
    options: Mapping[str, Any]

    @property
    def text(self) -> str:
        return json.dumps([self.kwargs, self.options], sort_keys=True, default=repr)

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and other.text == self.text

    def is_of(self, kernel: TritonKernel) -> bool:
        """Whether the kernel was compiled with it. Warp specialization increases num_warps."""
        constants = kernel.constants
        same = all(name in constants and constants[name] == v for name, v in self.kwargs.items())
        for option in ("num_ctas", "num_stages"):
            wanted = self.options.get(option)
            same = same and wanted in (None, kernel.metadata.get(option, wanted))
        return same and kernel.metadata.get("num_warps", 0) >= (self.options.get("num_warps") or 0)


def config_of(config: Any, label: str) -> Config:
    """From a triton.Config, or from an entry of an autotuner's file."""
    fields = config if isinstance(config, Mapping) else vars(config)
    kwargs = fields.get("kwargs")
    if not isinstance(kwargs, Mapping):
        got = repr(config)[:80]
        raise errors.fault("input", label, "has a configuration without kwargs", got=got)
    if fields.get("pre_hook") is not None:
        raise errors.fault(
            "input", label, "has a pre_hook in a configuration, which Python runs before a launch",
            expected="configurations without one",
            advice="What it does must be part of the op, or of the kernel.",
        )  # fmt: skip
    if fields.get("ir_override"):
        raise errors.fault("input", label, "has a configuration with an ir_override")
    options = {name: fields[name] for name in _OPTIONS if fields.get(name) is not None}
    return Config(dict(kwargs), options)


def _check_not_pruned(kernel: Any, label: str) -> None:
    """Refuses a kernel with a prune function. Only its Python code knows which configurations are
    valid for a shape, and it might exclude the first one, which calls without tuning take."""
    if getattr(kernel, "early_config_prune", None) is not None:
        raise errors.fault(
            "input", f"{label}: tuned='all'", "is given an autotuner with an early_config_prune",
            expected="configurations that are right for every shape, and no such function",
            advice="Prune them before @triton.autotune, for the shapes that the op takes.",
        )  # fmt: skip


class TunedKernels(Produced):
    """The kernels by configuration, and the table. `groups[i]`: (kernel, when) pairs."""

    def __init__(
        self,
        keys: Sequence[str],
        entries: list[tuple[tuple[Any, ...], int]],
        otherwise: int,
        groups: list[list[tuple[TritonKernel, Any]]],
        args: Any,
        label: str,
    ) -> None:
        self.keys, self.entries, self.otherwise = keys, entries, otherwise
        self.groups, self.args, self.label = groups, args, label

    def resolve(self, scope: Scope) -> dict[str, Any]:
        kernel = self.groups[0][0][0]
        resolver = Resolver(TritonArguments(kernel, self.args, {}, frozenset()), scope)
        if resolver.positional is not None:
            raise errors.fault(
                "input", f"{self.label}: args", "do not name the autotuner's keys",
                expected="a dict by name", got="a sequence",
            )  # fmt: skip
        columns = [self._named(name, resolver, scope) for name in self.keys]
        columns += [
            self._dtype(parameter, resolver, scope)
            for parameter in kernel.parameters if parameter.type.startswith("*")
        ]  # fmt: skip
        table: dict[str, tuple[list[Any], int]] = {}
        for key, group in self.entries:
            if len(key) != len(columns):
                raise errors.fault(
                    "input", f"{self.label}: tuned", "has a key of another kind",
                    expected=f"{', '.join(self.keys)} and the dtypes of"
                    f" {errors.counted(len(columns) - len(self.keys), 'tensor')}",
                    got=repr(key)[:120],
                )  # fmt: skip
            values = [column.value(value) for column, value in zip(columns, key, strict=True)]
            if any(value is _NEVER for value in values):
                continue  # calls that the op's definition does not allow
            kept = [v for v, c in zip(values, columns, strict=True) if c.part is not None]
            table.setdefault(json.dumps(kept), (kept, group))
        parts = [column.part for column in columns if column.part is not None]
        # Without columns the table has a single group: 1 is as good a key as any.
        return {
            "key": parts or [1],
            "entries": [[values or [1], group] for values, group in table.values()],
            "otherwise": self.otherwise,
        }

    def _named(self, name: str, resolver: Resolver, scope: Scope) -> _Column:
        value = resolver.value(Parameter(name, ""))
        if value is Resolver.MISSING:
            raise errors.fault(
                "input", f"{self.label}: tuned", f"has a key '{name}' without a value",
                expected=f"args=dict({name}=...), or a name of the op's",
                got=", ".join(scope.names),
            )  # fmt: skip
        if isinstance(value, Traced):
            return _Column(value.tree, value.type)
        if isinstance(value, TracedText) and value.type is str:
            return _Column(["text", value.name], str)
        return _Column(None, constant=value)

    def _dtype(self, parameter: Parameter, resolver: Resolver, scope: Scope) -> _Column:
        value = resolver.value(parameter)
        name = value._name if isinstance(value, TracedTensor) else value
        if name in scope.arguments:
            return _Column(["dtype", name], str)
        # The dtype of an output or scratch is fixed, or that of the argument with the same
        # variable.
        dtype = scope.entries.get(name, {}).get("dtype") if isinstance(name, str) else None
        same = [
            n for n in sorted(scope.arguments) if scope.entries.get(n, {}).get("dtype") == dtype
        ]
        if dtype in scope.dtypes and same:
            return _Column(["dtype", same[0]], str)
        return _Column(None, constant=dtype)


_NEVER = object()


@dataclasses.dataclass(frozen=True)
class _Column:
    """A part of the key; without `part` it is constant."""

    part: Any
    type: type = str
    constant: Any = None

    def value(self, found: Any) -> Any:
        if isinstance(found, str):
            found = found.removeprefix("torch.")
        if self.part is None:
            return None if self.constant is None or self.constant == found else _NEVER
        if self.type is float and type(found) in (int, float):
            return float(found)
        if type(found) is bool and self.type is int:
            return int(found)
        return found if type(found) is self.type else _NEVER


def of(
    kernel: Any,
    tuned: Any,
    signature: Any,
    archs: Any,
    options: Any,
    args: Any,
    label: str,
) -> TunedKernels:
    """The kernels and the table of define_op(kernel=, tuned=)."""
    found: list[tuple[tuple[Any, ...], Config]]
    means: list[tuple[Config, float]] = []
    others: list[Config] = []
    if tuned is True or tuned == ALL:
        if not live.is_autotuned(kernel):
            raise errors.fault(
                "input", f"{label}: tuned", "goes with another kernel",
                expected="what @triton.autotune makes, or tuned='NAME.autotune.json'",
                got=type(kernel).__name__,
            )  # fmt: skip
        if tuned == ALL:
            _check_not_pruned(kernel, label)
            others = [config_of(c, label) for c in kernel.configs]
        found = [(tuple(key), config_of(c, label)) for key, c in kernel.cache.items()]
        if not found and len(kernel.configs) == 1:
            found = [((), config_of(kernel.configs[0], label))]
        keys = list(kernel.keys)
    else:
        paths = [tuned] if isinstance(tuned, (str, os.PathLike)) else list(tuned)
        found = []
        for path in paths:
            key, timings = read_timings(path)
            found.append((key, min(timings, key=lambda pair: pair[1])[0]))
            least = min(time for _, time in timings) or 1.0
            means += [(config, time / least) for config, time in timings]
        keys = list(getattr(kernel, "keys", None) or _names(found))
    if not found and not others:
        raise errors.fault(
            "input", f"{label}: tuned", "has no results",
            expected="a call of the kernel before, or tuned='all'",
        )  # fmt: skip
    configs = list(dict.fromkeys([*(config for _, config in found), *others]))
    best = _best(found, means) if found else configs[0]
    groups = [_kernels_of(kernel, c, signature, archs, options, label) for c in configs]
    entries = [(key, configs.index(config)) for key, config in found if key]
    return TunedKernels(keys, entries, configs.index(best), groups, args, label)


def _names(found: list[tuple[tuple[Any, ...], Config]]) -> list[str]:
    """Refuses keys whose names are needed, because files do not record them. Keys of dtypes only
    need none."""
    values = [v for key, _ in found for v in key if not str(v).startswith("torch.")]
    if values:
        raise errors.fault(
            "input", "the autotuner's results", "do not name their keys",
            expected="kernel=the @triton.autotune kernel, which does",
        )  # fmt: skip
    return []


def _best(found: list[tuple[tuple[Any, ...], Config]], means: list[tuple[Config, float]]) -> Config:
    """The configuration for other keys: if all keys have times, the one with the smallest geometric
    mean of its slowdown against the quickest; else the one that won most often."""
    logs: dict[Config, list[float]] = {}
    for config, ratio in means:
        if math.isfinite(ratio) and ratio > 0:
            logs.setdefault(config, []).append(math.log(ratio))
    winners = Counter(config for _, config in found)
    whole = {c: sum(v) / len(v) for c, v in logs.items() if len(v) == len(found) and c in winners}
    return min(whole, key=whole.__getitem__) if whole else winners.most_common(1)[0][0]


def read_timings(path: Any) -> tuple[tuple[Any, ...], list[tuple[Config, float]]]:
    """The key of a NAME.autotune.json, and each configuration's median time in milliseconds.

    Raises FileError [file] if it cannot be read, InputError [input] if it is damaged.
    """
    path = os.fspath(path)
    label = f"file '{path}'"
    read = files.read_json(path)
    key = read.get("key") if isinstance(read, dict) else None
    listed = read.get("configs_timings") if isinstance(read, dict) else None
    if not isinstance(key, list) or not isinstance(listed, list):
        raise errors.fault("input", label, "holds no results of Triton's autotuner",
                           expected='{"key": [...], "configs_timings": [...]}')  # fmt: skip
    if not all(v is None or type(v) in (bool, int, float, str) for v in key):
        raise errors.fault("input", label, "has a key that is no data", got=repr(key)[:80])
    out = []
    for entry in listed:
        if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], dict):
            raise errors.fault(
                "input", label, "has an entry that is no result", got=repr(entry)[:80]
            )
        times = entry[1] if isinstance(entry[1], list) else [entry[1]]
        if not times or not all(type(t) in (int, float) and t == t for t in times):
            raise errors.fault("input", label, "has times that are none", got=repr(entry[1])[:80])
        out.append((config_of(entry[0], label), float(times[0])))
    if not out:
        raise errors.fault("input", label, "has no results")
    return tuple(key), out


def _kernels_of(
    kernel: Any, config: Config, signature: Any, archs: Any, options: Any, label: str
) -> list[tuple[TritonKernel, Any]]:
    """The kernels of a configuration: compiled now if there is a signature, else the known ones."""
    if signature is not None:
        function = live.function_of(kernel)
        if archs is None:
            raise errors.fault("input", f"{label}: archs", "is missing", expected="['sm_90a', ...]")
        types_ = live.named_signature(function, signature, config.kwargs)
        given = {**dict(options or {}), **config.options}
        return [(k, None) for k in live.compile(kernel, types_, archs, **given)]
    if live.is_function(kernel) or live.is_autotuned(kernel):
        known = live.kernels_of(kernel)
    else:
        listed = kernel if isinstance(kernel, (list, tuple)) else [kernel]
        known = []
        for one in listed:
            if isinstance(one, (str, os.PathLike)):
                known += files.read(one)
            else:
                known.append(live.of_compiled(one) if live.is_compiled(one) else one)
    mine = [k for k in known if config.is_of(k)]
    # If configurations differ only in num_warps, a kernel belongs to the one with exactly its
    # value.
    exact = [k for k in mine if k.metadata.get("num_warps") == config.options.get("num_warps")]
    mine = exact or mine
    if not mine:
        raise errors.fault(
            "input", f"{label}: tuned", "names a configuration whose kernel is not here",
            expected=config.text[:160],
            got=f"{errors.counted(len(known), 'kernel')} of others",
            advice="Give signature= and archs=, or call the kernel in this process.",
        )  # fmt: skip
    return [(k, None) for k in mine]


__all__ = ["FOLDED", "Config", "TunedKernels", "of", "read_timings"]
