"""Contracts: the fields of a definition, one by one, and refused definitions.

No GPU and no driver: a definition only reads the images.
"""

from __future__ import annotations

import contracts
import pytest
import torch
from contracts import changed, define, defined, exists, new_name, vec_add

from torch_cubin import errors


def test_defaults_may_be_omitted_or_said() -> None:
    contract = vec_add()
    contract["dtypes"], contract["scratch"], contract["backward"] = {}, [], "mylib::other"
    contract["jit"] = False
    contract["tensors"]["x"] |= {"layout": "contiguous", "align": 16}
    contract["tensors"]["out"] |= {"layout": "contiguous", "align": 256}
    contract["kernels"][0] |= {
        "when": None,
        "shared_memory": 0,
        "cluster": None,
        "cooperative": False,
        "programmatic_dependent_launch": False,
        "priority": None,
    }
    defined(contract)


# path, value (... deletes), tag, a word of the error
WRONG = [
    ("schema", ..., "input", "'schema'"),
    ("schema", 5, "input", "a string"),
    ("schema", "nope", "input", "'::'"),
    ("schema", "aten::vec_add(Tensor x, Tensor y) -> Tensor", "input", "'aten'"),
    ("schema", "cubin::vec_add(Tensor x, Tensor y) -> Tensor", "input", "'cubin'"),
    ("nope", 1, "input", "'nope'"),
    ("dtypes", [], "input", "an object"),
    ("dtypes", {"T": []}, "input", "dtypes.T"),
    ("dtypes", {"T": ["float33"]}, "input", "float33"),
    ("dtypes", {"T": "float32"}, "input", "dtypes.T"),
    ("dtypes", {"float32": ["float16"]}, "input", "no dtype's"),
    ("dtypes", {f"T{i}": ["float16"] for i in range(17)}, "input", "too many"),
    ("tensors", ..., "input", "'tensors'"),
    ("tensors", [], "input", "an object"),
    ("tensors/x", ..., "input", "'x'"),
    ("tensors/x", "float32[*s]", "input", "tensors.x"),
    ("tensors/out", ..., "input", "'out'"),
    ("tensors/more", {"dtype": "float32", "shape": []}, "input", "'more'"),
    ("tensors/x/nope", 1, "input", "'nope'"),
    ("tensors/x/name", "x", "input", "'name'"),
    ("tensors/x/dtype", ..., "input", "'dtype'"),
    ("tensors/x/dtype", "float33", "input", "'float33'"),
    ("tensors/x/dtype", 32, "input", "a string"),
    ("tensors/out/dtype", "T", "input", "'T'"),
    ("tensors/x/layout", "rowwise", "input", "contiguous, rows"),
    ("tensors/x/layout", 1, "input", "contiguous, rows"),
    ("tensors/out/layout", "rows", "input", "contiguous for an output"),
    ("tensors/out/layout", "dense", "input", "contiguous for an output"),
    ("tensors/x/align", 3, "input", "power of two"),
    ("tensors/x/align", 0, "input", "from 1"),
    ("tensors/x/align", -16, "input", "from 1"),
    ("tensors/x/align", "16", "input", "an integer"),
    ("tensors/x/align", 8192, "input", "to 4096"),
    ("tensors/out/align", 512, "input", "256"),
    ("tensors/x/shape", ..., "input", "'shape'"),
    ("tensors/x/shape", "*s", "input", "a list"),
    ("tensors/x/shape", [1] * 65, "input", "at most 64"),
    ("tensors/x/shape", ["*s", "*t"], "input", "one '*'"),
    ("tensors/x/shape", [""], "input", "a name"),
    ("tensors/x/shape", ["*"], "input", "a name"),
    ("tensors/x/shape", ["a b"], "input", "a name"),
    ("tensors/x/shape", ["2n"], "input", "a name"),
    ("tensors/x/shape", [-1], "input", "0 or more"),
    ("tensors/x/shape", [2**63], "input", "0 or more"),
    ("tensors/x/shape", [1.5], "input", "a name, an int"),
    ("tensors/x/shape", [None], "input", "a name, an int"),
    ("tensors/x/shape", [True], "input", "a name, an int"),
    ("tensors/x/shape", [{"n": 1}], "input", "a name, an int"),
    ("tensors/x/shape", [["number", "n"]], "input", "unknown number"),
    ("tensors/x/shape", [["add", 1]], "input", "operands"),
    ("tensors/x/shape", [["truediv", 1, 2]], "input", "an integer"),
    ("tensors/x/shape", ["y"], "input", "a name of its own"),
    ("tensors/x/shape", ["*s", "s"], "input", "another name"),
    ("tensors/out/shape", None, "input", "'shape'"),
    ("tensors/out/shape", ["n"], "input", "no argument says"),
    ("tensors/out/shape", ["*t"], "input", "no argument says"),
    ("tensors/out/shape", [["numel", "out"]], "input", "unknown tensor"),
    ("tensors/x/like", "y", "input", "'like'"),
    ("tensors/out/like", "z", "input", "a Tensor argument"),
    ("tensors/out/like", 1, "input", "a Tensor argument"),
    ("outputs", ..., "input", "'outputs'"),
    ("outputs", "out", "input", "a list"),
    ("outputs", [], "input", "1 name,"),
    ("outputs", ["out", "out"], "input", "1 name,"),
    ("outputs", ["x"], "input", "nothing else has"),
    ("outputs", [1], "input", "nothing else has"),
    ("outputs", ["result"], "input", "'out'"),
    ("outputs", ["y[0]"], "input", "nothing else has"),
    ("outputs", ["a b"], "input", "nothing else has"),
    ("outputs", ["*s"], "input", "nothing else has"),
    ("scratch", {}, "input", "a list"),
    ("scratch", [5], "input", "name"),
    ("scratch", [{"dtype": "float32", "shape": [1]}], "input", "name"),
    ("scratch", [{"name": "out", "dtype": "float32", "shape": [1]}], "input", "nothing else"),
    ("scratch", [{"name": "t", "dtype": "float32"}], "input", "'shape'"),
    ("scratch", [{"name": "x[0]", "dtype": "float32", "shape": [1]}], "input", "nothing else"),
    ("scratch", [{"name": "", "dtype": "float32", "shape": [1]}], "input", "nothing else"),
    ("scratch", [{"name": "t", "dtype": "float32", "shape": None}], "input", "'shape'"),
    ("scratch", [{"name": "t", "dtype": "float32", "shape": [1], "align": 8}], "input", "align"),
    ("scratch", [{"name": "t", "shape": [1]}], "input", "'dtype'"),
    ("backward", 5, "input", "a string"),
    ("backward", "f", "input", "'ns::name'"),
    ("backward", "", "input", "'ns::name'"),
    ("backward", "a::b.", "input", "'ns::name'"),
    ("backward", "a::b::c", "input", "'ns::name'"),
    ("backward", "a b::c", "input", "'ns::name'"),
    ("jit", 1, "input", "true or false"),
    ("kernels", ..., "input", "'kernels'"),
    ("kernels", [], "input", "1 to 4096"),
    ("kernels/0", "vec_add", "input", "an object"),
    ("kernels/0/nope", 1, "input", "'nope'"),
    ("kernels/0/when", 1, "input", "a condition"),
    ("kernels/0/when", ["lt", ["numel", "out"], 1], "input", "unknown tensor"),
    ("kernels/0/when", ["is", "x", "relu"], "input", "no string"),
    ("kernels/0/images", ..., "input", "'images'"),
    ("kernels/0/images", 0, "input", "a list"),
    ("kernels/0/images", [], "input", "at least one"),
    ("kernels/0/images", [1], "input", "list of 1 image,"),
    ("kernels/0/images", [-1], "input", "list of 1 image,"),
    ("kernels/0/images", [0, 0], "input", "each once"),
    ("kernels/0/images", ["a"], "input", "list of 1 image,"),
    ("kernels/0/kernel", ..., "input", "'kernel'"),
    ("kernels/0/kernel", "vec_ad", "no_kernel", "vec_add"),
    ("kernels/0/args", ..., "input", "'args'"),
    ("kernels/0/args", 5, "input", "a list"),
    ("kernels/0/args", [], "params", "[3] 4 bytes at offset 24"),
    ("kernels/0/args/0", "x", "input", "pointer"),
    ("kernels/0/args/0", [], "input", "pointer"),
    ("kernels/0/args/0", ["pointer"], "input", "a tensor of the op"),
    ("kernels/0/args/0", ["pointer", "z"], "input", "a tensor of the op"),
    ("kernels/0/args/0", ["pointer", 1], "input", "a tensor of the op"),
    ("kernels/0/args/0", ["pointer", "x", 0], "input", "a list, an index"),
    ("kernels/0/args/0", ["address", "x"], "input", "an element"),
    ("kernels/0/args/0", ["address", "z", 0], "input", "an element"),
    ("kernels/0/args/0", ["address", "x", 1.5], "input", "the element's place in memory"),
    (
        "kernels/0/args/0",
        ["address", "x", 0, 1],
        "input",
        "an element, [[first, count, size], ...]",
    ),
    ("kernels/0/args/0", ["address", "x", 0, [], []], "input", "an element, [[first, count"),
    ("kernels/0/args/0", ["address", "x", 0, [[0, 1]]], "input", "[first, count, size]"),
    ("kernels/0/args/0", ["address", "x", 0, [[0, 1, 1.5]]], "input", "its dim's size"),
    ("kernels/0/args/0", ["float128", 1], "input", "float32, ..."),
    ("kernels/0/args/0", ["int32", 1], "params", "expected 8 bytes, got 4 bytes"),
    ("kernels/0/args/3", ["pointer", "x"], "params", "expected 4 bytes, got 8 bytes"),
    ("kernels/0/args/3", ["int64", 1], "params", "The binary says: kernel 'vec_add'"),
    ("kernels/0/args/3", ["int32"], "input", "int32"),
    ("kernels/0/args/3", ["int32", 1, 2], "input", "int32"),
    ("kernels/0/args/3", ["int32", 1.5], "input", "an integer"),
    ("kernels/0/args/3", ["int32", True], "input", "an integer"),
    ("kernels/0/args/3", ["int32", 2**31], "input", "out of range"),
    ("kernels/0/args/3", ["uint32", -1], "input", "out of range"),
    ("kernels/0/args/3", ["float32", 1e39], "input", "out of range"),
    ("kernels/0/args/3", ["float32", ["eq", 1, 2]], "input", "a number"),
    ("kernels/0/args/3", ["bool", 1], "input", "a condition"),
    ("kernels/0/args/3", ["bool", True], "params", "expected 4 bytes, got 1 byte ("),
    ("kernels/0/args/3", ["number", True], "params", "expected 4 bytes, got 1 byte ("),
    ("kernels/0/args/3", ["bytes", "00"], "params", "expected 4 bytes, got 1 byte ("),
    ("kernels/0/args/3", ["bytes", "0"], "input", "two a byte"),
    ("kernels/0/args/3", ["bytes", "0G"], "input", "lower-case hex"),
    ("kernels/0/args/3", ["bytes", "AA"], "input", "lower-case hex"),
    ("kernels/0/args/3", ["struct", 8, []], "params", "expected 4 bytes, got 8 bytes"),
    ("kernels/0/args/3", ["struct", 0, []], "input", "size in bytes"),
    ("kernels/0/args/3", ["struct", 4], "input", "size in bytes"),
    ("kernels/0/args/3", ["struct", 10**9, []], "input", "size in bytes"),
    ("kernels/0/args/3", ["struct", 4, [5]], "input", "offset below 4"),
    ("kernels/0/args/3", ["struct", 4, [[4, ["int8", 1]]]], "input", "offset below 4"),
    ("kernels/0/args/3", ["struct", 4, [[1, ["int32", 1]]]], "params", "passes the end"),
    ("kernels/0/args/3", ["struct", 4, [[0, ["number", 1]]]], "input", "with a size"),
    (
        "kernels/0/args/3",
        ["struct", 4, [[0, ["int16", 1]], [1, ["int8", 1]]]],
        "params",
        "overlaps",
    ),
    ("kernels/0/args/0", ["tensor_map", {"tensor": "x", "box": [8]}], "params", "got 128 bytes"),
    ("kernels/0/args/0", ["tensor_map"], "input", "tensor_map"),
    ("kernels/0/args/0", ["tensor_map", {"box": [8]}], "input", "'tensor'"),
    ("kernels/0/args/0", ["tensor_map", {"tensor": "z", "box": [8]}], "input", "a tensor"),
    ("kernels/0/args/0", ["tensor_map", {"tensor": "x"}], "input", "'box'"),
    ("kernels/0/args/0", ["tensor_map", {"tensor": "x", "box": []}], "input", "1 to 5"),
    ("kernels/0/args/0", ["tensor_map", {"tensor": "x", "box": [1.5]}], "input", "an integer"),
    (
        "kernels/0/args/0",
        ["tensor_map", {"tensor": "x", "box": [8], "swizzle": "96B"}],
        "input",
        "128B",
    ),
    (
        "kernels/0/args/0",
        ["tensor_map", {"tensor": "x", "box": [8], "oob_fill": None}],
        "input",
        "zeros",
    ),
    (
        "kernels/0/args/0",
        ["tensor_map", {"tensor": "x", "box": [8], "element_strides": [9]}],
        "input",
        "1 to 8",
    ),
    (
        "kernels/0/args/0",
        ["tensor_map", {"tensor": "x", "box": [8], "interleave": "32B"}],
        "input",
        "32B",
    ),
    ("kernels/0/args/0", ["tensor_map", {"tensor": "x", "box": [8], "a": 1}], "input", "'a'"),
    ("scratch", [{"name": "s", "dtype": "int32", "shape": [], "zeroed": 1}], "input", "true or"),
    ("kernels/0/args/0", ["workspace"], "input", "workspace"),
    ("kernels/0/args/0", ["workspace", {}], "input", "'bytes'"),
    ("kernels/0/args/0", ["workspace", {"bytes": 1.5}], "input", "an integer"),
    ("kernels/0/args/0", ["workspace", {"bytes": 8, "bytes_per_block": 8}], "input", "'bytes'"),
    ("kernels/0/args/0", ["workspace", {"bytes": 8, "align": 3}], "input", "a power of two"),
    ("kernels/0/args/0", ["workspace", {"bytes": 8, "zeroed": 1}], "input", "true or false"),
    ("kernels/0/args/0", ["workspace", {"bytes": ["numel", "z"]}], "input", "unknown tensor"),
    ("kernels/0/args/3", ["workspace", {"bytes": 8}], "params", "expected 4 bytes, got 8 bytes"),
    ("kernels/0/producer", "triton", "input", "an object"),
    ("kernels/0/group", 1, "input", "none without 'tuned'"),
    ("kernels/0/requires", {}, "input", "a list"),
    ("kernels/0/requires", [1], "input", "an object"),
    ("kernels/0/requires", [{"value": 1, "equals": 1}], "input", "'argument'"),
    ("kernels/0/requires", [{"argument": "n"}], "input", "'value'"),
    ("kernels/0/requires", [{"argument": "n", "value": 1}], "input", "'at_least'"),
    (
        "kernels/0/requires",
        [{"argument": "n", "address_of": "z", "multiple_of": 16}],
        "input",
        "a tensor argument",
    ),
    (
        "kernels/0/requires",
        [{"argument": "n", "address_of": "x", "multiple_of": 0}],
        "input",
        "from 1",
    ),
    (
        "kernels/0/requires",
        [{"argument": "n", "value": 1.5, "multiple_of": 2}],
        "input",
        "an integer",
    ),
    (
        "kernels/0/requires",
        [{"argument": "n", "value": ["numel", "x"], "equals": True}],
        "input",
        "of the type of 'value'",
    ),
    (
        "kernels/0/requires",
        [{"argument": "n", "value": ["numel", "out"], "equals": 1}],
        "input",
        "unknown tensor",
    ),
    (
        "kernels/0/requires",
        [{"argument": "n", "value": 1, "at_least": 2, "at_most": 1}],
        "input",
        "from 2",
    ),
    ("tuned", [], "input", "an object"),
    ("tuned", {"key": [1], "entries": []}, "input", "'otherwise'"),
    ("tuned", {"key": [], "entries": [], "otherwise": 0}, "input", "1 to 32 parts"),
    ("tuned", {"key": [1], "entries": [], "otherwise": 1}, "input", "to 0"),
    ("tuned", {"key": [["dtype", "z"]], "entries": [], "otherwise": 0}, "input", "a tensor"),
    ("tuned", {"key": [["text", "x"]], "entries": [], "otherwise": 0}, "input", "a str"),
    ("tuned", {"key": [1], "entries": [[[1], 1]], "otherwise": 0}, "input", "below 1"),
    ("tuned", {"key": [1], "entries": [[[1, 2], 0]], "otherwise": 0}, "input", "1 value,"),
    ("tuned", {"key": [1], "entries": [[["a"], 0]], "otherwise": 0}, "input", "the key's types"),
    ("tuned", {"key": [1], "entries": [[[1], 0]] * 2, "otherwise": 0}, "input", "each key once"),
    ("kernels/0/grid", ..., "input", "'grid'"),
    ("kernels/0/grid", 5, "input", "three"),
    ("kernels/0/grid", [1, 1], "input", "three"),
    ("kernels/0/grid", [1.5, 1, 1], "input", "an integer"),
    ("kernels/0/grid", [["numel", "z"], 1, 1], "input", "unknown tensor"),
    ("kernels/0/grid", [["cdiv", 1, 1], 1, 1], "input", "unknown operation"),
    ("kernels/0/block", ..., "input", "'block'"),
    ("kernels/0/block", [1, True, 1], "input", "an integer"),
    ("kernels/0/cluster", [1], "input", "three"),
    ("kernels/0/shared_memory", 1.5, "input", "an integer"),
    ("kernels/0/cooperative", "yes", "input", "true or false"),
    ("kernels/0/programmatic_dependent_launch", 0, "input", "true or false"),
    ("kernels/0/priority", 2**31, "input", "an integer"),
    ("kernels/0/priority", 1.0, "input", "an integer"),
]


@pytest.mark.parametrize(("path", "value", "tag", "says"), WRONG)
def test_every_wrong_field_is_refused(path, value, tag: str, says: str) -> None:
    contract = changed(vec_add(), path, value)
    with pytest.raises(errors.Error) as caught:
        define(contract)
    assert caught.value.tag == tag, caught.value
    assert says in str(caught.value)
    if isinstance(contract.get("schema"), str) and contract["schema"].startswith("test_"):
        assert not exists(contract)
        place = path.replace("/0", "[0]").replace("/", ".").split(".")[0].split("[")[0]
        assert place in str(caught.value) or "vec_add" in str(caught.value)


TYPED = "(Tensor x, Tensor? o, Tensor[] l, int n, float f, str t, int? q) -> Tensor"


def typed(**tensors) -> dict:
    contract = vec_add()
    contract["schema"] = new_name() + TYPED
    contract["tensors"] = {
        "x": {"dtype": "float32", "shape": ["m", "*s"]},
        "o": {"dtype": "float32", "shape": ["k"]},
        "l": {"dtype": "float32", "shape": ["j"]},
        "out": {"dtype": "float32", "shape": ["m", "n"]},
    } | tensors
    pointers = [["pointer", name] for name in ("x", "x", "out")]
    contract["kernels"][0]["args"] = [*pointers, ["int32", 1]]
    contract["kernels"][0]["grid"] = [1, 1, 1]
    return contract


def test_expressions_may_read_names_that_every_call_binds() -> None:
    """Each name is known where a call is sure to have it."""
    defined(typed())
    good = [
        ["number", "m"], ["number", "n"], ["number", "len(l)"], ["number", "q"],
        ["size", "l[3]", 0], ["select", ["number", "q?"], 1, 2], ["select", ["is", "t", "a"], 1, 2],
        ["select", ["defined", "o"], ["numel", "o"], 0], ["numel", "out"],
    ]  # fmt: skip
    for tree in good:
        defined(changed(typed(), "kernels/0/args/3", ["int32", tree]))
    bad = [
        ["number", "k"], ["number", "j"], ["number", "t"], ["number", "s"], ["number", "f?"],
        ["number", "n?"],
        ["number", "len(x)"], ["number", "x"], ["numel", "l"], ["size", "x[0]", 0], ["number", ""],
        ["numel", ""], ["select", ["is", "n", "a"], 1, 2], ["select", ["is", "t", 5], 1, 2],
        ["size", "l[03]", 0], ["size", "l[-1]", 0], ["size", "l[]", 0], ["number", "f"],
    ]  # fmt: skip
    for tree in bad:
        with pytest.raises(errors.InputError):
            define(changed(typed(), "kernels/0/args/3", ["int32", tree]))
    shapes = [["k"], ["j"], ["*u"], ["*n"], ["t"], ["f"], ["q"], ["o"], [["number", "k"]]]
    shapes.append([["numel", "l[0]"], "k"])
    for shape in shapes:
        with pytest.raises(errors.InputError):
            define(typed(out={"dtype": "float32", "shape": shape}))
    with pytest.raises(errors.InputError, match="always given"):
        define(typed(out={"dtype": "float32", "like": "o"}))
    with pytest.raises(errors.InputError, match="may have gaps"):
        define(
            typed(
                x={"dtype": "float32", "shape": ["m", "*s"], "layout": "rows"},
                out={"dtype": "float32", "like": "x"},
            )
        )
    for shape, right in ((None, True), (["m", "*s"], True), (["m"], False)):
        contract = typed(out={"dtype": "float32", "shape": shape, "like": "x"})
        if right:
            defined(contract)
            continue
        with pytest.raises(errors.InputError, match="beside 'like'"):
            define(contract)
    with pytest.raises(errors.InputError, match="bound by any argument"):
        contract = typed(o={"dtype": "T", "shape": None}, out={"dtype": "T", "shape": ["m"]})
        define(contract | {"dtypes": {"T": ["float16"]}})


def test_items_of_lists_are_passed_by_index_only() -> None:
    contract = typed()
    pointer = "kernels/0/args/0"
    defined(changed(contract, pointer, ["pointer", "l", 2]))
    for wrong in (["pointer", "l[2]"], ["pointer", "l[2]", 0], ["pointer", "l"]):
        with pytest.raises(errors.InputError, match="a list, an index"):
            define(changed(typed(), pointer, wrong))
    # No scratch takes an item's name, either.
    contract = typed()
    contract["scratch"] = [{"name": "l[2]", "dtype": "float32", "shape": [1]}]
    with pytest.raises(errors.InputError, match="nothing else has"):
        define(changed(contract, pointer, ["pointer", "l", 2]))


SPACES = ["aten", "prim", "prims", "cubin", "onnx", "quantized", "inductor"]


@pytest.mark.parametrize("space", SPACES)
def test_namespaces_that_are_taken(space: str) -> None:
    with pytest.raises(errors.InputError, match="namespace that is taken"):
        define(vec_add(f"{space}::test_contract"))
    assert not hasattr(getattr(torch.ops, space), "test_contract")


EFFECTS = [
    # schema, backward, what the error says
    ("(Tensor x, Tensor y) -> ()", None, "returns nothing and changes nothing"),
    ("(Tensor x, Tensor y) -> ()", "a::b", "returns nothing and changes nothing"),
    ("(Tensor x, Tensor(a!) y) -> ()", "a::b", "changes its arguments"),
    ("(Tensor x, Tensor(a!) y) -> Tensor", "a::b", "changes its arguments"),
    ("(Tensor x, *, Tensor y) -> Tensor", "a::b", "keyword-only tensor 'y'"),
    ("(Tensor x, *, Tensor? y=None) -> Tensor", "a::b", "keyword-only tensor 'y'"),
    ("(Tensor x, Tensor(a!)? y) -> Tensor", None, "no single tensor"),
    ("(Tensor x, Tensor y) -> (Tensor out, Tensor)", None, "does not name its outputs"),
    ("(Tensor x, Tensor y) -> Tensor", "a::b.c", None),
    ("(Tensor x, Tensor y, *, int n=1) -> Tensor", "a::b", None),
    ("(Tensor x, Tensor(a!) y) -> ()", None, None),
    ("(Tensor x, *, Tensor y) -> Tensor", None, None),
]


@pytest.mark.parametrize(("schema", "backward", "says"), EFFECTS)
def test_schemas_that_can_have_a_backward(
    schema: str, backward: str | None, says: str | None
) -> None:
    contract = vec_add() | {"schema": new_name() + schema, "backward": backward}
    if schema.endswith("()"):
        contract["outputs"] = []
        del contract["tensors"]["out"]
        contract["kernels"][0]["args"][2] = ["pointer", "y"]
    if says is None:
        defined(contract)
        return
    with pytest.raises(errors.InputError, match=says):
        define(contract, vec_add())
    assert not exists(contract)
    assert contract["schema"].split("(")[0] not in contracts.ops()


def test_later_arguments_bind_names_for_earlier_expressions() -> None:
    contract = vec_add()
    contract["tensors"]["x"]["shape"] = [["mul", 2, ["number", "k"]]]
    contract["tensors"]["y"]["shape"] = ["k"]
    contract["tensors"]["out"]["shape"] = ["k"]
    defined(contract)


def test_an_op_needs_a_tensor() -> None:
    contract = vec_add()
    contract["schema"] = new_name() + "(int n) -> Tensor"
    del contract["tensors"]["x"], contract["tensors"]["y"]
    with pytest.raises(errors.InputError, match="takes no tensor"):
        define(contract)
