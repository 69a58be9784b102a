"""`replace_attention`: which modules of a decoder it replaces, and what it refuses; `load_replaced`."""

from collections.abc import Iterable
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from rfa.checks import require
from rfa.nn.checks import check_backend, check_dropout, check_frequencies, check_rates
from rfa.ops.problem import Prior, Weight

from .replaced_attention import (
    HOSTS,
    ReplacedAttention,
    check_saved_options,
    dispatched,
    empty_model,
    load_weights,
    saved_options,
    write_options,
)

Model = TypeVar("Model", bound=nn.Module)
_CHANGING = ("dynamic", "longrope")  # kinds of RoPE whose frequencies depend on the length


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
        dtype: of the weights, or its name; None and "auto" for that in which they were saved. The dynamics stay in
            float32.
        device_map: as of `from_pretrained`: a device, a dictionary of modules and devices, or "auto", "balanced" and
            more, for which accelerate is needed; None for the CPU.

    Returns:
        The model.

    Raises:
        ValueError: where the folder does not hold such a model, or options, weights and configuration do not fit
            together, or for another dtype.
    """
    path = Path(folder) if isinstance(folder, str | Path) else None
    require(path is not None and path.is_dir(), "folder", folder, "a folder on this machine")
    assert path is not None
    wanted = None
    if dtype not in (None, "auto"):
        wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        fits = isinstance(wanted, torch.dtype) and wanted.is_floating_point
        require(fits, "dtype", dtype, "a floating-point dtype of PyTorch, its name, 'auto' or None")
    model = empty_model(path, wanted)
    options = saved_options(model.config)
    assert options is not None
    _, groups, modes = _sizes(next(iter(_hosts(model).values())))
    replace_attention(model, frequency=torch.zeros(groups, modes), backend=backend, **options)  # loaded with the rest
    load_weights(model, path)
    return model.eval() if device_map is None else dispatched(model.eval(), device_map)


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
