"""Robust filter attention in the place of a decoder's own attention, with the decoder's projections and its cache."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rfa.checks import require
from rfa.models.packing import NewTokens, one_cache
from rfa.nn import HeadDynamics
from rfa.nn.cache_layer import Turns
from rfa.nn.dot_product_attention import ascending_slopes
from rfa.nn.dynamics import KEY_NOISE, NOISE_FLOOR, QUERY_NOISE, ROBUSTNESS
from rfa.nn.projections import merge_heads, repeated_for_heads
from rfa.ops.filter_attention import located_filter_attention
from rfa.ops.problem import Parameters, Prior, Problem, Weight

from .attention_interface import IN_FRAME
from .located import TOKEN_ARGUMENTS, LayerNote, Mask, locate, note_of


class Host(NamedTuple):
    """How an attention class of transformers makes its states and its output. Functions take the module.

    Fields:
        states: hidden states to query, key and value, `(batch, length, heads, channels)`.
        output: the last map, from all heads together to hidden states.
        dropout: the share of the weights that training drops, by the module's own attribute or child.
    """

    states: Callable[[Any, Tensor], Iterator[Tensor]]
    output: Callable[[Any, Tensor], Tensor]
    dropout: Callable[[Any], float]


def _three_projections(module: Any, hidden_states: Tensor) -> Iterator[Tensor]:
    for name in "qkv":
        states = getattr(module, f"{name}_proj")(hidden_states).unflatten(-1, (-1, module.head_dim))
        norm = getattr(module, f"{name}_norm", None)  # Qwen3 has norms of queries and keys
        yield states if norm is None else norm(states)


def _one_projection(module: Any, hidden_states: Tensor) -> Iterator[Tensor]:
    for states in module.c_attn(hidden_states).chunk(3, dim=-1):
        yield states.unflatten(-1, (-1, module.head_dim))


_LLAMA = Host(_three_projections, lambda module, states: module.o_proj(states), lambda module: module.attention_dropout)
_GPT2 = Host(
    _one_projection,
    lambda module, states: module.resid_dropout(module.c_proj(states)),
    lambda module: module.attn_dropout.p,
)
HOSTS = {"LlamaAttention": _LLAMA, "Qwen2Attention": _LLAMA, "Qwen3Attention": _LLAMA, "GPT2Attention": _GPT2}


def first_temperature(scaling: float, modes: int, weight: Weight) -> float:
    """beta_s of a replaced layer before training.

    Near a residual of 0 a score then grows with `q.k` as that of the dot product does, by `scaling`:
    `beta_s = scaling nu_s d (Sigma + gamma^2) / 2`, divided by `nu_s + 1` with Student-t weights.
    """
    variance = KEY_NOISE + NOISE_FLOOR + QUERY_NOISE
    exponent = ROBUSTNESS + 1 if weight == "student_t" else 1.0
    return scaling * ROBUSTNESS * modes * variance / (2 * exponent)


class ReplacedAttention(nn.Module):
    """The operator between the projections of an attention module of transformers, which keep their names and weights.

    A head of `2 d` channels holds d complex modes: the first half of the channels is real, the second imaginary, which
    is the pairing of RoPE. A cache of transformers holds keys and values turned into the common frame. Its heads are
    those of the keys, so shared keys and values stay shared. Times are places in the cache: 0, 1, 2, ... Padding takes
    no time between tokens.

    Args:
        module: the attention module, of a class in `HOSTS`.
        frequency, decay: `(key heads, modes)` and `(heads,)`, both per token.
        weight, prior, rotate_values, innovation, learn_decay, backend: as of `replace_attention`.
    """

    def __init__(
        self,
        module: nn.Module,
        frequency: Float[Tensor, "groups modes"],
        decay: Float[Tensor, " heads"],
        *,
        weight: Weight,
        prior: Prior,
        rotate_values: bool,
        innovation: bool,
        learn_decay: bool,
        backend: str,
    ):
        super().__init__()
        host: Any = module
        self.kind = type(module).__name__
        for name, child in module.named_children():
            self.add_module(name, child)
        self.config, self.layer_idx, self.head_dim, self.is_causal = host.config, host.layer_idx, host.head_dim, True
        self.attention_dropout, self.backend = getattr(host, "attention_dropout", None), backend
        self.share = len(decay) // len(frequency)
        self.rotate_values, self.innovation = rotate_values, innovation
        slopes = ascending_slopes(len(decay)) if prior == "riccati" else None
        self.dynamics = HeadDynamics(
            frequency.repeat_interleave(self.share, 0), decay, prior=prior, slopes=slopes, learn_decay=learn_decay
        )
        start = torch.full_like(decay, first_temperature(host.scaling, frequency.shape[1], weight))
        self.dynamics.hold("inverse_temperature", start)
        self.options = IN_FRAME._replace(weight=weight, prior=prior)  # values turn before they enter the cache
        self.dynamics.to(next(module.parameters()).device)
        self.train(module.training)

    @property
    def host(self) -> Host:
        """How the attention class of transformers makes its states; no attribute, for `pickle` cannot store it."""
        return HOSTS[self.kind]

    @property
    def dropout(self) -> float:
        """The share of the weights that training drops."""
        return self.host.dropout(self)

    def forward(
        self,
        hidden_states: Float[Tensor, "batch length hidden"],
        past_key_values: Cache | None = None,
        attention_mask: Mask | None = None,
        position_ids: Int[Tensor, "*b length"] | None = None,
        output_attentions: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "batch length hidden"], None]:
        """What the attention module returns: its output, and None in the place of weights.

        Args:
            hidden_states: the tokens, already normalised.
            past_key_values: any cache of transformers that keeps all keys; this call extends it. Parameters may change
                only while it is empty.
            attention_mask: as the model makes it, see `read_mask`. Padding takes no time between tokens.
            position_ids: they count up by one, or where they restart a packed sequence begins. Padding may count or
                not.
            output_attentions: refused; the fused operator has no weights.
            cache: the name of `past_key_values` in transformers 5.24 and later.
            kwargs: what else the model passes. `segment_ids`, and the arguments by which collators describe packed
                sequences, are read; the cosines of the model's own rotation are not used.

        Raises:
            ValueError: for a mask that is not causal with padding or packed sequences, positions that jump, arguments
                that disagree, a cache of another model, or if weights or other times are asked for.
        """
        wanted = self.config.output_attentions if output_attentions is None else output_attentions
        require(not wanted, "output_attentions", wanted, "False: the operator keeps no weights")
        require(kwargs.get("times") is None, "times", "given", "none: tokens that take part stand at 0, 1, 2, ...")
        batch, queries, _ = hidden_states.shape
        past_key_values = one_cache(past_key_values, cache)
        cached = 0 if past_key_values is None else int(past_key_values.get_seq_length(self.layer_idx))
        given = {name: kwargs.get(name) for name in TOKEN_ARGUMENTS} | {"position_ids": position_ids}
        note = None if past_key_values is None else note_of(past_key_values, self, cached)
        tokens = NewTokens(batch, queries, cached, hidden_states.device, None)
        located = locate(tokens, attention_mask, given, past_key_values, self.layer_idx, note)

        query, key, value = (states.transpose(1, 2) for states in self.host.states(self, hidden_states))
        dynamics = self._dynamics(note)
        precision = torch.promote_types(query.dtype, torch.float32)
        of_keys = located.turns(dynamics["frequency"][:: self.share], precision, None if note is None else note.turns)
        of_queries = Turns(of_keys.cos.unsqueeze(2), of_keys.sin.unsqueeze(2))  # for all heads that share a key
        own = value
        query = of_queries.backward(query.unflatten(1, (-1, self.share))).flatten(1, 2)
        if self.rotate_values:
            key, value = of_keys.backward(torch.stack([key, value])).unbind()
        else:
            key = of_keys.backward(key)
        if past_key_values is not None and note is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
            key, value = key[:, :, : cached + queries], value[:, :, : cached + queries]  # the rest is not filled yet
            layer: Any = past_key_values.layers[self.layer_idx]  # it exists from its first tokens on
            layer.rfa_note = note
        options = self.options._replace(dropout=self.dropout) if self.training and self.dropout else self.options
        estimate = located_filter_attention(
            query,
            repeated_for_heads(key, self.share),
            repeated_for_heads(value, self.share),
            Problem(Parameters(**dynamics), located.positions, options),
            cache=None if note is None else note.tables,
            backend=self.backend,
        )
        assert isinstance(estimate, Tensor)
        if self.rotate_values:
            estimate = of_queries.forward(estimate.unflatten(1, (-1, self.share))).flatten(1, 2)
        if self.innovation:
            estimate = estimate - repeated_for_heads(own, self.share)
        return self.host.output(self, merge_heads(estimate)), None

    def _dynamics(self, note: LayerNote | None) -> dict[str, Any]:
        """The parameters of the heads, kept in a cache's note where they need no gradient."""
        if note is None or torch.is_grad_enabled():
            return self.dynamics()
        if note.dynamics is None:
            note.dynamics = self.dynamics()
        return note.dynamics


# The options of a replaced model in its configuration, and the way from a saved folder back to the model

OPTIONS_FIELD = "rfa_attention"  # the field of the configuration
_KINDS = {"weight": str, "prior": str, "learn_decay": bool, "rotate_values": bool, "innovation": bool, "layers": list}
_EXPECTED = f"the options {', '.join(_KINDS)} that replace_attention writes"


def saved_options(config: Any) -> dict[str, Any] | None:
    """The options in a configuration, by the names of `replace_attention`; None for a model that was never replaced.

    Raises:
        ValueError: where they are not what `replace_attention` writes.
    """
    options = getattr(config, OPTIONS_FIELD, None)
    if options is None:
        return None
    fits = isinstance(options, dict) and {name: type(x) for name, x in options.items()} == _KINDS
    require(fits, f"config.{OPTIONS_FIELD}", options, _EXPECTED)
    return dict(options)


def check_saved_options(config: Any, options: dict[str, Any]) -> None:
    """Raise `ValueError` where a configuration was saved with other options."""
    for name, saved in (saved_options(config) or {}).items():
        require(options[name] == saved, name, options[name], f"{saved!r}, with which config.{OPTIONS_FIELD} was saved")


def write_options(model: nn.Module, config: Any, options: dict[str, Any]) -> None:
    """Write the options into the model's configuration, which becomes its own: other models may share the given one."""
    own = copy.deepcopy(config)
    setattr(own, OPTIONS_FIELD, options)
    for module in model.modules():
        if getattr(module, "config", None) is config:
            module.config = own


def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Fill all parameters and buffers from the file of weights in a folder, or from its parts.

    Raises:
        ValueError: where there is none, for files that cannot be read, or where names or shapes do not fit.
    """
    parts = (folder / SAFE_WEIGHTS_INDEX_NAME).exists()  # a whole file beside them is of an earlier save
    files = sorted(folder.glob(SAFE_WEIGHTS_NAME.replace(".", "-*.") if parts else SAFE_WEIGHTS_NAME))
    require(files != [], "folder", str(folder), f"a folder with {SAFE_WEIGHTS_NAME}")
    missing, foreign = set(model.state_dict()), set[str]()
    for file in files:
        try:
            absent, unexpected = load_model(model, file, strict=False)
        except (RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split("\n")[:2])  # of many, the first
            raise ValueError(f"folder: got {file}, expected weights of this model: {reason}") from error
        missing, foreign = missing & set(absent), foreign | set(unexpected)
    both = {"missing": missing, "foreign": foreign}
    found = "; ".join(f"{kind}: {', '.join(sorted(names)[:4])}" for kind, names in both.items() if names)
    require(not found, "folder", found, f"in {folder} the weights of this model with config.{OPTIONS_FIELD}, no more")


_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


def dispatched(model: PreTrainedModel, device_map: Any) -> PreTrainedModel:
    """The model on the devices of a `device_map`, as `from_pretrained` would place it."""
    from accelerate import dispatch_model, infer_auto_device_map  # it takes 0.5 s
    from accelerate.utils import get_balanced_memory

    if isinstance(device_map, str) and device_map in _AUTOMATIC:
        memory, whole = None, {"no_split_module_classes": list(model._no_split_modules or ())}
        if device_map != "sequential":
            memory = get_balanced_memory(model, low_zero=device_map == "balanced_low_0", **whole)
        device_map = infer_auto_device_map(model, max_memory=memory, **whole)
    elif not isinstance(device_map, dict):
        try:
            device_map = {"": torch.device(device_map)}
        except (RuntimeError, TypeError) as error:
            expected = f"a device, a dictionary or one of {_AUTOMATIC}"
            raise ValueError(f"device_map: got {device_map!r}, expected {expected}") from error
    return dispatch_model(model, device_map=device_map, skip_keys=model._skip_keys_device_placement)


def empty_model(folder: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    """The language model of a folder's configuration with fresh weights, in this dtype or the saved one.

    Code in the folder is not run.

    Raises:
        ValueError: for another model.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"folder: got {folder}, expected config.json of a model of transformers: {error}") from error
    require(saved_options(config) is not None, "folder", str(folder), f"config.json with {OPTIONS_FIELD}: {_EXPECTED}")
    model = AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype, trust_remote_code=False)
    saved = (config.architectures or ["no model"])[0]
    expected = "a causal language model; for others see replace_attention"
    require(saved == type(model).__name__, "folder", saved, expected)
    if (folder / GENERATION_CONFIG_NAME).exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model
