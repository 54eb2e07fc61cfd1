"""A user's mistakes: tagged, with shapes, dtypes and devices shown, in every grad mode."""

from __future__ import annotations

import contextlib

import pytest
import torch
from ops.samples import linear, make, matmul

from torch_cubin import batch_invariant

MODES = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "grad of func": None,
}


def call(mode: str, op, *args) -> str:
    """The text of the error that the op raises in that mode."""
    with pytest.raises(RuntimeError) as caught:
        if mode == "grad of func":
            torch.func.grad(lambda x: op(x, *args[1:]).sum())(args[0])
        else:
            with MODES[mode]():
                op(*args)
    return str(caught.value)


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", [matmul, matmul.default, linear, linear.default], ids=str)
def test_wrong_shapes(op, mode, device):
    text = call(mode, op, ones(2, 3, device=device), ones(5, 7, device=device))
    assert text.startswith("torch_cubin [input]: ")
    assert "(2, 3)" in text
    assert "(5, 7)" in text
    assert "expected" in text
    assert "got" in text


@pytest.mark.parametrize("mode", MODES)
def test_wrong_batches(mode, device):
    text = call(mode, matmul, ones(2, 4, 2, 3, device=device), ones(3, 4, 3, 5, device=device))
    assert text.startswith("torch_cubin [input]: ")
    for part in ("(2, 4, 2, 3)", "(3, 4, 3, 5)", "broadcast", "2 and 3"):
        assert part in text


@pytest.mark.fault_case(41)
@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.int64, torch.int8, torch.bool, torch.uint16, torch.complex32, torch.complex64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
        torch.float8_e8m0fnu,
    ],
    ids=str,
)
@pytest.mark.parametrize("op", [matmul, linear], ids=str)
def test_unsupported_dtypes(op, dtype, mode, device):
    x = torch.zeros(2, 2, device=device).to(dtype)
    text = call(mode, op, x, x)
    assert text.startswith("torch_cubin [input]: ")
    assert f"got {str(dtype).removeprefix('torch.')}. " in text
    for supported in ("float16", "bfloat16", "float32", "float64"):
        assert supported in text


@pytest.mark.fault_case(41)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", [matmul, linear], ids=str)
def test_mixed_dtypes(op, mode, device):
    x, y = ones(2, 2, device=device), ones(2, 2, dtype=torch.float64, device=device)
    text = call(mode, op, x, y)
    assert text.startswith("torch_cubin [input]: ")
    assert "float32" in text
    assert "float64" in text


@pytest.mark.parametrize("mode", MODES)
def test_mixed_dtypes_of_the_bias(mode, device):
    x, bias = ones(2, 2, device=device), ones(2, dtype=torch.float16, device=device)
    text = call(mode, linear, x, x, bias)
    assert text.startswith("torch_cubin [input]: ")
    assert "'bias'" in text


@pytest.mark.fault_case(37)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", [matmul, linear], ids=str)
def test_mixed_devices(op, mode, device):
    x = ones(2, 2, device=device)
    others = ["meta"] if device == "cpu" else ["meta", "cpu"]
    for other in others:
        text = call(mode, op, x, ones(2, 2, device=other))
        assert text.startswith("torch_cubin [input]: ")
        assert device in text
        assert other in text


@pytest.mark.parametrize("mode", MODES)
def test_wrong_bias(mode, device):
    x = ones(2, 3, device=device)
    text = call(mode, linear, x, ones(4, 3, device=device), ones(5, device=device))
    assert text.startswith("torch_cubin [input]: ")
    assert "(5,)" in text
    assert "(4,)" in text


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
def test_no_matrix_product_of_scalars(mode, device):
    scalar, vector = make((), device), make((3,), device)
    for args in ((scalar, vector), (vector, scalar), (scalar, scalar)):
        text = call(mode, matmul, *args)
        assert text.startswith("torch_cubin [input]: ")
        assert "()" in text


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
def test_an_error_leaves_nothing_behind(mode, device):
    """A later failure of PyTorch's is not reported with the text of an earlier one of ours."""
    x = ones(2, 3, device=device)
    call(mode, matmul, x, x)
    with MODES[mode]():
        assert matmul(x, x.t()).shape == (2, 2)
    text = call(mode, matmul, x.to_sparse(), ones(3, 4, device=device))
    assert "(2, 3) and (2, 3)" not in text
    with pytest.raises((RuntimeError, TypeError), match="cubin::matmul"):
        matmul(x)
    with pytest.raises((RuntimeError, TypeError), match="cubin::matmul"):
        matmul(x, 3)


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
def test_no_argument_is_kept_alive(mode, device):
    args = [ones(2, 3, device=device), ones(4, 3, device=device), ones(4, device=device)]
    wrong = ones(5, device=device)

    def uses() -> list[int]:
        storages = [tensor.untyped_storage() for tensor in (*args, wrong)]
        return [torch._C._storage_Use_Count(storage._cdata) for storage in storages]

    before = uses()
    with MODES[mode]():
        for _ in range(10):
            linear(*args)
            matmul(args[0], args[1].t())
            call(mode, linear, *args[:2], wrong)
            call(mode, matmul, *args[:2])
    assert uses() == before


# By op: the tensors that a call must give, by name.
def needed(op: str, device: str) -> dict[str, torch.Tensor]:
    if op in ("matmul", "linear", "addmm"):
        names = {"matmul": "self other", "linear": "input weight", "addmm": "input mat1 mat2"}[op]
        return {name: ones(2, 2, device=device) for name in names.split()}
    if op == "flash_attention_with_kvcache":
        half = ones(1, 4, 2, 64, dtype=torch.bfloat16, device=device)
        return {"q": half, "k_cache": half, "v_cache": half}
    tensors = {name: ones(1, 2, 4, 8, device=device) for name in ("query", "key", "value")}
    if op == "attention_backward":
        out, logsumexp = torch.ops.cubin.attention_forward(**tensors)
        tensors |= {"grad_out": out, "out": out, "logsumexp": logsumexp}
    return tensors


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
@pytest.mark.parametrize(
    "op",
    [
        *("matmul", "linear", "addmm", "scaled_dot_product_attention", "attention_forward"),
        *("attention_backward", "flash_attention_with_kvcache"),
    ],
)
def test_the_error_for_none_names_the_tensor(op, mode, device):
    function, tensors = getattr(torch.ops.cubin, op), needed(op, device)
    for name in tensors:
        with pytest.raises(RuntimeError) as caught, MODES[mode]():
            function(**{**tensors, name: None})
        text = str(caught.value)
        assert text.startswith(f"torch_cubin [input]: {op} argument '{name}' is missing"), text
        assert "got None" in text
        with pytest.raises(RuntimeError) as caught, MODES[mode]():
            function(**{**tensors, name: [1.0]})
        assert f"'{name}'" in str(caught.value)  # PyTorch's own text


def test_an_error_for_none_keeps_no_other_tensor_alive(device):
    x = ones(2, 2, 4, 8, device=device)
    storage = x.untyped_storage()._cdata
    before = torch._C._storage_Use_Count(storage)
    attention = torch.ops.cubin.scaled_dot_product_attention
    for _ in range(3):
        for function, args, options in (
            (matmul, (x, None), {}),
            (linear, (None, x, x), {}),
            (linear, (x, None, x), {"activation": "relu"}),
            (attention, (x, None, x, x), {"dropout_p": 0.5}),
            (attention, (None, x, x, x), {"dropout_p": 0.5}),
            (torch.ops.cubin.flash_attention, (None, x, x), {}),
        ):
            with pytest.raises(RuntimeError, match=r"is missing: expected a tensor, got None"):
                function(*args, **options)
    assert torch._C._storage_Use_Count(storage) == before


def test_none_for_a_tensor_is_refused_under_transforms(device):
    x = ones(2, 2, device=device)
    for call in (
        lambda: matmul(None, None),
        lambda: torch.vmap(lambda a: matmul(None, a))(x),
        lambda: torch.func.grad(lambda a: matmul(None, a).sum())(x),
        lambda: matmul(None, x.to("meta")),
        lambda: matmul(None, x.to_sparse()),
    ):
        with pytest.raises(RuntimeError, match=r"\[input\]: matmul argument 'self' is missing"):
            call()


def test_errors_in_backward(device):
    """A wrong gradient is torch's to refuse, before ours."""
    x = ones(2, 3, device=device).requires_grad_()
    out = matmul(x, ones(3, 4, device=device))
    with pytest.raises(RuntimeError, match="[Mm]ismatch in shape"):
        out.backward(ones(2, 5, device=device))


def test_an_error_of_a_saved_tensor_hook_keeps_its_text(device):
    def refuse(tensor):
        raise ValueError("nothing may be saved here")

    x = ones(2, 3, device=device).requires_grad_()
    with (
        torch.autograd.graph.saved_tensors_hooks(refuse, lambda t: t),
        pytest.raises(RuntimeError, match="nothing may be saved here"),
    ):
        matmul(x, x.t())


class Mine(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no"), "ValueError: no"),
        (KeyError("k"), "KeyError: 'k'"),
        (Mine(), "Mine"),
        (SystemExit(3), "SystemExit: 3"),
        (RuntimeError("as it is"), "as it is"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "CUDA out of memory. Tried"),
    ],
    ids=repr,
)
def test_an_error_of_the_users_names_its_type(error, text, device):
    def refuse(tensor):
        raise error

    x = ones(2, 3, device=device).requires_grad_()
    with (
        torch.autograd.graph.saved_tensors_hooks(refuse, lambda t: t),
        pytest.raises(RuntimeError) as caught,
    ):
        matmul(x, x.t())
    assert str(caught.value).removeprefix(f"{__name__}.").splitlines()[0] == text


def test_ctrl_c_is_not_swallowed(fresh_python):
    """Not even where every RuntimeError is: the signal comes again, after the call."""
    code = """
import signal, time, torch, torch_cubin

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored

def interrupted(tensor):
    signal.raise_signal(signal.SIGINT)
    return tensor

x = torch.ones(2, 3, requires_grad=True)
try:
    with torch.autograd.graph.saved_tensors_hooks(interrupted, lambda t: t):
        try:
            torch.ops.cubin.matmul(x, x.t())
        except RuntimeError as error:
            print(str(error).splitlines()[0], flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = fresh_python.run(code, timeout=50)
    assert done.stdout.split() == ["KeyboardInterrupt", "interrupted"], done.stderr


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
def test_no_memory_on_the_cpu(mode):
    if torch.__version__ < torch.torch_version.TorchVersion("2.13"):
        pytest.skip("the C API of this torch does not say why an operator failed")
    row = ones(1)
    text = call(mode, matmul, row.expand(2**24, 1), row.expand(1, 2**24))  # past any address
    assert text.startswith("torch_cubin [oom]: ")
    with batch_invariant():  # the operands become float64, and a broadcast one is no view then
        text = call(mode, matmul, ones(2, 1, 1, 4), ones(1).expand(2**44, 4, 1))
    assert text.startswith("torch_cubin [oom]: PyTorch's aten::to failed")
    # What the references ask of PyTorch's stable ABI, whose own errors have no tag.
    past = ones(1).expand(2**46, 1)
    wanted = "torch_cubin [oom]: PyTorch's aten::new_empty failed: expected a result, got "
    with batch_invariant():
        for op in (linear, matmul):
            text = call(mode, op, past, ones(1, 1))
            assert text.startswith("torch_cubin [oom]: PyTorch's aten::to failed")
    addmm = torch.ops.cubin.addmm
    text = call(mode, lambda a, b, c: addmm(a, b, c, beta=1, alpha=0), ones(1), past, ones(1, 1))
    assert text.startswith(wanted)


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
def test_too_many_dimensions(mode, device):
    many, matrix = ones(*[1] * 72, device=device), ones(1, 1, device=device)
    for args in ((matmul, many, matrix), (matmul, matrix, many), (linear, many, matrix)):
        text = call(mode, *args)
        assert text.startswith("torch_cubin [input]: a tensor argument has too many dimensions: ")
        assert "expected at most 64, got 72. " in text
    most = many[(0,) * 8]
    assert matmul(most, matrix).dim() == matmul(matrix, most).dim() == 64
    assert linear(most, matrix).dim() == 64
