"""Contracts: definitions as a whole: images, all or nothing, redefinition, the pool.

No GPU and no driver: a definition only reads the images. Fields: test_contract_fields.py. Calls:
tests/faults/fake_contract.py.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import contracts
import elf_builder
import pytest
import torch
from contracts import LAUNCH, SEVERAL, changed, define, defined, exists, new_name, vec_add

from torch_cubin import errors

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "data"


def test_a_definition() -> None:
    contract = vec_add()
    (answer,) = define(contract)
    assert answer["state"] == "defined"
    assert answer["contract"] == contract
    assert answer["package"] is None
    assert answer["schema"] == contract["schema"]
    op = getattr(torch.ops.test_contracts, answer["name"].split("::")[1])
    assert str(op.default._schema) == contract["schema"]
    assert contracts.ops()[answer["name"]]["contract"] == contract
    with pytest.raises(NotImplementedError):
        op(torch.zeros(3), torch.zeros(3))


def test_overloads() -> None:
    name = new_name()
    first, second = vec_add(f"{name}.one"), vec_add(f"{name}.two")
    assert [answer["state"] for answer in define(first, second)] == ["defined"] * 2
    assert getattr(torch.ops.test_contracts, name.split("::")[1]).overloads() == ["one", "two"]


def test_images() -> None:
    with pytest.raises(errors.ImageError):
        define(vec_add(), files=[b"no cubin"])
    with pytest.raises(errors.ImageError):
        define(vec_add(), files=[SEVERAL.read_bytes()[:-10]])
    defined(vec_add(), files=[SEVERAL, b"never used"])
    defined(vec_add(), files=[DATA / "containers" / "vec_add.zstd.fatbin"])
    # Images of one kernel must agree, and each must have it.
    both = changed(vec_add(), "kernels/0/images", [0, 1])

    def cubin(second: int, sm: int = 90) -> bytes:
        info = elf_builder.param(0, 0, 8) + elf_builder.param(1, 8, second)
        info += elf_builder.value(0x19, 8 + second)
        flags = 0x06000004 | sm << 8
        return elf_builder.Cubin(kernels=[elf_builder.Kernel("vec_add", info)], flags=flags).build()

    with pytest.raises(errors.ParamsError, match="Build all images from one source"):
        define(both, files=[cubin(4), cubin(8, sm=80)])
    with pytest.raises(errors.ImageError, match="one kernel of a name and architecture"):
        define(both, files=[cubin(4), cubin(8)])
    scale = changed(both, "kernels/0/kernel", "static_shared")
    with pytest.raises(errors.NoKernelError, match="not in every image"):
        define(scale, files=[SEVERAL, DATA / "vec_add.sm_80.cuda118.cubin"])
    with pytest.raises(errors.NoKernelError, match="'vec_add'"):
        define(
            changed(vec_add(), "kernels/0/kernel", "vec_sub"),
            files=[DATA / "vec_add.sm_80.cuda118.cubin"],
        )


def test_ptx_needs_jit_true() -> None:
    file = DATA / "containers" / "vec_add.ptx"
    with pytest.raises(errors.ImageError, match="jit=True"):
        define(vec_add(), files=[file])
    defined(vec_add() | {"jit": True}, files=[file])


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "5", '{"ops": []}', '{"version": 2, "ops": []}', '{"version": 1}',
     '{"version": 1, "ops": {}}', '{"version": 1, "ops": [5]}', '{"version": "1", "ops": []}',
     '{"version": 1.0, "ops": []}', '{"version": true, "ops": []}',
     '{"version": 1, "ops": [' + "[" * 100_000 + "]" * 100_000 + "]}",
     '{"version": 1, "ops": [], "a": 1}',
     '{"version": 1, "ops": ["\udcff"]}'],
    ids=range(15),
)  # fmt: skip
def test_malformed_definitions_are_refused(text: str) -> None:
    with pytest.raises(errors.Error) as caught:
        contracts.define_text(text.encode("utf-8", "surrogateescape").decode("latin-1"))
    assert caught.value.tag in ("file", "input")


def test_a_definition_without_ops() -> None:
    assert define() == []


def test_several_ops_are_defined_all_or_none() -> None:
    good, bad = vec_add(), changed(vec_add(), "kernels/0/kernel", "nope")
    with pytest.raises(errors.NoKernelError):
        define(good, bad)
    assert not exists(good)
    # What PyTorch refuses: the op of another library.
    library = torch.library.Library("test_contracts", "FRAGMENT")
    theirs = vec_add()
    library.define(theirs["schema"].split("::")[1])
    assert exists(theirs)
    with pytest.raises(errors.InputError, match="could not be registered"):
        define(good, theirs)
    assert not exists(good)
    assert good["schema"].split("(")[0] not in contracts.ops()
    assert [answer["state"] for answer in define(good)] == ["defined"]
    assert exists(good)


def test_one_op_twice() -> None:
    contract = vec_add()
    other = changed(contract, "kernels/0/block", [128, 1, 1])
    with pytest.raises(errors.InputError, match="twice at once"):
        define(contract, other)
    assert not exists(contract)
    assert [answer["state"] for answer in define(contract, contract)] == ["defined", "same"]
    assert [answer["state"] for answer in define(other, other)] == ["swapped", "same"]
    assert contracts.ops()[contract["schema"].split("(")[0]]["contract"] == other
    with pytest.raises(errors.InputError, match="twice at once"):
        define(other, contract)


def test_redefinition() -> None:
    contract = vec_add()
    defined(contract)
    reordered = json.loads(json.dumps(contract, sort_keys=True))
    reordered["schema"] = reordered["schema"].replace(", ", "  ,")
    assert define(reordered)[0]["state"] == "same"
    other = changed(contract, "kernels/0/block", [128, 1, 1])
    assert define(other)[0]["state"] == "swapped"
    assert define(other)[0]["state"] == "same"
    # The same contract of other bytes is another one; the same bytes by another path are not.
    assert define(other, files=[LAUNCH])[0]["state"] == "swapped"
    assert define(other, files=[LAUNCH.read_bytes()])[0]["state"] == "same"
    name = contract["schema"].split("(")[0]
    schema = f"{name}(Tensor x, Tensor y, int n=0) -> Tensor"
    with pytest.raises(errors.InputError, match="another schema"):
        define(changed(other, "schema", schema))
    # A swap beside a failure does not happen.
    with pytest.raises(errors.NoKernelError):
        define(contract, changed(vec_add(), "kernels/0/kernel", "nope"))
    assert contracts.ops()[name]["contract"] == other


def test_more_ops_than_slots_are_refused(torch_python) -> None:
    code = """
        import contracts
        from contracts import define, vec_add
        from torch_cubin import errors
        define(*(vec_add() for _ in range(1000)))
        more = [vec_add() for _ in range(25)]
        try:
            define(*more)
            raise SystemExit("one op too many was taken")
        except errors.InputError as error:
            assert "at most 1024" in str(error), error
        assert len(contracts.ops()) == 1000
        define(*more[:24])
        assert define(more[0])[0]["state"] == "same"
        try:
            define(more[24])
            raise SystemExit("one op too many was taken")
        except errors.InputError:
            print("right")
    """
    done = torch_python.run(textwrap.dedent(code))
    assert done.stdout == "right\n", done.stderr
