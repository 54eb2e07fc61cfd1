"""Mistakes in calling attention: the same tagged error in every grad mode, with and without
data."""

from __future__ import annotations

import random

import pytest
import torch
from ops.attention_samples import attention, make_qkv, ops, random_case
from ops.test_layout_errors import KINDS
from ops.test_op_errors import MODES, call
from torch._subclasses.fake_tensor import FakeTensorMode

Q, K, V = (2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)


def ones(*shape: int, dtype=torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def of_public(device: str) -> dict:
    """Arguments of the public op, and a part of the error's message."""

    def qkv(q=Q, k=K, v=V, dtype=torch.float32):
        return [ones(*shape, dtype=dtype, device=device) for shape in (q, k, v)]

    mask = ones(5, 7, device=device)
    other = "meta" if device == "cpu" else "cpu"
    return {
        "too few dims": ((*qkv(q=(8,)),), {}, "expected at least 2, got 1"),
        "head_dim": ((*qkv(k=(2, 4, 7, 9)),), {}, "expected 8, got 9"),
        "lengths": ((*qkv(v=(2, 4, 6, 6)),), {}, "expected 7, got 6"),
        "heads": ((*qkv(k=(2, 2, 7, 8), v=(2, 2, 7, 6)),), {}, "enable_gqa=True"),
        "heads of key and value": ((*qkv(k=(2, 2, 7, 8)),), {}, "query 4, key 2, value 4"),
        "group": (
            (*qkv(k=(2, 3, 7, 8), v=(2, 3, 7, 6)),),
            {"enable_gqa": True},
            "that divide those of query",
        ),
        "group of key alone": (
            (*qkv(k=(2, 3, 7, 8)),),
            {"enable_gqa": True},
            "query 4, key 3, value 4",
        ),
        "group without heads": (
            (*qkv((5, 8), (7, 8), (7, 6)),),
            {"enable_gqa": True},
            "needs a dimension of heads",
        ),
        "batches": ((*qkv(q=(3, 4, 5, 8)),), {}, "3 and 2"),
        "dtype": ((*qkv(dtype=torch.int64),), {}, "got int64"),
        "other dtype": ((*qkv()[:2], ones(*V, dtype=torch.float16, device=device)), {}, "float16"),
        "other device": ((*qkv()[:2], ones(*V, device=other)), {}, other),
        "mask and causal": ((*qkv(), mask, 0.0, True), {}, "is_causal"),
        "dtype of mask": ((*qkv(), mask.double()), {}, "got float64"),
        "integer mask": ((*qkv(), mask.long()), {}, "got int64"),
        "shape of mask": ((*qkv(), mask[:4]), {}, "(2, 4, 5, 7), got (4, 7)"),
        "rank of mask": ((*qkv(), mask[None, None, None]), {}, "got (1, 1, 1, 5, 7)"),
        "device of mask": ((*qkv(), mask.to(other)), {}, other),
        "dropout": ((*qkv(), None, 1.5), {}, "0 to 1, got 1.500000"),
        "negative dropout": ((*qkv(), None, -0.5), {}, "0 to 1, got -0.500000"),
        "dropout of NaN": ((*qkv(), None, float("nan")), {}, "0 to 1"),
        "many dims": ((ones(*(1,) * 65, device=device), *qkv()[1:]), {}, "at most 64, got 65"),
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", of_public("cpu"))
def test_mistakes(case, mode, device):
    args, options, part = of_public(device)[case]
    if not args[0].is_floating_point() and MODES[mode] is None:
        pytest.skip("torch.func.grad itself refuses integers")
    text = call(mode, lambda *args: attention(*args, **options), *args)
    op = "a tensor argument" if case == "many dims" else "scaled_dot_product_attention"
    assert text.startswith(f"torch_cubin [input]: {op} ")
    assert part in text
    assert "expected" in text


def of_forward(device: str) -> dict:
    def options(**given):
        return given

    rows, offsets = ones(6, 2, 8, device=device), torch.tensor([0, 2, 6], device=device).int()
    qkv = [ones(*shape, device=device) for shape in (Q, K, V)]
    packed = [rows, rows, rows]
    both = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    return {
        "window": (qkv, options(window_left=-2), "-2 left, -1 right"),
        "softcap": (qkv, options(softcap=-1.0), "got -1."),
        "softcap of a denormal": (qkv, options(softcap=1e-50), "got 1e-50"),
        "softcap of NaN": (qkv, options(softcap=float("nan")), "'softcap'"),
        "seed missing": (qkv, options(dropout_p=0.5), "needs a seed"),
        "seeds": (
            qkv,
            options(dropout_p=0.5, dropout_seed=torch.zeros(2, dtype=torch.int64, device=device)),
            "int64 (2,)",
        ),
        "dtype of seed": (
            qkv,
            options(dropout_p=0.5, dropout_seed=torch.zeros(1, device=device)),
            "float32 (1,)",
        ),
        "sinks": (qkv, options(sinks=ones(3, device=device)), "expected (4,), got (3,)"),
        "sinks of batches": (qkv, options(sinks=ones(2, 4, device=device)), "got (2, 4)"),
        "dtype of sinks": (qkv, options(sinks=ones(4, device=device).half()), "got float16"),
        "slopes": (qkv, options(alibi_slopes=ones(3, 4, device=device)), "or (batch, heads)"),
        "one cu_seqlens": (packed, options(cu_seqlens_q=offsets), "both or none"),
        "dtype of cu_seqlens": (
            packed,
            {**both, "cu_seqlens_k": offsets.long()},
            "expected int32, got int64",
        ),
        "shape of cu_seqlens": (packed, {**both, "cu_seqlens_k": offsets[:2]}, "(3,) and (2,)"),
        "rank of packed": (qkv, both, "wrong rank for packed sequences"),
        "mask of packed": (packed, {**both, "attn_mask": ones(6, 6, device=device)}, "a mask"),
        "heads of packed": ([rows, rows[:, :1], rows], both, "need no broadcasting"),
        "rows of packed queries": (
            [rows[:1].expand(2**31, -1, -1), rows, rows],
            {**both, "max_seqlen_q": 5, "max_seqlen_k": 5},
            "too many rows in its packed sequences",
        ),
        "rows of packed queries that maps have no place for": (
            [rows[:1].expand(0x7FFF0000, -1, -1), rows, rows],
            {**both, "max_seqlen_q": 5, "max_seqlen_k": 5},
            "less than 2147418112 rows",
        ),
        "rows of packed keys": (
            [rows, *[rows[:1].expand(2**31 - 4, -1, -1)] * 2],
            {**both, "max_seqlen_q": 5, "max_seqlen_k": 5},
            "too many rows in its packed sequences",
        ),
    }


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
@pytest.mark.parametrize("case", of_forward("cpu"))
def test_mistakes_in_options(case, mode, device):
    args, options, part = of_forward(device)[case]
    text = call(mode, lambda *args: ops.attention_forward(*args, **options), *args)
    assert text.startswith("torch_cubin [input]: attention_forward ")
    assert part in text
    inputs = [arg.requires_grad_() for arg in args] if mode == "grad" else args
    assert call(mode, lambda *args: ops.attention_forward(*args, **options), *inputs) == text


@pytest.mark.parametrize("which", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize(
    "wrong", [[0, 2, 7], [-1, 2, 6], [0, 4, 2], [7, 7, 7], [0, 2**31 - 1, -(2**31)]], ids=str
)
def test_the_reference_refuses_invalid_offsets(wrong, which):
    """On a GPU only the kernels read them, whose results are then NaN."""
    rows, right = ones(6, 2, 8, device="cpu"), torch.tensor([0, 2, 6]).int()
    options = {"cu_seqlens_q": right, "cu_seqlens_k": right, which: torch.tensor(wrong).int()}
    grads = (rows, rows, rows, rows, rows, torch.zeros(2, 6))
    for op, args in ((ops.attention_forward, grads[:3]), (ops.attention_backward, grads)):
        text = call("no_grad", lambda *args, op=op: op(*args, **options), *args)
        assert text.startswith(f"torch_cubin [input]: attention argument '{which}' is no list of")
    eights = [rows.repeat(1, 1, 2).to(torch.float8_e4m3fn)] * 3
    text = call("no_grad", lambda *args: ops.attention_forward_e4m3(*args, **options), *eights)
    assert text.startswith(f"torch_cubin [input]: attention argument '{which}' is no list of")


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
@pytest.mark.parametrize(
    ("dtype", "wrong", "expected"),
    [
        (torch.float32, torch.float16, "bool or float32"),
        (torch.bfloat16, torch.float64, "bool, bfloat16 or float32"),
    ],
)
def test_the_error_for_a_wrong_mask_dtype_lists_right_ones(dtype, wrong, expected, mode, device):
    query, mask = ones(2, 3, 8, dtype=dtype, device=device), ones(3, 3, dtype=wrong, device=device)
    text = call(mode, attention, query, query, query, mask)
    assert f"'attn_mask' has a wrong dtype: expected {expected}, got {str(wrong)[6:]}." in text


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
def test_mistakes_in_backward(mode, device):
    args = make_qkv((Q, K, V), device)
    out, logsumexp = ops.attention_forward(*args)
    for gradient, saved, part in (
        (out[..., :5], (out, logsumexp), "'grad_out'"),
        (out, (out[:1], logsumexp), "'out'"),
        (out, (out, logsumexp[..., :4]), "'logsumexp'"),
        (out.half(), (out, logsumexp), "got float16"),
        (out, (out, logsumexp.double()), "got float64"),
    ):
        text = call(mode, ops.attention_backward, gradient, *args, *saved)
        assert text.startswith("torch_cubin [input]: attention_backward")
        assert part in text
        # Gradients that are to be differentiated are composed, and read neither of the two.
        inputs = [arg.detach().requires_grad_(mode == "grad") for arg in args]
        assert call(mode, ops.attention_backward, gradient, *inputs, *saved) == text


@pytest.mark.filterwarnings("ignore")  # these layouts are prototypes, PyTorch says
@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
@pytest.mark.parametrize("kind", ["coo", "csr", "nested"])
def test_tensors_that_are_not_dense(kind, mode, device):
    make = KINDS[kind][0]
    dense = ones(5, 8, device=device)
    other = make(dense)
    for args, name in (
        ((other, dense, dense), "query"),
        ((dense, other, dense), "key"),
        ((dense, dense, other), "value"),
        ((dense, dense, dense, make(ones(5, 5, device=device))), "attn_mask"),
    ):
        text = call(mode, attention, *args)
        assert text.startswith("torch_cubin [input]: ")
        assert f"argument '{name}' has an unsupported layout" in text
    text = call(mode, lambda x: ops.attention_forward(dense, dense, dense, sinks=x), other)
    assert "'sinks' has an unsupported layout" in text


def refused(op, args, options) -> str:
    with pytest.raises(RuntimeError) as caught:
        op(*args, **options)
    return str(caught.value).replace("meta", "cpu").split("\n\nAt:")[0].strip()


@pytest.mark.parametrize("grad", [False, True])
def test_fake_and_real_refuse_alike(grad):
    with torch.set_grad_enabled(grad):
        for op, cases in (
            (attention, of_public("cpu")),
            (ops.attention_forward, of_forward("cpu")),
        ):
            for case, (args, options, _) in cases.items():
                if "device" in case:
                    continue
                real = refused(op, args, options)
                fakes = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in args]
                named = {
                    name: x.to("meta") if isinstance(x, torch.Tensor) else x
                    for name, x in options.items()
                }
                assert refused(op, fakes, named) == real, case


def spoiled(rng: random.Random) -> tuple[list, dict]:
    """A random call of attention_forward that is often wrong, in a size, a dtype or an option."""
    shapes, options = random_case(rng)
    shapes = [list(shape) for shape in shapes]
    if rng.random() < 0.6:
        shape = rng.choice(shapes)
        shape[rng.randrange(len(shape))] = rng.randrange(5)
    if rng.random() < 0.1:
        del rng.choice(shapes)[0]
    dtypes = [torch.float32 if rng.random() < 0.95 else torch.float64 for _ in range(3)]
    args = [ones(*shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    rows, columns = (shape[-2] if len(shape) > 1 else 1 for shape in shapes[:2])
    for name, value in {
        "attn_mask": ones(rng.choice((1, rows, 3)), rng.choice((1, columns, 2))),
        "softcap": rng.choice((0.0, 2.5, -1.0)),
        "window_left": rng.randrange(-2, 4),
        "sinks": ones(rng.choice((1, 2, 3, 4))),
        "alibi_slopes": ones(*rng.choice(((3,), (4,), (2, 3), (1, 2, 4)))),
        "enable_gqa": True,
    }.items():
        if rng.random() < 0.12:
            options[name] = value
    return args, options


def outcome(args: list, options: dict) -> object:
    try:
        results = ops._attention_forward(*args, **options)
    except RuntimeError as error:
        return str(error).replace("meta", "cpu").split("\n\nAt:")[0].strip()
    return [(tuple(result.shape), result.stride(), result.dtype) for result in results]


def test_fake_and_real_agree_on_random_calls():
    refusals: set[str] = set()
    for seed in range(4000):
        args, options = spoiled(random.Random(seed))
        fakes = [arg.to("meta") for arg in args]
        named = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        real, fake = outcome(args, options), outcome(fakes, named)
        assert real == fake, f"seed {seed}: {[tuple(arg.shape) for arg in args]}, {options}"
        if isinstance(real, str):
            refusals.add(real.split(":")[1])
    assert len(refusals) > 12, refusals  # kinds of mistakes


def test_mistakes_inside_a_graph_name_the_op(device):
    args = make_qkv((Q, K, (2, 4, 6, 6)), device)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(
        Exception, match=r"\]: scaled_dot_product_attention.*'value'.*expected 7, got 6"
    ):
        compiled(*args)
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match=r"\]: scaled_dot_.*'value'"):
        attention(*(mode.from_tensor(arg) for arg in args))


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
def test_an_error_leaves_nothing_behind(mode, device):
    """A later failure of PyTorch's is not reported with the text of an earlier one of ours."""
    args = make_qkv((Q, K, V), device)
    call(mode, attention, *args[:2], args[0])
    with MODES[mode]():
        assert attention(*args).shape == (2, 4, 5, 6)
    for wrong in ((args[0],), (*args, 3)):
        with pytest.raises((RuntimeError, TypeError), match="scaled_dot_product_attention"):
            attention(*wrong)


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
def test_no_argument_is_kept_alive(mode, device):
    args = make_qkv((Q, K, V), device)
    mask = torch.zeros(5, 7, device=device)
    wrong = mask[:4]
    tensors = [*args, mask]

    def uses() -> list[int]:
        storages = [tensor.untyped_storage() for tensor in tensors]
        return [torch._C._storage_Use_Count(storage._cdata) for storage in storages]

    before = uses()
    with MODES[mode]():
        for _ in range(5):
            attention(*args, mask)
            attention(*args, dropout_p=0.5)
            ops.attention_forward(*args, mask)
            call(mode, attention, *args, wrong)
            call(mode, attention, *args[:2], args[0])
            call(mode, attention, *args, None, 2.0)
            call(mode, ops.attention_forward, *args, wrong)
    assert uses() == before
