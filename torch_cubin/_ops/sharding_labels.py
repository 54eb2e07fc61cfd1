"""How a sharding rule is written: a label for each dim of an op's tensors, as in einsum.

Tensors may be sharded along a label that they share. Where the label is summed over, results are
partial sums, to which an addend contributes once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch_cubin._pytorch import sharding

Labels = Sequence[str | None]  # None: a dim that is not sharded, as one that is broadcast

HEADS = "heads"


@dataclasses.dataclass
class Description:
    """The tensors of a call, without those that are None."""

    arguments: list[Labels]
    results: Sequence[Labels | None]  # None: without elements, and whole on every GPU
    summed: Sequence[str | None] = ()  # labels of which results are sums, and may be partial ones
    addends: Sequence[int] = ()  # arguments that are added to those sums
    fixed: Sequence[int] = ()
    is_list: bool = False

    def rules(self) -> sharding.Rules:
        labels = {label for each in self.arguments for label in each if label is not None}
        possible = sorted(label for label in labels if self._allows(label))
        choices = [self._choice(label) for label in (None, *possible)]
        even = [(i, each.index(HEADS)) for i, each in enumerate(self.arguments) if HEADS in each]
        return sharding.Rules(len(self.results), choices, even, self.fixed, self.is_list)

    def _allows(self, label: str) -> bool:
        return label in self.summed or all(
            label in each for each in self.results if each is not None
        )

    def _choice(self, label: str | None) -> tuple[list[Any], list[Any]]:
        from torch.distributed.tensor import Partial, Replicate, Shard

        summed = label in self.summed

        def placement(labels: Labels | None, *, is_sum: bool) -> Any:
            if labels is None:
                return Replicate()
            if label is not None and label in labels:
                return Shard(labels.index(label))
            return Partial() if is_sum and summed else Replicate()

        return (
            [placement(each, is_sum=True) for each in self.results],
            [placement(each, is_sum=i in self.addends) for i, each in enumerate(self.arguments)],
        )


def of_rows(tensor: Any, *last: str | None) -> list[str | None]:
    """Labels of a tensor whose other dims are rows, each with a label of its own."""
    return [*(f"row{i}" for i in range(len(tensor.shape) - len(last))), *last]


def whole(results: int, *args: Any, **options: Any) -> Description:
    """Of nothing: each GPU computes all of it."""
    given = (*args, *options.values())
    tensors: list[Labels] = [[None] * len(x.shape) for x in given if hasattr(x, "shape")]
    return Description(tensors, [None] * results)
