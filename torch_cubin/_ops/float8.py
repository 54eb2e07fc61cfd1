"""Linear layers of 8-bit floats: torch_cubin.float8, its module, and what transformers' FP8Linear
calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_cubin import errors
from torch_cubin._ops import kept_weights
from torch_cubin._ops.scaled import BLOCK_1X128, BLOCK_128X128, ROW
from torch_cubin._pytorch import transforms

E4M3 = torch.float8_e4m3fn
# By recipe: that of activations, and that of weights.
_RECIPES = {"block": (BLOCK_1X128, BLOCK_128X128), "row": (ROW, ROW)}


def _output_dtype(input: Tensor) -> torch.dtype:
    """Of nn.Linear: autocast's, or the input's."""
    device = input.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return input.dtype


def linear(
    input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, recipe: str
) -> Tensor:
    """F.linear of an input that is quantised here; `scale` as torch.ops.cubin.quantize returns
    it for the weight. The output has the input's dtype, or autocast's."""
    of_input, of_weight = _RECIPES[recipe]
    rows = input.reshape(-1, input.shape[-1])
    data, own_scale = torch.ops.cubin.quantize(rows, of_input)
    out = torch.ops.cubin.scaled_matmul(
        *(data, weight.t(), own_scale, of_input, scale, of_weight),
        bias=bias,
        output_dtype=_output_dtype(input),
    )
    return out.view(*input.shape[:-1], weight.shape[0])


class Float8Linear(nn.Module):
    """nn.Linear for inference with a weight of float8_e4m3fn; inputs are quantised in each call.

    Its state is that of DeepSeek's checkpoints: `weight` (out_features, in_features) and
    `weight_scale_inv`, float32, (ceil(out / 128), ceil(in / 128)), or (out_features, 1) of
    recipe "row"; and `bias`. `.to(dtype)` converts the bias alone: the other two have one dtype.
    """

    weight: nn.Parameter
    weight_scale_inv: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        recipe: str = "block",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_recipe(recipe)
        self.in_features, self.out_features, self.recipe = in_features, out_features, recipe
        blocks = -(-out_features // 128), -(-in_features // 128)
        scales = blocks if recipe == "block" else (out_features, 1)
        for name, shape, own in (
            ("weight", (out_features, in_features), E4M3),
            ("weight_scale_inv", scales, torch.float32),
            ("bias", (out_features,) if bias else None, dtype),
        ):
            value = None if shape is None else torch.zeros(shape, device=device).to(own)
            parameter = None if value is None else nn.Parameter(value, requires_grad=False)
            self.register_parameter(name, parameter)

    @classmethod
    @torch.no_grad()
    def from_linear(cls, layer: nn.Linear, recipe: str = "block") -> Float8Linear:
        """Quantises the weight of an nn.Linear; the bias is shared with it."""
        _check_recipe(recipe)
        data, scale = torch.ops.cubin.quantize(layer.weight, _RECIPES[recipe][1])
        with torch.device("meta"):
            own = cls(layer.in_features, layer.out_features, layer.bias is not None, recipe)
        own.weight = nn.Parameter(data, requires_grad=False)
        scale = scale.t().contiguous() if recipe == "block" else scale
        own.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
        if layer.bias is not None:
            own.bias = nn.Parameter(layer.bias.detach(), requires_grad=False)
        return own.train(layer.training)

    def forward(self, input: Tensor) -> Tensor:
        scale = self.weight_scale_inv.t() if self.recipe == "block" else self.weight_scale_inv
        return linear(input, self.weight, scale, self.bias, self.recipe)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Float8Linear:
        """What .to(), .half() and others call: the quantised weight only changes its device."""

        def own(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            quantised = tensor is self.weight or tensor is self.weight_scale_inv
            return tensor.to(new.device) if quantised and new.dtype != tensor.dtype else new

        super()._apply(own, recurse)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Refuses a weight that is not quantised: copy_ would round it without its scales."""
        weight = state_dict.get(f"{prefix}weight")
        if weight is not None and weight.dtype != E4M3:
            raise errors.fault(
                "input", f"Float8Linear state '{prefix}weight'", "is not quantised",
                expected="float8_e4m3fn", got=str(weight.dtype).removeprefix("torch."),
                advice="Load it before torch_cubin.float8(model).",
            )  # fmt: skip
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, "
            f"recipe={self.recipe}"
        )


class _Product(torch.autograd.Function):
    """x @ weight.t() + bias by three products with scales of blocks: 1x128 of x, of the gradient
    and of their transposes, 128x128 of the weight. x is kept for backward in 8 bits.

    backward() is not once_differentiable, which overlooks that the gradients depend on x and the
    weight, too: with create_graph=True, quantize raises where a second derivative would be wrong.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(weight, *torch.ops.cubin.quantize(x, BLOCK_1X128, transpose=True))
        ctx.dtype = x.dtype
        return _times_weight(x, weight, dtype, bias=bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, x, x_scale = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = _times_weight(grad, weight, ctx.dtype, transpose=True)
        if ctx.needs_input_grad[1]:
            data, scale = torch.ops.cubin.quantize(grad, BLOCK_1X128, transpose=True)
            grad_weight = torch.ops.cubin.scaled_matmul(
                *(data, x.t(), scale, BLOCK_1X128, x_scale, BLOCK_1X128), output_dtype=weight.dtype
            )
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias, None


def _times_weight(
    rows: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    *,
    transpose: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """rows @ weight.t() + bias; rows @ weight with `transpose`. The quantised operands live no
    longer than the call, but for those of keep_float8_weights(), so that training takes no more
    memory than in bfloat16."""
    data, scale = torch.ops.cubin.quantize(rows, BLOCK_1X128)
    kept = kept_weights.copies_of(weight, True)
    if kept is None:
        w, w_scale = torch.ops.cubin.quantize(weight, BLOCK_128X128, transpose=transpose)
    else:
        w, w_scale = kept.transposed if transpose else kept.own
    return torch.ops.cubin.scaled_matmul(
        *(data, w.t(), scale, BLOCK_1X128, w_scale, BLOCK_128X128), bias=bias, output_dtype=dtype
    )


class TrainedLinear(nn.Linear):
    """nn.Linear whose three products, forward and backward, are of 8-bit floats; weight and state
    are nn.Linear's. Outputs have the input's dtype, or autocast's."""

    def forward(self, input: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and transforms.transforms_active():
            raise errors.fault(
                "input", "a layer of torch_cubin.float8", "has no rule for torch.func",
                expected="a call outside of its transforms", got="one inside",
                advice="Use torch.autograd.",
            )  # fmt: skip
        rows = input.reshape(-1, input.shape[-1])
        out = _Product.apply(rows, self.weight, self.bias, _output_dtype(input))
        return out.view(*input.shape[:-1], self.out_features)


def float8(
    model: nn.Module,
    recipe: str = "block",
    filter: Callable[[str, nn.Linear], bool] | None = None,
    *,
    training: bool = False,
) -> nn.Module:
    """Gives the linear layers of a model products of float8_e4m3fn.

        model = torch_cubin.float8(model, filter=lambda name, layer: name != "lm_head")

    For inference the layers become :class:`Float8Linear`, with weights of float8_e4m3fn; calls that
    need a derivative raise an error. With `training` they keep their weights and state, and
    quantise what they multiply, forward and backward, with the scales of recipe "block".

    The model is changed in place. A layer under several names stays one layer. A warning says if no
    layer was replaced; subclasses of nn.Linear stay as they are.

    Args:
        model: layers of the type nn.Linear are replaced, and for inference also those of
            `training`; if it is one, a new layer is returned.
        recipe: "block" (scales for 1x128 of the inputs and 128x128 of the weights, DeepSeek's) or
            "row" (a scale for each row of both).
        filter: called with a layer's name and the layer; those for which it returns False stay.
        training: for training, of recipe "block" alone.

    Returns:
        The model.

    Raises InputError [input] for another recipe, and quantize's errors for weights of other dtypes.
    """
    if not isinstance(model, nn.Module):
        raise errors.wrong_type("torch_cubin.float8 argument 'model'", "a torch.nn.Module", model)
    _check_recipe(recipe, training)
    replaced: dict[nn.Linear, nn.Module] = {}
    # After training, a model becomes one for inference.
    types = (nn.Linear,) if training else (nn.Linear, TrainedLinear)
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if type(layer) not in types or (filter is not None and not filter(name, layer)):
            continue
        if layer not in replaced:
            _check_layer(model, name, layer)
            made = _trained(layer) if training else Float8Linear.from_linear(layer, recipe)
            vars(made).update({k: v for k, v in vars(layer).items() if k not in vars(made)})
            replaced[layer] = made
        if not name:
            return replaced[layer]
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, replaced[layer])
    if not replaced:
        warnings.warn(
            "torch_cubin.float8 replaced no layer: the model has none of the type nn.Linear"
            + (" that `filter` accepts." if filter is not None else "."),
            stacklevel=2,
        )
    return model


def _trained(layer: nn.Linear) -> TrainedLinear:
    """The same layer with products of 8-bit floats; it shares the parameters."""
    with torch.device("meta"):
        own = TrainedLinear(layer.in_features, layer.out_features, layer.bias is not None)
    own.weight, own.bias = layer.weight, layer.bias
    return own.train(layer.training)


# Of blocks of weights in checkpoints.
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


def _extras(layer: nn.Linear) -> list[str]:
    """What a layer has beyond an nn.Linear: hooks, parameters, buffers and modules."""
    usual = vars(nn.Linear(1, 1, device="meta"))
    return [
        kind.strip("_") + (f" {sorted(added)}" if all(isinstance(x, str) for x in added) else "")
        for kind, own in vars(layer).items()
        if kind in usual and isinstance(own, dict) and (added := own.keys() - usual[kind].keys())
    ]


def _check_layer(model: nn.Module, name: str, layer: nn.Linear) -> None:
    """Refuses layers of which something would silently be lost."""
    own = _extras(layer) + (["a forward of its own"] if "forward" in vars(layer) else [])
    if own:
        raise errors.fault(
            "input", f"torch_cubin.float8 layer '{name}'", "has what a new layer has not",
            expected="no hooks, and no parameters, buffers or modules beyond weight and bias",
            got=", ".join(own),
            advice="Add them afterwards, or exclude the layer by `filter`.",
        )  # fmt: skip
    parent = model.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, nn.TransformerEncoderLayer):
        raise errors.fault(
            "input", f"torch_cubin.float8 layer '{name}'", "has a parent that reads its weight",
            expected="a layer that is only called", got="a layer of nn.TransformerEncoderLayer",
            advice="Exclude it by `filter`.",
        )  # fmt: skip


def _check_recipe(recipe: str, training: bool = False) -> None:
    known = ("block",) if training else tuple(_RECIPES)
    if recipe not in known:
        names = " or ".join(map(repr, known))
        raise errors.fault(
            "input", "torch_cubin.float8 argument 'recipe'", "is not known", expected=names,
            got=repr(recipe),
        )  # fmt: skip


def why_not(
    input: Tensor, weight: Tensor, scale: Tensor, block_size: Any, activation_scale: Tensor | None
) -> str:
    """Why :func:`linear` does not compute a call of transformers' fp8_linear; "" if it does."""
    if weight.dtype != E4M3:
        return f"a weight of {str(weight.dtype).removeprefix('torch.')}"
    blocks = tuple(-(-size // 128) for size in weight.shape)
    if block_size is None or tuple(block_size) != (128, 128) or tuple(scale.shape) != blocks:
        return "scales that do not belong to blocks of 128 x 128"
    if scale.dtype not in _SCALES:
        return f"scales of {str(scale.dtype).removeprefix('torch.')}"
    if activation_scale is not None:
        return "a static scale of activations"
    if torch.is_grad_enabled() and input.requires_grad:
        return "an input that requires a gradient"
    if input.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"an input of {str(input.dtype).removeprefix('torch.')}"
    if input.is_cuda and torch.cuda.get_device_capability(input.device)[0] != 9:
        return "a GPU that is not Hopper"
    return ""
