"""`replace_attention`: robust filter attention in a decoder of transformers, with its projections and its cache."""

import copy
from collections.abc import Callable, Iterable, Iterator
from numbers import Real
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rfa.checks import require
from rfa.models.packing import NewTokens, one_cache
from rfa.models.saved_files import quiet_transformers
from rfa.nn import HeadDynamics
from rfa.nn.cache_layer import Turns
from rfa.nn.checks import check_backend, check_dropout, check_frequencies, check_rates
from rfa.nn.dot_product_attention import ascending_slopes
from rfa.nn.dynamics import KEY_NOISE, NOISE_FLOOR, QUERY_NOISE, ROBUSTNESS
from rfa.nn.projections import merge_heads, repeated_for_heads
from rfa.ops.filter_attention import located_filter_attention
from rfa.ops.problem import Options, Parameters, Prior, Problem, Weight

from .located import TOKEN_ARGUMENTS, UNREAD_ARGUMENTS, LayerNote, Mask, locate, note_of

Model = TypeVar("Model", bound=nn.Module)
_CHANGING = ("dynamic", "longrope")  # kinds of RoPE whose frequencies depend on the length
_DYNAMICS = ".dynamics."  # in the names of the parameters that replacing adds


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
        # values turn before they enter the cache
        self.options = Options(weight=weight, prior=prior, rotate_values=False, in_frame=True)
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
            kwargs: what else the model passes. `segment_ids` are read; the cosines of the model's own rotation are not
                used.

        Raises:
            ValueError: for a mask that is not causal with padding or packed sequences, positions that jump, arguments
                that disagree, a cache of another model, or if weights or other times are asked for.
        """
        wanted = self.config.output_attentions if output_attentions is None else output_attentions
        require(not wanted, "output_attentions", wanted, "False: the operator keeps no weights")
        for name in UNREAD_ARGUMENTS:
            require(kwargs.get(name) is None, name, "given", "None: tokens stand at 0, 1, 2, ...; see segment_ids")
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


def replace_attention(
    model: Model,
    *,
    weight: Weight = "student_t",
    prior: Prior = "riccati",
    frequency: Literal["host"] | Float[Tensor, "groups modes"] = "host",
    decay: float | Float[Tensor, " heads"] = 0.0,
    learn_decay: bool = False,
    rotate_values: bool = False,
    innovation: bool = False,
    layers: Iterable[int] | None = None,
    backend: str = "auto",
) -> Model:
    """Put robust filter attention into a decoder of transformers: Llama, Qwen2, Qwen3 or GPT-2.

    The projections stay, with their names and weights: a head of `2 d` channels is read as d complex modes. Only the
    operator between them changes, and each layer gets new parameters `dynamics` of its heads. The filter's rotation
    takes the place of the model's. Masks, packed sequences, caches and `generate` work as before.

    With the defaults queries and keys turn as in the model, nothing decays, and the first inverse temperature is that
    at which scores near a distance of 0 grow as the model's own. The Riccati prior starts at ALiBi's slopes, as in the
    preset `rfa`, times the inverse temperature. With the Lyapunov prior no lag counts at first. With exponential
    weights and keys of equal norms too (a Qwen3 whose key norms have weights of one) the model computes what it
    computed before.

    `model.save_pretrained(folder)` saves the options in config.json, and `load_replaced(folder)` loads the model. For
    other ways to load: build the model from its configuration, call this with the same options, then `load_state_dict`.

    Args:
        model: changed in place. Its configuration becomes its own, with the options as `rfa_attention`.
        weight: "student_t" or "exponential".
        prior: "riccati" or "lyapunov".
        frequency: "host" for the model's RoPE, which is no rotation in GPT-2; or `(key heads, modes)` in radians per
            token. Heads that share keys share frequencies.
        decay: mu per token, one number or `(heads,)`. Without decay the Lyapunov prior has next to no process noise at
            first (1e-6 a token), and the uncertainty of a key hardly grows with its lag.
        learn_decay: train the decay.
        rotate_values: turn values too. Pretrained values were not turned.
        innovation: return the step from the token's value to the estimate. Pretrained weights expect the estimate.
        layers: indices of the layers to change; all by default.
        backend: of the operator.

    Returns:
        The model.

    Raises:
        ValueError: for another architecture, sliding windows, cross attention, RoPE that depends on the length or
            scales its states, an odd head size, a model without weights, options that do not fit, or options other
            than those with which the model's configuration was saved.
    """
    found = _hosts(model)
    require(weight in get_args(Weight), "weight", weight, f"one of {get_args(Weight)}")
    require(prior in get_args(Prior), "prior", prior, f"one of {get_args(Prior)}")
    for name, flag in {"learn_decay": learn_decay, "rotate_values": rotate_values, "innovation": innovation}.items():
        require(isinstance(flag, bool), name, flag, "True or False")
    check_backend(backend)
    chosen = _layers(layers, {int(module.layer_idx) for module in found.values()})
    options: dict[str, Any] = {"weight": weight, "prior": prior, "learn_decay": learn_decay}
    options |= {"rotate_values": rotate_values, "innovation": innovation, "layers": chosen}
    config = next(iter(found.values())).config
    check_saved_options(config, options)
    replaced = {}
    for name, module in found.items():
        if module.layer_idx in chosen:
            _check_host(name, module)
            heads, groups, modes = _sizes(module)
            replaced[name] = ReplacedAttention(
                module,
                _frequency(model, module, frequency, groups, modes),
                _decay(decay, heads),
                weight=weight,
                prior=prior,
                rotate_values=rotate_values,
                innovation=innovation,
                learn_decay=learn_decay,
                backend=backend,
            )
            check_dropout(replaced[name].dropout, backend)
    for name, module in replaced.items():  # only now: a refusal leaves the model as it was
        model.set_submodule(name, module)
    write_options(model, config, options)
    return model


def _hosts(model: object) -> dict[str, Any]:
    """The attention modules of a decoder by name."""
    expected = f"a decoder of transformers with {', '.join(HOSTS)}"
    require(isinstance(model, nn.Module), "model", type(model).__name__, expected)
    assert isinstance(model, nn.Module)
    again = any(isinstance(module, ReplacedAttention) for module in model.modules())
    require(not again, "model", f"{type(model).__name__}, replaced already", expected)
    found = {name: module for name, module in model.named_modules() if _is_host(module)}
    require(bool(found), "model", type(model).__name__, expected)
    empty = any(parameter.is_meta for parameter in model.parameters())
    require(not empty, "model", f"{type(model).__name__} on the device meta", "a model with weights")
    return found


def _layers(given: Any, indices: set[int]) -> list[int]:
    """The layers to change, in order."""
    expected = f"some of {sorted(indices)}"
    require(given is None or isinstance(given, Iterable), "layers", given, expected)
    chosen = sorted(indices) if given is None else list(given)
    require(bool(chosen) and all(type(x) is int and x in indices for x in chosen), "layers", chosen, expected)
    return sorted(set(chosen))


def _is_host(module: nn.Module) -> bool:
    return type(module).__name__ in HOSTS and type(module).__module__.startswith("transformers.models.")


def _check_host(name: str, module: Any) -> None:
    window = getattr(module, "sliding_window", None)
    require(window is None, "model", f"{name} with a sliding window of {window}", "attention to all earlier tokens")
    crossed = getattr(module, "is_cross_attention", False)
    require(not crossed, "model", f"{name}, which is cross attention", "attention of a decoder to itself")
    require(module.head_dim % 2 == 0, "model", f"{name} with {module.head_dim} channels a head", "an even number")


def _sizes(module: Any) -> tuple[int, int, int]:
    """Heads, heads of keys, and modes."""
    heads = module.config.num_attention_heads
    return heads, heads // getattr(module, "num_key_value_groups", 1), module.head_dim // 2


def _frequency(model: nn.Module, module: Any, given: str | Tensor, groups: int, modes: int) -> Tensor:
    if isinstance(given, Tensor):
        check_frequencies("frequency", given, groups, modes)
        return given.detach().float().cpu()
    require(given == "host", "frequency", given, f"'host' or a tensor ({groups}, {modes})")
    rotary: list[Any] = [each for each in model.modules() if hasattr(each, "inv_freq")]
    if not rotary:
        return torch.zeros(groups, modes)
    kind, factor = getattr(rotary[0], "rope_type", "default"), getattr(rotary[0], "attention_scaling", 1.0)
    turns = len(rotary) == 1 and kind not in _CHANGING and factor == 1 and rotary[0].inv_freq.numel() == modes
    need = "one RoPE of all channels, of one set of frequencies and without a factor; or give the frequencies"
    require(turns, "frequency", f"'host' with RoPE of type {kind!r}", need)
    # the model turns states forward and this library turns them back, so the sign changes
    return -rotary[0].inv_freq.detach().float().cpu().expand(groups, modes).clone()


def _decay(given: float | Tensor, heads: int) -> Tensor:
    number = isinstance(given, Real) and not isinstance(given, bool)
    require(number or isinstance(given, Tensor), "decay", given, f"a number or a tensor ({heads},)")
    decay = given.detach().float().cpu().clone() if isinstance(given, Tensor) else torch.full((heads,), float(given))
    check_rates("decay", decay, heads)
    return decay


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


def load_replaced(
    folder: str | Path,
    *,
    backend: str = "auto",
    dtype: torch.dtype | str | None = None,
    device_map: str | int | torch.device | dict[str, Any] | None = None,
) -> PreTrainedModel:
    """The causal language model that `save_pretrained` of a replaced model wrote into a folder, in evaluation mode.

    The options of `replace_attention` come from config.json and the weights from safetensors files. No code of the
    folder is run.

    Args:
        folder: on this machine.
        backend: of the operator; it is not saved.
        dtype, device_map: as of `from_pretrained`; by default the saved dtype and the CPU. The dynamics stay in
            float32. Weights that are kept on the disk are refused.

    Returns:
        The model.

    Raises:
        ValueError: where the folder does not hold such a model, or options, weights and configuration do not fit
            together, or for another dtype or device.
    """
    path = Path(folder) if isinstance(folder, str | Path) else None
    require(path is not None and path.is_dir(), "folder", folder, "a folder on this machine")
    assert path is not None
    if dtype is not None and dtype != "auto":
        wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        fits = isinstance(wanted, torch.dtype) and wanted.is_floating_point
        require(fits, "dtype", dtype, "a floating-point dtype of PyTorch, its name, 'auto' or None")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"folder: got {path}, expected config.json of a model of transformers: {error}") from error
    options = saved_options(config)
    require(options is not None, "folder", str(path), f"config.json with {OPTIONS_FIELD}: {_EXPECTED}")
    assert options is not None
    if isinstance(device_map, str) and device_map not in ("auto", "balanced", "balanced_low_0", "sequential"):
        try:
            torch.device(device_map)
        except RuntimeError as error:
            raise ValueError(f"device_map: got {device_map!r}, expected a device or a map of devices") from error
    stale = (path / SAFE_WEIGHTS_NAME).exists() and (path / SAFE_WEIGHTS_INDEX_NAME).exists()
    require(not stale, "folder", f"{path} with {SAFE_WEIGHTS_NAME} beside its parts", "the files of one save")
    given: dict[str, Any] = {"config": config, "dtype": dtype or "auto", "device_map": device_map}
    expected, dynamics = f"weights of this model with config.{OPTIONS_FIELD}, no more", dict[str, Tensor]()
    try:
        with quiet_transformers():  # it would warn of the dynamics
            model, info = cast(Any, AutoModelForCausalLM).from_pretrained(
                path, **given, trust_remote_code=False, use_safetensors=True, output_loading_info=True
            )
        for file in path.glob("*.safetensors"):
            with safe_open(file, framework="pt") as weights:
                names = (name for name in weights.keys() if _DYNAMICS in name)  # noqa: SIM118 (no dictionary)
                dynamics |= {name: weights.get_tensor(name) for name in names}
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split("\n")[:2])  # of many, the first
        raise ValueError(f"folder: got {path}, expected {expected}: {reason}") from error
    saved = (config.architectures or ["no model"])[0]
    whole = "a causal language model; for others see replace_attention"
    require(saved == type(model).__name__, "folder", saved, whole)
    _, groups, modes = _sizes(next(iter(_hosts(model).values())))
    replace_attention(model, frequency=torch.zeros(groups, modes), backend=backend, **options)  # loaded with the rest
    own = {name for name in model.state_dict() if _DYNAMICS in name}
    both = {
        "missing": own - dynamics.keys() | set(info["missing_keys"]),
        "foreign": dynamics.keys() - own | {name for name in info["unexpected_keys"] if _DYNAMICS not in name},
    }
    found = "; ".join(f"{kind}: {', '.join(sorted(names)[:4])}" for kind, names in both.items() if names)
    require(not found, "folder", found, f"in {path} the {expected}")
    model.load_state_dict(dynamics, strict=False)
    return cast(PreTrainedModel, model.eval())
