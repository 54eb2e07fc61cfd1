"""What the tests of declared ops on the stand-in driver share (fake_contract*.py)."""

from __future__ import annotations

import contracts
import pytest
import torch
from contracts import LAUNCH, SEVERAL, define, new_name

import torch_cubin


def declare(driver) -> None:
    """Passes the parameters of both files' kernels to the driver."""
    for file in (SEVERAL, LAUNCH):
        driver.declare(torch_cubin.load(file))


def op_of(contract: dict, **more):
    """The defined op, to be called."""
    (answer,) = define(contract, **more)
    assert answer["state"] == "defined"
    space, name = answer["name"].split("::")
    packet = getattr(getattr(torch.ops, space), name.split(".")[0])
    return packet.default if "." not in name else getattr(packet, name.split(".")[1])


def refused(function, *arguments, match: str, tag: str = "input", **keywords) -> None:
    with pytest.raises(RuntimeError) as caught:
        function(*arguments, **keywords)
    assert str(caught.value).startswith(f"torch_cubin [{tag}]: "), caught.value
    assert match in str(caught.value), str(caught.value)


def pointer(launch: dict, index: int) -> int:
    return int.from_bytes(bytes.fromhex(launch["params"][index]), "little")


def integer(launch: dict, index: int) -> int:
    return int.from_bytes(bytes.fromhex(launch["params"][index]), "little", signed=True)


def shapes_op(schema: str, entries: dict, outputs: list, **kernel):
    """An op of `vec_add`'s kernel whose numbers are of no interest, but for its tensors."""
    contract = contracts.vec_add()
    contract["schema"] = new_name() + schema
    contract["tensors"] = {
        name: {"dtype": "float32", "shape": shape} if isinstance(shape, list | None) else shape
        for name, shape in entries.items()
    }
    contract["outputs"] = outputs
    first = next(iter(entries))
    pointers = [["pointer", name] for name in [first] * (3 - len(outputs)) + outputs]
    contract["kernels"][0].update(args=[*pointers, ["int32", 0]], grid=[1, 1, 1], **kernel)
    return op_of(contract)
