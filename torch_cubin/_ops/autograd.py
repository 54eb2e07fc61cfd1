"""Derivatives of matmul and linear, reverse and forward mode, correct under torch.func transforms.

`cubin::_name_autograd` gets a kernel on its Autograd key. Its Function's forward calls the same op
again below autograd, so that the next outer transform sees a differentiable op, and its formulas
call the public ops, so that derivatives of every order compose. Neither register_autograd (zero
tangents, no torch.func) nor an ordinary autograd.Function (no kernel at this key) supports that.
"""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor

from torch_cubin._ops import checks
from torch_cubin._ops.batch_invariant import batch_invariant, is_batch_invariant
from torch_cubin._pytorch import transforms

matmul = torch.ops.cubin.matmul.default
linear = torch.ops.cubin.linear.default
addmm = torch.ops.cubin.addmm.default
matmul_autograd = torch.ops.cubin._matmul_autograd.default
linear_autograd = torch.ops.cubin._linear_autograd.default
activation_autograd = torch.ops.cubin._linear_activation_autograd.default
addmm_autograd = torch.ops.cubin._addmm_autograd.default
addmm_dtype_autograd = torch.ops.cubin._addmm_dtype_autograd.default
linear_activation_aux = torch.ops.cubin._linear_activation_aux.default
weight_and_bias_gradient = torch.ops.cubin._weight_and_bias_gradient.default


class _Recomputations(threading.local):
    """Of checkpointed regions, in this thread: how many have ended within a call of apply()."""

    ended = 0


recomputations = _Recomputations()


class _Modes(threading.local):
    """Both gradient modes around the innermost call of apply() in a transform, in this thread:
    those of outer levels."""

    grad, forward_grad = True, True


_modes = _Modes()


def call_below_autograd(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `op` without recording a graph at this level, so that outer levels still see it."""
    if not transforms.transforms_active():
        with transforms.below_autograd():
            return op(*args, **kwargs)
    with transforms.below_autograd(), _outer_levels():
        return op(*args, **kwargs)


@contextlib.contextmanager
def _outer_levels() -> Iterator[None]:
    """Both gradient modes as they were around the call, inside a transform.

    NOTE: torch disables them around `forward` and `jvp` for the current level. Outer levels need
    them: without this, a hessian or a jvp of a jvp is silently wrong. But no_grad() and
    inference_mode() within a function hold for outer levels, too.
    """
    if not transforms.transforms_active():
        yield
        return
    with (
        torch.set_grad_enabled(_modes.grad),
        transforms.set_forward_grad_enabled(_modes.forward_grad),
    ):
        yield


def _primal(tensor: Tensor) -> Tensor:
    """The tensor without its tangent at the current level, whose derivative is being computed."""
    return forward_ad.unpack_dual(tensor).primal


def apply(
    function: Any, op: Callable[..., Any], *args: Tensor | None, rest: tuple[Any, ...] = ()
) -> Any:
    """The kernel on the Autograd key, with a fast path for calls without a derivative.

    `rest` is only for `function`.
    """
    made: list[Tensor] = []
    try:
        if transforms.transforms_active():
            before = _modes.grad, _modes.forward_grad
            _modes.grad = torch.is_grad_enabled()
            _modes.forward_grad = transforms.is_forward_grad_enabled()
            try:
                with transforms.enable_single_level():
                    return function.apply(made, *args, *rest)
            finally:
                _modes.grad, _modes.forward_grad = before
        if transforms.dual_level_is_open() or _requires_grad(args):
            return function.apply(made, *args, *rest)
        with transforms.below_autograd():
            return op(*args)
    except transforms.StopRecomputation:
        # NOTE: non-reentrant checkpointing ends its recomputation with this exception, from a hook
        # on the tensors that apply saves after forward; the C API between here and the public op
        # would lose its type. Everything is saved by now, so continue with forward's results.
        recomputations.ended += 1
        results = tuple(tensor.detach() for tensor in made)
        return results if len(results) > 1 else results[0]
    except BaseException as error:
        keep(error)
        raise


def keep(error: BaseException) -> None:
    """Stores an exception in a kernel on the Autograd key, before it is raised again."""
    checks.keep(error)
    if isinstance(error, KeyboardInterrupt):
        _interrupt_again()


def _interrupt_again() -> None:
    """Sends Ctrl-C again, so that it does not end as a RuntimeError that an `except` swallows.

    A user's saved-tensor hook or mode runs inside the op, and the C API between it and the public
    op turns every exception into a RuntimeError: the text names the type (checks.keep), but the
    type is lost. The signal is sent a moment later and from another thread, because
    signal.raise_signal() would interrupt this very function.
    """
    main = threading.main_thread()
    if threading.current_thread() is main and callable(signal.getsignal(signal.SIGINT)):
        threading.Timer(0.01, signal.pthread_kill, (main.ident, signal.SIGINT)).start()


def _as_forward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a backward batch-invariant if the forward was: it may run in autograd's thread."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if not ctx.batch_invariant:
            return backward(ctx, *grads)
        with batch_invariant():
            return backward(ctx, *grads)

    return run


def _requires_grad(args: Sequence[Tensor | None]) -> bool:
    for arg in args:  # noqa: SIM110  (any() of a generator costs 0.4 us more, on every call)
        if arg is not None and arg.requires_grad:
            return True
    return False


def _sum_to(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Sums over broadcast batch dimensions."""
    # NOTE: not `tensor.shape == shape`, which compares the first sizes even if the ranks differ.
    if tensor.dim() == len(shape) and all(map(checks.equal, tensor.shape, shape)):
        return tensor
    return tensor.sum_to_size(shape)


def _grad_of_self(grad: Tensor, other: Tensor, shape: Sequence[int]) -> Tensor:
    """Gradient of matmul's first argument, of that shape."""
    if other.dim() == 2 and grad.dim() == len(shape):  # nothing was broadcast
        return matmul(grad, other.mT)
    if other.dim() == 1:
        return grad.unsqueeze(-1) * other
    if len(shape) == 1 and other.dim() > 2:
        return _sum_to(matmul(grad.unsqueeze(-2), other.mT).squeeze(-2), shape)
    return _sum_to(matmul(grad, other.mT), shape)


def _grad_of_other(grad: Tensor, self: Tensor, shape: Sequence[int]) -> Tensor:
    """Gradient of matmul's second argument, of that shape."""
    if len(shape) == 2 and self.dim() == 2:
        return matmul(self.mT, grad)
    if len(shape) == 1:
        return grad * self if self.dim() == 1 else matmul(_rows(self).mT, grad.reshape(-1))
    if self.dim() == 1:
        return self.unsqueeze(-1) * grad.unsqueeze(-2)
    if all(size == 1 for size in shape[:-2]):  # one product of all rows, not a batch and a sum
        return matmul(_rows(self).mT, _rows(grad)).reshape(shape)
    return _sum_to(matmul(self.mT, grad), shape)


def _rows(tensor: Tensor) -> Tensor:
    # NOTE: not flatten, for which torch.autograd.grad(is_grads_batched=True) has no rule, and not
    # reshape(-1, k), which is ambiguous if k == 0.
    if tensor.dim() == 2:
        return tensor
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


class _Matmul(transforms.SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, made: list[Tensor], self: Tensor, other: Tensor) -> Tensor:
        _, needs_self, needs_other = ctx.needs_input_grad
        ctx.set_materialize_grads(False)
        ctx.batch_invariant = is_batch_invariant()
        ctx.shapes = self.shape, other.shape
        ctx.save_for_backward(self if needs_other else None, other if needs_self else None)
        ctx.save_for_forward(self, other)
        made.append(call_below_autograd(matmul_autograd, self, other))
        return made[0]

    @staticmethod
    @_as_forward
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None
        self, other = ctx.saved_tensors
        _, needs_self, needs_other = ctx.needs_input_grad
        return (
            None,
            _grad_of_self(grad, other, ctx.shapes[0]) if needs_self else None,
            _grad_of_other(grad, self, ctx.shapes[1]) if needs_other else None,
        )

    @staticmethod
    def jvp(ctx: Any, _: None, self_t: Tensor | None, other_t: Tensor | None) -> Tensor | None:
        with _outer_levels():
            self, other = map(_primal, ctx.saved_tensors)
            return _matmul_tangent(self, other, self_t, other_t)


class _Linear(transforms.SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any, made: list[Tensor], input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        _, needs_input, needs_weight, _ = ctx.needs_input_grad
        ctx.set_materialize_grads(False)
        ctx.batch_invariant = is_batch_invariant()
        ctx.shapes = input.shape, weight.shape, None if bias is None else bias.shape
        ctx.save_for_backward(input if needs_weight else None, weight if needs_input else None)
        ctx.save_for_forward(input, weight)
        made.append(call_below_autograd(linear_autograd, input, weight, bias))
        return made[0]

    @staticmethod
    @_as_forward
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        needs = ctx.needs_input_grad[1:]
        return None, *linear_gradients(grad, ctx.saved_tensors, ctx.shapes, needs)

    @staticmethod
    def jvp(
        ctx: Any, _: None, input_t: Tensor | None, weight_t: Tensor | None, bias_t: Tensor | None
    ) -> Tensor | None:
        with _outer_levels():
            if input_t is None and weight_t is None and bias_t is not None:
                input_shape, weight_shape, _ = ctx.shapes
                return bias_t.expand(input_shape[:-1] + weight_shape[:-1]).contiguous()
            input, weight = map(_primal, ctx.saved_tensors)
            return _linear_tangent(input, weight, input_t, weight_t, bias_t)


class _Addmm(transforms.SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any,
        made: list[Tensor],
        input: Tensor,
        mat1: Tensor,
        mat2: Tensor,
        beta: float,
        alpha: float,
        out_dtype: torch.dtype | None,  # None: the operands'
    ) -> Tensor:
        _, _, needs_mat1, needs_mat2, *_ = ctx.needs_input_grad
        ctx.set_materialize_grads(False)
        ctx.batch_invariant = is_batch_invariant()
        ctx.shapes = input.shape, mat1.shape, mat2.shape
        ctx.batch = torch.broadcast_shapes(mat1.shape[:-2], mat2.shape[:-2])
        ctx.factors = beta, alpha
        ctx.dtypes = input.dtype, mat1.dtype, out_dtype or mat1.dtype
        ctx.save_for_backward(mat1 if needs_mat2 else None, mat2 if needs_mat1 else None)
        ctx.save_for_forward(mat1, mat2)
        op = addmm_autograd if out_dtype is None else addmm_dtype_autograd
        args = () if out_dtype is None else (out_dtype,)
        made.append(call_below_autograd(op, input, mat1, mat2, *args, beta=beta, alpha=alpha))
        return made[0]

    @staticmethod
    @_as_forward
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        mat1, mat2 = ctx.saved_tensors
        _, needs_input, needs_mat1, needs_mat2, *_ = ctx.needs_input_grad
        input_shape, mat1_shape, mat2_shape = ctx.shapes
        input_dtype, operand_dtype, _ = ctx.dtypes
        beta, alpha = ctx.factors
        grad_input = grad_mat1 = grad_mat2 = None
        if needs_input:
            grad_input = _sum_to(_scaled(grad, beta), input_shape).to(input_dtype)
        grad = grad.to(operand_dtype)  # products have operands of one dtype
        if needs_mat1:
            grad_mat1 = _scaled(_grad_of_self(grad, mat2, mat1_shape), alpha)
        if needs_mat2:
            grad_mat2 = _scaled(_grad_of_other(grad, mat1, mat2_shape), alpha)
        return None, grad_input, grad_mat1, grad_mat2, None, None, None

    @staticmethod
    def jvp(
        ctx: Any,
        _: None,
        input_t: Tensor | None,
        mat1_t: Tensor | None,
        mat2_t: Tensor | None,
        *factors_t: None,
    ) -> Tensor | None:
        beta, alpha = ctx.factors
        with _outer_levels():
            mat1, mat2 = map(_primal, ctx.saved_tensors)
            out = _matmul_tangent(mat1, mat2, mat1_t, mat2_t)
            out_dtype = ctx.dtypes[2]
            out = None if out is None else _scaled(out, alpha).to(out_dtype)
            if input_t is None:
                return out
            scaled = _scaled(input_t, beta).to(out_dtype)
            if out is not None:
                return out + scaled
            _, mat1_shape, mat2_shape = ctx.shapes
            columns = mat2_shape[-1:] if len(mat2_shape) > 1 else ()
            return scaled.expand((*ctx.batch, *mat1_shape[-2:-1], *columns)).contiguous()


def linear_gradients(
    grad: Tensor, saved: Sequence[Any], shapes: Sequence[Any], needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of linear's arguments; `saved`: input and weight; `shapes`: of all three."""
    input, weight = saved
    needs_input, needs_weight, needs_bias = needs
    input_shape, weight_shape, bias_shape = shapes
    if len(weight_shape) == 1:  # out = input @ weight
        grad_input = _grad_of_self(grad, weight, input_shape) if needs_input else None
        grad_weight = _grad_of_other(grad, input, weight_shape) if needs_weight else None
    else:
        grad_input = matmul(grad, weight) if needs_input else None
        if needs_weight and needs_bias and _by_one_kernel(grad, bias_shape):
            return grad_input, *weight_and_bias_gradient(_rows(grad), _rows(input))
        grad_weight = _grad_of_weight(grad, input) if needs_weight else None
    grad_bias = _sum_to(grad, bias_shape) if needs_bias else None
    return grad_input, grad_weight, grad_bias


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1 else tensor * factor


def _matmul_tangent(
    self: Tensor, other: Tensor, self_t: Tensor | None, other_t: Tensor | None
) -> Tensor | None:
    if self_t is None:
        return None if other_t is None else matmul(self, other_t)
    out = matmul(self_t, other)
    return out if other_t is None else out + matmul(self, other_t)


def _linear_tangent(
    input: Tensor,
    weight: Tensor,
    input_t: Tensor | None,
    weight_t: Tensor | None,
    bias_t: Tensor | None,
) -> Tensor | None:
    if input_t is None:
        return None if weight_t is None else linear(input, weight_t, bias_t)
    out = linear(input_t, weight, bias_t)
    return out if weight_t is None else out + linear(input, weight_t)


def _by_one_kernel(grad: Tensor, bias_shape: Sequence[int]) -> bool:
    """Whether the op for both gradients may be called, which has no derivative of its own."""
    if torch.is_grad_enabled() or transforms.transforms_active():
        return False
    if transforms.dual_level_is_open():
        return False
    return grad.dim() > 1 and len(bias_shape) == 1 and checks.equal(bias_shape[0], grad.shape[-1])


def _grad_of_weight(grad: Tensor, input: Tensor) -> Tensor:
    if input.dim() == 1:
        return grad.unsqueeze(-1) * input
    return matmul(_rows(grad).mT, _rows(input))


def _matmul_kernel(self: Tensor, other: Tensor) -> Tensor:
    return apply(_Matmul, matmul_autograd, self, other)


def _linear_kernel(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return apply(_Linear, linear_autograd, input, weight, bias)


def _addmm_kernel(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    def op(*tensors: Tensor) -> Tensor:
        return addmm_autograd(*tensors, beta=beta, alpha=alpha)

    return apply(_Addmm, op, input, mat1, mat2, rest=(beta, alpha, None))


def _addmm_dtype_kernel(
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    def op(*tensors: Tensor) -> Tensor:
        return addmm_dtype_autograd(*tensors, out_dtype, beta=beta, alpha=alpha)

    return apply(_Addmm, op, input, mat1, mat2, rest=(beta, alpha, out_dtype))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


def _linear_activation_kernel(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    """For calls that may be differentiated: the op that stores the sums beside the activation.

    The backward needs the sums before the activation, rounded to their dtype, as in PyTorch;
    recomputing them would cost a product.
    """
    try:
        tensors = (input, weight, bias)
        if (
            transforms.transforms_active()
            or transforms.dual_level_is_open()
            or _requires_grad(tensors)
        ):
            if activation == "none":
                return linear(*tensors)
            checks.check_linear(*tensors)
            return linear_activation_aux(*tensors, activation)[0]
        with transforms.below_autograd():
            return activation_autograd(*tensors, activation)
    except BaseException as error:
        keep(error)
        raise


def register(library: torch.library.Library) -> None:
    library.impl("_matmul_autograd", _matmul_kernel, "Autograd")
    library.impl("_linear_autograd", _linear_kernel, "Autograd")
    library.impl("_linear_activation_autograd", _linear_activation_kernel, "Autograd")
    library.impl("_addmm_autograd", _addmm_kernel, "Autograd")
    library.impl("_addmm_dtype_autograd", _addmm_dtype_kernel, "Autograd")
