"""Small models of every type in transformers, with random weights, and inputs for them.

tools/transformers_scan.py compares them; this module does not use torch_cubin. A config is reduced
by the names of its attributes, and a model is called by the names of its forward's parameters, so
new types in transformers need no code here.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

TOKENS = 12
VOCABULARY = 128
MOST_PARAMETERS = 200_000_000

# Names of config attributes, and their values if the default is larger.
_SIZES = {
    64: "hidden_size d_model n_embd dim embed_dim embedding_size projection_dim d_embed emb_dim "
        "hidden_dim encoder_hidden_size decoder_hidden_size width text_embed_dim",
    128: "intermediate_size ffn_dim n_inner d_ff encoder_ffn_dim decoder_ffn_dim d_inner "
         "ffn_hidden_size moe_intermediate_size "
         "shared_expert_intermediate_size feed_forward_proj_dim inner_dim "
         "encoder_intermediate_size decoder_intermediate_size",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
       "decoder_attention_heads attention_heads num_local_experts "
       "num_experts n_routed_experts moe_num_experts",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth "
       "num_encoder_layers num_decoder_layers num_key_value_heads num_experts_per_tok moe_k "
       "encoder_num_hidden_layers decoder_num_hidden_layers moe_topk",
    16: "head_dim d_kv attention_head_dim qk_nope_head_dim v_head_dim kv_lora_rank q_lora_rank "
        "index_head_dim",
    8: "qk_rope_head_dim rotary_dim patch_size",
    32: "image_size",
    VOCABULARY: "vocab_size n_positions",
}  # fmt: skip
_SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
_LAYERS = set(_SIZES[2].split()) - {"num_key_value_heads", "num_experts_per_tok"}
_LAYERS -= {"moe_k", "moe_topk"}
_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


class Smaller:
    """Which sizes to reduce: reducing all of them gives no valid config for some types."""

    def __init__(
        self, names: set[str], layers: int = 2, width: int = 1, head_dim: bool = False
    ) -> None:
        self.names = names
        self.width = width  # times the small sizes
        self.layers = layers  # the first attention layer of hybrid models follows other layers
        self.head_dim = head_dim  # keep the default head_dim, which rotary sections sum to


CHOICES = (
    Smaller(set(_SMALL)),
    Smaller({x for size in (2, 4, VOCABULARY) for x in _SIZES[size].split() if "head" not in x}),
    Smaller(_LAYERS),
    Smaller(set(_SMALL) - set(_SIZES[16].split()) - set(_SIZES[8].split()), head_dim=True),
    Smaller(set(_SMALL), layers=6),
    Smaller(set(_SMALL), width=4),
    Smaller(set(_SMALL), width=8),
)


def small_config(cls: type, smaller: Smaller, depth: int = 0) -> Any:
    """A small config of the class, including sub-configs."""
    default = cls()
    given: dict[str, Any] = {}
    layers = smaller.layers
    depth_of_default = _get(default, "num_hidden_layers")
    for name, value in vars(default).items():
        small = _SMALL.get(name.lstrip("_"))
        if name in _LAYERS:
            small = layers
        elif small in (64, 128) and name != "vocab_size":
            small *= smaller.width
        if small is not None and name in smaller.names and _is_int(value) and value > small:
            given[name] = small
        elif "vocab_size" in smaller.names and name in _TOKEN_IDS and _is_large(value):
            given[name] = _TOKEN_IDS.index(name)
        elif isinstance(value, (list, tuple)) and len(value) == depth_of_default != 0:
            given[name] = value[:layers]  # one entry per layer
    # Hybrid model: all of these layers are of another kind.
    if not _get(default, "attn_layer_indices", True):
        given["attn_layer_indices"] = [1]
    kinds = _get(default, "layer_types")
    if isinstance(kinds, (list, tuple)) and kinds and not any(map(_attends, kinds[:layers])):
        attending = [*filter(_attends, kinds), "attention"]
        given["layer_types"] = [*kinds[: layers - 1], attending[0]]
    heads = _get(default, "num_attention_heads")
    key_heads = _get(default, "num_key_value_heads")
    follows = "num_key_value_heads" in given and key_heads == heads
    is_open = "num_key_value_heads" in vars(default) and key_heads is None and heads is not None
    if follows or is_open:
        given["num_key_value_heads"] = given.get("num_attention_heads", heads)
    hidden = _get(default, "hidden_size")
    if smaller.head_dim and _is_int(heads) and _is_int(hidden) and "hidden_size" in given:
        head_dim = _get(default, "head_dim") or hidden // heads
        given["hidden_size"] = head_dim * given.get("num_attention_heads", heads)
    if _get(default, "head_dim", 0) is None and _is_int(heads) and _is_int(hidden):
        hidden = given.get("hidden_size", hidden)
        given["head_dim"] = hidden // given.get("num_attention_heads", heads)
    if depth < 3:
        for name in getattr(cls, "sub_configs", None) or {}:
            sub = _get(default, name)
            if sub is not None:
                given[name] = small_config(type(sub), smaller, depth + 1).to_dict()
    fixed = {name for name in given if isinstance(getattr(cls, name, None), property)}
    return cls(**{name: value for name, value in given.items() if name not in fixed})


def _attends(kind: str) -> bool:
    """Whether a layer of this kind has softmax attention."""
    return kind == "hybrid" or ("attention" in kind and "linear" not in kind)


def _get(config: Any, name: str, otherwise: Any = None) -> Any:
    """An attribute of a config. Some configs raise their own errors for attributes that differ by
    layer."""
    try:
        return getattr(config, name)
    except Exception:
        return otherwise


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_large(value: object) -> bool:
    return isinstance(value, int) and value >= VOCABULARY


def model_class(config: Any) -> Any:
    """The class for causal language modelling if the type has one, else the base model, else the
    class in the config's module that names the config as its own (parts of multimodal models)."""
    from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

    for auto in (AutoModelForCausalLM, AutoModel):
        if type(config) in auto._model_mapping:
            found = auto._model_mapping[type(config)]
            cls = found[0] if isinstance(found, tuple) else found
            if cls.config_class is type(config):  # otherwise it is for the text part
                return cls
    stem = type(config).__name__.removesuffix("Config")
    package = importlib.import_module(type(config).__module__.rpartition(".")[0])
    found = []
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if module.name.rpartition(".")[2].startswith("modeling_"):
            for cls in vars(importlib.import_module(module.name)).values():
                if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
                    continue
                own = cls.config_class is type(config) or cls.__name__.startswith(stem)
                if own and "forward" in vars(cls):
                    found.append(cls)
    if not found:
        raise ValueError("has no model of its own")
    return min(found, key=lambda cls: ("For" in cls.__name__, len(cls.__name__)))


def build(config: Any, implementation: str) -> Any:
    """A model with random weights of one seed."""
    cls = model_class(config)
    with torch.device("meta"):
        meta = cls._from_config(config, attn_implementation=implementation)
    parameters = sum(x.numel() for x in meta.parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"is too large: {parameters} parameters")
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation=implementation).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # Some are initialised to zero, which would hide attention.
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.is_floating_point():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.08)
    return model


class Inputs:
    """Random arguments for a model's forward, by the names of its parameters."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.generator = torch.Generator().manual_seed(2)
        parameters = inspect.signature(model.forward).parameters.values()
        self.names = [x.name for x in parameters]
        plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self.required = [x.name for x in parameters if x.default is x.empty and x.kind in plain]
        main = model.main_input_name
        self.main = main if isinstance(main, str) else main[0]

    def candidates(self) -> Iterator[tuple[list[str], int]]:
        """Yields arguments: first those that the model requires, then those that models with
        several encoders also need, with sound and patches in the other orders of dims that models
        use."""
        required = dict.fromkeys([self.main, *self.required])
        required = [x for x in required if x in self.names]
        if self.setting("is_encoder_decoder") and "decoder_input_ids" in self.names:
            required.append("decoder_input_ids")
        if self.main == "pixel_values" and hasattr(self.config, "text_config"):
            required += [x for x in ("input_ids",) if x in self.names]
        beside = [x for x in _BESIDE if x in self.names and x not in required]
        lists = [required, required + beside[:1], required + beside]
        for names in [x for i, x in enumerate(lists) if x not in lists[:i]]:
            for layout in range(_LAYOUTS):
                if layout == 0 or any(layout < len(_MAKERS.get(x, ())) for x in names):
                    yield names, layout

    def make(self, names: list[str], layout: int) -> dict[str, Tensor]:
        unknown = [name for name in names if name not in _MAKERS]
        if unknown:
            raise ValueError(f"wants {', '.join(unknown)}")
        makers = {name: _MAKERS[name] for name in names}
        return {name: found[min(layout, len(found) - 1)](self) for name, found in makers.items()}

    def setting(self, *names: str, default: Any = None) -> Any:
        """The first of these attributes that the config, or else one of its sub-configs, has."""
        parts = ("vision_config", "audio_config", "encoder_config", "text_config", "decoder_config")
        configs = [self.config, *(getattr(self.config, x, None) for x in parts)]
        for config in configs:
            for name in names:
                value = getattr(config, name, None)
                if value is not None:
                    return value
        return default

    def numbers(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=self.generator)

    def ids(self) -> Tensor:
        return torch.randint(5, VOCABULARY - 8, (1, TOKENS), generator=self.generator)

    def image_size(self) -> tuple[int, int]:
        size = self.setting("image_size", "input_image_size", "img_size", default=32)
        if isinstance(size, dict):
            size = (size.get("height", 32), size.get("width", 32))
        return (size, size) if isinstance(size, int) else (tuple(size) * 2)[:2]

    def channels(self) -> int:
        return int(self.setting("num_channels", "in_channels", "in_chans", default=3))

    def image(self) -> Tensor:
        return self.numbers(1, self.channels(), *self.image_size())

    def frames(self) -> int:
        return int(self.setting("num_frames", "frames_per_clip", default=2))

    def patch(self) -> int:
        size = self.setting("patch_size", "spatial_patch_size", default=8)
        return int(size if isinstance(size, int) else size[0])

    def patch_width(self) -> int:
        """The number of values in a patch, for models whose input is an image cut into patches."""
        return self.channels() * self.patch() ** 2 * int(self.setting("temporal_patch_size") or 1)

    def hidden(self) -> int:
        return int(self.setting("hidden_size", "d_model", "n_embd", "embed_dim", default=64))

    def bins(self) -> int:
        names = ("num_mel_bins", "feature_size", "input_dim", "input_feat_per_channel",
                 "input_size", "n_mels")  # fmt: skip
        return int(self.setting(*names, default=80))

    def sound_length(self) -> int:
        return 2 * int(self.setting("max_source_positions", default=32))


_PATCHES = 4  # along each side of an image that is passed as patches

_Maker = Callable[[Inputs], Tensor]
_ids: tuple[_Maker, ...] = (
    lambda x: x.ids(),
    lambda x: x.ids().expand(int(x.setting("num_codebooks", default=1)), TOKENS).contiguous(),
)
_grid: tuple[_Maker, ...] = (lambda x: torch.tensor([[1, _PATCHES, _PATCHES]]),)
# Values for a parameter of this name; several if models differ in the order of dims.
_MAKERS: dict[str, tuple[_Maker, ...]] = {
    "input_ids": _ids,
    "decoder_input_ids": (lambda x: x.ids().flip(1),),
    "qformer_input_ids": _ids,
    "audio_input_ids": _ids,
    "attention_mask": (lambda x: torch.ones(1, TOKENS, dtype=torch.long),),
    "inputs_embeds": (lambda x: x.numbers(1, TOKENS, x.hidden()),),
    "encoder_hidden_states": (lambda x: x.numbers(1, TOKENS, x.hidden()),),
    "query_embeds": (lambda x: x.numbers(1, TOKENS, x.hidden()),),
    "bbox": (lambda x: (torch.arange(4) * 3).expand(1, TOKENS, 4).contiguous(),),
    "pixel_values": (
        lambda x: x.image(),
        lambda x: x.numbers(_PATCHES**2, x.patch_width()),
        lambda x: x.numbers(1, _PATCHES**2, x.patch_width()),
        lambda x: x.numbers(1, x.frames(), x.channels(), *x.image_size()),
        lambda x: x.numbers(_PATCHES**2, x.channels(), x.patch(), x.patch()),
    ),
    "pixel_values_videos": (
        lambda x: x.numbers(1, x.frames(), x.channels(), *x.image_size()),
        lambda x: x.numbers(_PATCHES**2, x.patch_width()),
    ),
    "flattened_patches": (lambda x: x.numbers(1, _PATCHES**2, x.patch_width() + 2),),
    "hidden_states": (
        lambda x: x.numbers(1, TOKENS, x.hidden()),
        lambda x: x.numbers(_PATCHES**2, x.patch_width()),
        lambda x: x.image(),
        lambda x: x.numbers(1, _PATCHES**2, x.patch_width()),
        lambda x: x.numbers(1, TOKENS, x.bins()),
    ),
    "image": (lambda x: x.image(),),
    "context": (lambda x: x.numbers(1, TOKENS, x.hidden()),),
    "aspect_ratio_ids": (lambda x: torch.ones(1, 1, dtype=torch.long),),
    "aspect_ratio_mask": (
        lambda x: torch.ones(1, 1, int(x.setting("max_num_tiles", default=4)), dtype=torch.long),
    ),
    "grid_thw": _grid,
    "image_grid_thw": _grid,
    "spatial_shapes": (lambda x: torch.tensor([[_PATCHES, _PATCHES]]),),
    "pixel_attention_mask": (lambda x: torch.ones(1, _PATCHES**2, dtype=torch.long),),
    "pixel_position_ids": (
        lambda x: torch.cartesian_prod(*[torch.arange(_PATCHES)] * 2).unsqueeze(0),
    ),
    "input_features": (
        lambda x: x.numbers(1, x.bins(), x.sound_length()),
        lambda x: x.numbers(1, x.sound_length(), x.bins()),
        lambda x: x.numbers(1, 1, x.sound_length(), x.bins()),
        lambda x: x.numbers(1, x.bins(), x.sound_length() + 1000),
    ),
    "input_features_mask": (lambda x: torch.ones(1, x.sound_length(), dtype=torch.bool),),
    "input_values": (
        lambda x: x.numbers(1, 4000),
        lambda x: x.numbers(1, 1, 4000),
        lambda x: x.numbers(1, int(x.setting("max_length", default=64)), x.bins()),
    ),
    "spectrogram": (lambda x: x.numbers(1, TOKENS, x.bins()),),
    "visual_feats": (lambda x: x.numbers(1, 6, int(x.setting("visual_feat_dim", default=64))),),
    "visual_pos": (lambda x: x.numbers(1, 6, 4),),
    "past_values": (
        lambda x: x.numbers(1, int(x.setting("context_length", default=16)),
                            int(x.setting("num_input_channels", "input_size", default=1))),
        lambda x: x.numbers(1, int(x.setting("context_length", default=16))),
    ),
    "input_points": (lambda x: x.numbers(1, 1, 2, 2),),
    "lang_id": (lambda x: torch.tensor([0]),),
}  # fmt: skip
_LAYOUTS = max(len(makers) for makers in _MAKERS.values())
# Further inputs that a model with several encoders may need.
_BESIDE = ("pixel_values", "input_ids", "encoder_hidden_states", "bbox", "visual_feats",
           "visual_pos", "query_embeds",
           "spatial_shapes", "image_grid_thw", "qformer_input_ids", "decoder_input_ids",
           "input_features_mask")  # fmt: skip
