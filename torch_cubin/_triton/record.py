"""record(): collects the kernels that Triton compiles in a scope."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch_cubin import errors
from torch_cubin._triton import copies, files, live
from torch_cubin._triton.kernel import FOLDED, TritonKernel


@dataclasses.dataclass
class Recorded:
    """A kernel that was compiled, or found in Triton's cache on disk."""

    name: str
    signature: str  # "x_ptr: *fp32 (a multiple of 16), n: i32, BLOCK = 1024"
    arch: str
    from_cache: bool
    kernel: TritonKernel | None  # None if it cannot be launched
    problem: str = ""  # the reason


class Recording:
    """The result of record(): `kernels`, a list of Recorded."""

    def __init__(self) -> None:
        self.kernels: list[Recorded] = []

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Writes those that can be launched, for read() and define_op without Triton."""
        found = [one.kernel for one in self.kernels if one.kernel is not None]
        if not found:
            got = (
                f"{errors.counted(len(self.kernels), 'kernel')} seen, none of which can be launched"
            )
            raise errors.fault("input", f"folder '{folder}'", "would hold no kernel", got=got)
        return files.write(folder, found, overwrite=overwrite)

    def __str__(self) -> str:
        lines = []
        for one in self.kernels:
            end = f": {one.problem}" if one.problem else ""
            lines.append(f"{one.name}({one.signature}) for {one.arch}{end}")
        return "\n".join(lines) or "no kernel was compiled"

    def _listen(self, *, src: Any, metadata: Mapping[str, Any], metadata_group: Mapping[str, str],
                cache_hit: bool = False, **_: Any) -> None:  # fmt: skip
        name, problem, found = str(metadata.get("name", "?")), "", None
        try:
            cubins = [path for key, path in metadata_group.items() if key.endswith(".cubin")]
            if len(cubins) != 1:
                raise errors.fault("file", f"Triton kernel '{name}'", "has no cubin on disk")
            texts = {
                key.rpartition(".")[2]: Path(path).read_text(errors="replace")
                for key, path in metadata_group.items() if key.endswith((".ttir", ".ttgir"))
            }  # fmt: skip
            copies.check(texts.get("ttgir", ""), f"Triton kernel '{name}'")
            cubin = Path(cubins[0]).read_bytes()
            found = live.of_source(src, metadata, cubin, texts.get("ttir"))
        except (errors.Error, OSError) as error:
            problem = str(error)
        target = metadata.get("target")
        arch = found.arch if found is not None else str(getattr(target, "arch", target))
        signature = _shown(found) if found is not None else ""
        if any(one.kernel == found and found is not None for one in self.kernels):
            return
        self.kernels.append(Recorded(name, signature, arch, bool(cache_hit), found, problem))


def _shown(kernel: TritonKernel) -> str:
    parts = []
    for parameter in kernel.parameters:
        if parameter.type == FOLDED:
            parts.append(f"{parameter.name} = {parameter.value!r}")
        else:
            condition = f" (a multiple of {parameter.multiple_of})"
            parts.append(
                f"{parameter.name}: {parameter.type}" + condition * (parameter.multiple_of != 1)
            )
    return ", ".join(parts)


@contextlib.contextmanager
def record() -> Iterator[Recording]:
    """Collects the kernels that Triton compiles, or finds in its cache on disk, in this scope.

        with tct.record() as seen:
            model(x)
        print(seen)
        seen.save("kernels")

    Kernels that this process has launched before are not compiled again and do not appear; nor do
    those that torch.compile compiles in its worker processes. Needs Triton 3.4 or newer.
    """
    package = live.triton()
    compilation: Any = getattr(getattr(package, "knobs", None), "compilation", None)
    if not hasattr(compilation, "listener"):
        raise errors.fault(
            "input", "torch_cubin.producers.triton.record", "needs a newer Triton",
            expected="3.4 or newer", got=str(package.__version__),
        )  # fmt: skip
    seen, before = Recording(), compilation.listener

    def listener(**compiled: Any) -> None:
        if before is not None:
            before(**compiled)
        seen._listen(**compiled)

    compilation.listener = listener
    try:
        yield seen
    finally:
        compilation.listener = before
