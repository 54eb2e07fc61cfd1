# The implementation "cubin" in PyTorch's registry of flash attention: our kernels behind the
# operators aten::_flash_attention_* and aten::_scaled_dot_product_flash_attention*, while the user
# has it activated. It converts arguments and results, and leaves calls that it cannot serve to
# PyTorch's kernel.
"""``torch.nn.attention.activate_flash_attention_impl("cubin")``.

Everything that uses PyTorch's flash attention then runs from cubins, unchanged:
F.scaled_dot_product_attention if PyTorch chooses that backend, torch.nn.attention.varlen, nested
tensors, context parallel, and the graphs of torch.compile, forward and backward.
``restore_flash_attention_impl()`` restores PyTorch's kernels. Importing torch_cubin registers the
implementation but does not activate it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_cubin import errors
from torch_cubin._drop_in import report
from torch_cubin._ops.batch_invariant import batch_invariant
from torch_cubin._pytorch import dispatch_keys, operators

_forward = torch.ops.cubin._attention_forward.default
_backward = torch.ops.cubin._attention_backward.default

_DTYPES = (torch.float16, torch.bfloat16)
_HEAD_DIM = 256  # the widest head that PyTorch's flash attention supports


def _why_not(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, offsets: tuple[Any, Any]
) -> str:
    """The reason why neither forward nor backward is served; "" if both are."""
    if dropout_p > 0:
        return "dropout, whose numbers PyTorch's backward draws again"
    if not query.dtype == key.dtype == value.dtype or query.dtype not in _DTYPES:
        return "a dtype that is not float16 or bfloat16"
    packed = offsets[0] is not None
    if packed != (offsets[1] is not None):
        return "offsets of the queries or of the keys alone"
    if packed and any(each.dtype != torch.int32 for each in offsets):
        return "offsets that are not int32"
    dims = 3 if packed else 4
    if any(x.dim() != dims for x in (query, key, value)):
        return "a rank that flash attention does not have"
    if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        return "another head_dim for values"
    if query.shape[-1] > _HEAD_DIM:
        return f"a head_dim above {_HEAD_DIM}"
    heads, shared = query.shape[-2], key.shape[-2]
    if value.shape[-2] != shared or shared == 0 or heads % shared != 0:
        return "heads of keys that do not divide those of queries"
    return ""


def _why_not_sums(logsumexp: Tensor, query: Tensor) -> str:
    """The reason why this logsumexp cannot be used; `query` has its heads before its rows."""
    if logsumexp.shape == query.shape[:-1] and logsumexp.dtype == torch.float32:
        return ""
    return "a logsumexp of another layout"


_OF_PYTORCH = "a call of PyTorch's own kernel"
_SEVERAL_KERNELS = "num_splits=1 with packed sequences, which have several kernels on this device"


def _has_one_packed_kernel(device: torch.device) -> bool:
    """Whether batch_invariant() covers packed sequences on the device: the CPU's reference, and
    Hopper."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) == (9, 0)


# Keyword arguments of PyTorch's operators that are served for every value.
_OPTIONS = frozenset(("scale", "window_size_left", "window_size_right", "num_splits"))


def _unknown_option(options: dict[str, Any]) -> str:
    """A keyword argument that is not served; "" if all are."""
    unknown = (
        name for name, value in options.items() if name not in _OPTIONS and value is not None
    )
    return next(unknown, "")


def _packed(offsets: tuple[Any, Any], longest: tuple[int, int]) -> dict[str, Any]:
    """The options of the cubin ops for packed rows; empty without offsets."""
    if offsets[0] is None:
        return {}
    options = {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]}
    return {**options, "max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}


def _window(size: int | None) -> int:
    return -1 if size is None or size < 0 else size


def _layout_of(result: Tensor, like: Tensor) -> Tensor:
    """`result` with the strides of torch.empty_like(like), which graphs rely on."""
    if result.stride() == like.stride():
        return result
    wanted = torch.empty_like(like)
    return result if wanted.stride() == result.stride() else wanted.copy_(result)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: tuple[Any, Any],
    longest: tuple[int, int],
    is_causal: bool,
    scale: float | None,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp of (batch, heads, rows, head_dim), or of packed rows."""
    options = _packed(offsets, longest)
    # aten's operators have no autocast rule: they compute in the dtype of their arguments.
    with dispatch_keys.without_autocast():
        out, logsumexp = _forward(
            query,
            key,
            value,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=True,
            window_left=window[0],
            window_right=window[1],
            bottom_right=True,
            **options,
        )
    # PyTorch's kernels write inf for rows that see no key; ours write -inf.
    beyond = 0 if is_causal else window[1]
    rows, columns = query.shape[-2], key.shape[-2]
    if options or columns == 0 or (beyond >= 0 and rows > columns + beyond):
        torch.nan_to_num_(logsumexp, nan=math.nan, posinf=math.inf, neginf=math.inf)
    return out, logsumexp


def _auxiliary(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state, unused and debug_attn_mask for a call without dropout; nobody reads them."""
    return (
        query.new_empty(2, dtype=torch.uint64),
        query.new_empty((), dtype=torch.uint64),
        query.new_empty(0),
    )


class Implementation:
    """The registered functions while the implementation is active; PyTorch's registry owns it and
    calls remove()."""

    def __init__(self, dispatch_key: str = "CUDA") -> None:
        self._dispatch_key = dispatch_key
        self._own = threading.local()  # .depth > 0: this thread is inside PyTorch's own kernels
        self._kernels: dict[str, Any] = {}
        self._library: torch.library.Library | None = operators.registry("aten", "IMPL")
        for name, function in (
            ("_flash_attention_forward", self.forward),
            ("_flash_attention_forward_no_dropout_inplace", self.forward_into),
            ("_flash_attention_backward", self.backward),
            ("_scaled_dot_product_flash_attention", self.sdpa),
            ("_scaled_dot_product_flash_attention_backward", self.sdpa_backward),
        ):
            if hasattr(torch.ops.aten, name):  # not every PyTorch has the second one
                self._register(name, function)

    def _register(self, name: str, function: Callable[..., Any]) -> None:
        try:
            # Looked up before the override, because afterwards it would return the override.
            kernel = torch.library.get_kernel(f"aten::{name}", self._dispatch_key)
        except RuntimeError:  # a PyTorch without CUDA has no kernel
            kernel = None
        self._kernels[name] = kernel
        assert self._library is not None
        self._library.impl(
            name, function, self._dispatch_key, with_keyset=True, allow_override=True
        )

    def remove(self) -> None:
        """Restores PyTorch's kernels."""
        self._library = None  # dropping the library removes its registrations

    def _decline(self, keys: Any, name: str, reason: str, *args: Any, **kwargs: Any) -> Any:
        """Calls PyTorch's own kernel. The operators that it calls come back here, and go to PyTorch
        too."""
        depth = getattr(self._own, "depth", 0)
        if depth == 0:
            report.count_declined(name, reason)
        kernel = self._kernels[name]
        if kernel is None:
            raise errors.fault(
                "no_kernel",
                f"aten::{name}",
                f"is called with {reason}, for which PyTorch has no kernel on this device",
                expected="what the implementation 'cubin' takes",
                got=reason,
                advice="Call torch.nn.attention.restore_flash_attention_impl().",
            )
        self._own.depth = depth + 1
        try:
            return kernel.call_boxed(keys, *args, **kwargs)
        finally:
            self._own.depth = depth

    def _pytorch_calls(self) -> bool:
        return getattr(self._own, "depth", 0) > 0

    def forward(self, keys: Any, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """`args`: query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal and
        return_debug_mask."""
        name = "_flash_attention_forward"
        reason = self._why_not_forward(args, options)
        if reason:
            return self._decline(keys, name, reason, *args, **options)
        out, logsumexp = self._rows_first(*args[:-1], **options)
        report.count_served(name, args[:2], out)
        return (out, logsumexp, *_auxiliary(args[0]))

    def forward_into(self, keys: Any, out: Tensor, *args: Any, **options: Any) -> Tensor:
        """What forward() does, with the output written to `out`."""
        name = "_flash_attention_forward_no_dropout_inplace"
        reason = self._why_not_forward(args, options)
        if reason:
            return self._decline(keys, name, reason, out, *args, **options)
        computed, logsumexp = self._rows_first(*args[:-1], **options)
        out.copy_(computed)
        report.count_served(name, args[:2], out)
        return logsumexp

    def _why_not_forward(self, args: tuple[Any, ...], options: dict[str, Any]) -> str:
        query, key, value, cum_seq_q, cum_seq_k, _, _, dropout_p, _, return_debug_mask = args
        if self._pytorch_calls():
            return _OF_PYTORCH
        if return_debug_mask:
            return "return_debug_mask"
        reason = _unknown_option(options)
        reason = reason or _why_not(query, key, value, dropout_p, (cum_seq_q, cum_seq_k))
        if not reason and options.get("num_splits") == 1 and cum_seq_q is not None:
            return "" if _has_one_packed_kernel(query.device) else _SEVERAL_KERNELS
        return reason

    def _rows_first(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        num_splits: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Handles (batch, rows, heads, head_dim), or packed rows."""
        if num_splits == 1:
            with batch_invariant():
                return self._rows_first(
                    *(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal),
                    scale=scale,
                    window_size_left=window_size_left,
                    window_size_right=window_size_right,
                )
        window = (_window(window_size_left), _window(window_size_right))
        packed = cum_seq_q is not None
        q, k, v = (query, key, value) if packed else _swap_heads(query, key, value)
        out, logsumexp = _attend(
            *(q, k, v), (cum_seq_q, cum_seq_k), (max_q, max_k), is_causal, scale, window
        )
        return _layout_of(out if packed else out.transpose(1, 2), query), logsumexp

    def backward(self, keys: Any, *args: Any, **options: Any) -> tuple[Tensor | None, ...]:
        name = "_flash_attention_backward"
        grad_out, query, key, value, out, logsumexp, *more = args
        cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, _, _ = more
        offsets = (cum_seq_q, cum_seq_k)
        reason = _OF_PYTORCH if self._pytorch_calls() else _unknown_option(options)
        reason = reason or _why_not(query, key, value, dropout_p, offsets)
        reason = reason or _why_not_sums(logsumexp, query.transpose(-3, -2))
        if reason:
            return self._decline(keys, name, reason, *args, **options)
        if grad_out is None:
            return None, None, None
        packed = cum_seq_q is not None
        given = (grad_out, query, key, value, out)
        grad, q, k, v, o = given if packed else _swap_heads(*given)
        gradients = _differentiate(
            *(grad, q, k, v, o, logsumexp, offsets, (max_q, max_k), is_causal), **options
        )
        if not packed:
            gradients = _swap_heads(*gradients)
        report.count_served(name, (query, key), gradients[0])
        return tuple(map(_layout_of, gradients, (query, key, value)))

    def sdpa(
        self,
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        name = "_scaled_dot_product_flash_attention"
        reason = "return_debug_mask" if return_debug_mask else ""
        q, k, v = _swap_ranked(query, key, value)
        reason = reason or _why_not(q, k, v, dropout_p, (None, None))
        if reason:
            args = (query, key, value, dropout_p, is_causal, return_debug_mask)
            return self._decline(keys, name, reason, *args, scale=scale)
        offsets, longest = (None, None), (query.shape[2], key.shape[2])
        out, logsumexp = _attend(query, key, value, offsets, longest, is_causal, scale, (-1, -1))
        report.count_served(name, (query, key), out)
        out = _layout_of(out, query)
        return (out, logsumexp, *offsets, *longest, *_auxiliary(query))

    def sdpa_backward(
        self, keys: Any, *args: Any, scale: float | None = None
    ) -> tuple[Tensor | None, ...]:
        name = "_scaled_dot_product_flash_attention_backward"
        grad_out, query, key, value, out, logsumexp, *more = args
        cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, _, _ = more
        offsets, longest = (cum_seq_q, cum_seq_k), (max_q, max_k)
        reason = "packed sequences" if offsets != (None, None) else ""
        q, k, v = _swap_ranked(query, key, value)
        reason = reason or _why_not(q, k, v, dropout_p, (None, None))
        reason = reason or _why_not_sums(logsumexp, query)
        if reason:
            return self._decline(keys, name, reason, *args, scale=scale)
        if grad_out is None:
            return None, None, None
        gradients = _differentiate(
            *(grad_out, query, key, value, out, logsumexp, offsets, longest, is_causal), scale=scale
        )
        report.count_served(name, (query, key), gradients[0])
        return tuple(map(_layout_of, gradients, (query, key, value)))


def _swap_heads(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def _swap_ranked(*tensors: Tensor) -> tuple[Tensor, ...]:
    """_swap_heads() for tensors with four dims; tensors of a wrong rank are returned unchanged."""
    return tuple(x.transpose(1, 2) if x.dim() == 4 else x for x in tensors)


def _differentiate(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    offsets: tuple[Any, Any],
    longest: tuple[int, int],
    is_causal: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **_: Any,
) -> tuple[Tensor, ...]:
    options = _packed(offsets, longest)
    with dispatch_keys.without_autocast():
        return _backward(
            grad_out,
            query,
            key,
            value,
            out,
            logsumexp,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=True,
            window_left=_window(window_size_left),
            window_right=_window(window_size_right),
            bottom_right=True,
            **options,
        )
