"""Random mutations of contracts and manifests: each is refused with a tag, or is an op that can be
called, and whose call ends in a result or in an error with a tag; never in a crash.
"""

from __future__ import annotations

import copy
import json
import random

import contracts
import pytest
import torch
from contract_calls import declare, op_of
from contracts import LAUNCH, new_name
from fake_driver import tensors

from torch_cubin import errors

CASES = 150  # each; a process can define 1,024 ops
TAGS = {"file", "hash", "image", "input", "params", "no_kernel", "arch", "launch"}


def rich() -> dict:
    """A contract with something of everything."""
    contract = contracts.vec_add()
    contract["schema"] = new_name("fuzz") + (
        "(Tensor x, Tensor(a!) y, Tensor? z, Tensor[] xs, int n, int? q, float f, str t)"
        " -> (Tensor out, Tensor more)"
    )
    contract["dtypes"] = {"T": ["float32", "float16"]}
    contract["tensors"] = {
        "x": {"dtype": "T", "shape": ["m", "*s"], "layout": "dense", "align": 4},
        "y": {"dtype": "T", "shape": ["m", ["add", ["number", "n"], 1]], "layout": "strided"},
        "z": {"dtype": "T", "shape": ["k", "k"], "layout": "rows"},
        "xs": {"dtype": "T", "shape": ["*s"]},
        "out": {"dtype": "T", "shape": None, "like": "x", "layout": "contiguous"},
        "more": {"dtype": "float32", "shape": ["m", ["number", "len(xs)"], "n"]},
    }
    contract["outputs"] = ["out", "more"]
    contract["scratch"] = [{"name": "partial", "dtype": "T", "shape": ["m", ["numel", "x"]]}]
    number = ["select", ["number", "q?"], ["number", "q"], ["stride", "partial", 0]]
    contract["kernels"][0] |= {
        "when": ["and", ["is", "t", "relu"], ["defined", "xs[1]"]],
        "args": [["pointer", "more"], ["pointer", "xs", 1], ["pointer", "out"], ["int32", number]],
        "grid": [["numel", "xs[0]"], ["max", 1, ["size", "out", -1]], 1],
        "shared_memory": ["mul", 4, ["number", "n"]],
    }
    second = copy.deepcopy(contracts.vec_add()["kernels"][0])
    number = ["int32", ["floordiv", ["numel", "x"], 3]]
    second["args"][1:] = [["pointer", "out"], ["pointer", "more"], number]
    contract["kernels"].append(second)
    return contract


def tma() -> dict:
    return {
        "schema": new_name("fuzz") + "(Tensor x) -> Tensor",
        "tensors": {
            "x": {"dtype": "float32", "shape": ["m", "n"], "layout": "strided", "align": 4},
            "out": {"dtype": "float32", "shape": [64]},
        },
        "outputs": ["out"],
        "kernels": [
            {
                "images": [0],
                "kernel": "tma_box",
                "args": [
                    ["tensor_map", {"tensor": "x", "box": [8, 8], "swizzle": None}],
                    ["struct", 4, [[0, ["int16", 1]], [2, ["int8", ["size", "x", 0]]]]],
                    ["int32", 0],
                    ["bytes", "01020304"],
                    ["pointer", "out"],
                ],
                "grid": [1, 1, 1],
                "block": [32, 1, 1],
            }
        ],
    }


def places(tree, path=()):
    """Every place in a JSON tree, as the steps to it."""
    if path:
        yield path
    if not isinstance(tree, dict | list):
        return
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from places(value, (*path, key))


def at(tree, path):
    for step in path:
        tree = tree[step]
    return tree


ODD = [None, True, False, 0, 1, -1, 2, 3, 4, 64, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64,
       -(2**63), 0.5, 1.0, 1e300, "", "x", "xs", "xs[1]", "xs[0]", "xs[9]", "z", "out", "more", "n",
       "m", "k", "*s", "T", "q", "q?", "len(xs)", "partial", "float16", "relu", "\0", "é", [], {},
       ["numel", "x"], ["numel", "z"], ["stride", "xs[1]", 0], ["number", "q"], ["pointer", "xs"],
       ["size", "partial", 1], ["neg", ["number", "n"]], ["sm"],
       ["is_dtype", "x", "float16"]]  # fmt: skip


def mutated(r: random.Random, tree):
    tree = copy.deepcopy(tree)
    for _ in range(r.choice([1, 1, 1, 2, 3])):
        path = r.choice(list(places(tree)))
        *steps, last = path
        parent = at(tree, steps)
        what = r.random()
        if what < 0.1:
            del parent[last]
        elif what < 0.2 and isinstance(parent, list):
            parent.insert(last, copy.deepcopy(r.choice(parent)))
        elif what < 0.3:
            parent[last] = copy.deepcopy(at(tree, r.choice(list(places(tree)))))
        elif what < 0.4 and isinstance(parent[last], str) and parent[last]:
            text = parent[last]
            i = r.randrange(len(text))
            parent[last] = text[:i] + r.choice(["", "!", "?", "[", " ", "a", ","]) + text[i + 1 :]
        else:
            parent[last] = copy.deepcopy(r.choice(ODD))
        if not isinstance(tree, dict) or not tree:
            break
    return tree


def sizes(r: random.Random) -> tuple[int, ...]:
    return tuple(r.choice([0, 1, 2, 3, 8]) for _ in range(r.choice([0, 1, 1, 2, 2, 3])))


def value(r: random.Random, type_: str):
    def tensor():
        dtype = r.choice([torch.float32, torch.float32, torch.float16])
        size = r.choice([(3,), (3, 4), (8, 8), (4,), sizes(r)])
        if r.random() < 0.7:
            return tensors.empty(*size, dtype=dtype)
        return tensors.strided(size, tuple(r.choice([0, 1, 2, 8]) for _ in size), dtype)

    return {
        "Tensor": tensor,
        "Optional[Tensor]": lambda: r.choice([None, tensor()]),
        "List[Tensor]": lambda: [tensor() for _ in range(r.randrange(4))],
        "int": lambda: r.choice([0, 1, 3, 7, -1, 2**31, 2**62]),
        "Optional[int]": lambda: r.choice([None, 1, 2**40]),
        "float": lambda: r.choice([0.0, 1.5, 1e300]),
        "str": lambda: r.choice(["relu", "gelu", ""]),
    }.get(type_, lambda: r.choice([True, None, 1]))()


def several_arguments() -> list:
    x, y, z = tensors.empty(3, 4), tensors.empty(3, 2), tensors.empty(5, 5)
    return [x, y, z, [tensors.empty(4), tensors.empty(4)], 1, 2, 0.5, "relu"]


# Arguments that the contracts take, by their number.
GOOD = {
    1: lambda: [tensors.empty(8, 8)],
    2: lambda: [tensors.empty(5), tensors.empty(5)],
    8: several_arguments,
}


def call(r: random.Random, op) -> bool:
    """Whether a call of random arguments went through."""
    good = GOOD.get(len(op._schema.arguments), list)()
    wrong = r.randrange(-len(good), len(good)) if good else 0  # half of the time it stays correct
    arguments, keywords = [], {}
    for index, argument in enumerate(op._schema.arguments):
        random_one = not good or index == wrong
        given = value(r, str(argument.type)) if random_one else good[index]
        if argument.kwarg_only:
            keywords[argument.name] = given
        else:
            arguments.append(given)
    try:
        op(*arguments, **keywords)
    except RuntimeError as error:
        # What PyTorch itself says of arguments of a wrong type, before the op is asked.
        text = str(error)
        assert text.startswith("torch_cubin [") or op._schema.name in text, text
        assert "[internal]" not in text
        return False
    return True


@pytest.mark.parametrize("base", [contracts.vec_add, rich, tma])
@pytest.mark.parametrize("package", [False, True], ids=["define", "package"])
def test_mutations(driver, clean, tmp_path, base, package) -> None:
    declare(driver)
    file = LAUNCH if base is tma else contracts.SEVERAL
    op_of(base(), files=(file,))  # the unchanged file is valid
    r = random.Random(f"{base.__name__} {package}")
    defined = called = refused = 0
    tags, half = set(), False
    for _ in range(CASES):
        contract = base()
        name = contract["schema"].split("(")[0]
        try:
            if package:
                folder = contracts.write_package(tmp_path / "package", contract, files=(file,))
                manifest = json.loads((folder / "manifest.json").read_text())
                if r.random() < 0.5:
                    manifest["ops"] = [mutated(r, manifest["ops"][0])]
                else:
                    manifest = mutated(r, manifest)
                (folder / "manifest.json").write_text(json.dumps(manifest))
                answers = contracts.load_package(folder)
            else:
                answers = contracts.define(mutated(r, contract), files=(file,))
        except errors.Error as error:
            tags.add(error.tag)
            refused += 1
            half = name in contracts.ops()
            continue
        finally:
            assert not half
        for answer in answers:
            defined += 1
            space, local = answer["name"].split("::")
            local, _, overload = local.partition(".")
            op = getattr(getattr(getattr(torch.ops, space), local), overload or "default")
            for _ in range(3):
                called += call(r, op)
    assert tags <= TAGS
    assert refused > CASES // 4, (refused, defined, called)
    assert called > 0, (refused, defined, called)
