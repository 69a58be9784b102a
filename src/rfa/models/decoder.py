"""The decoder that all models share: pre-norm blocks of attention and a feed-forward network, and their weights."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel, initialization
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from rfa.checks import require
from rfa.nn import HeadDynamics, NormalLinear
from rfa.nn.checks import check_ids
from rfa.nn.content import ContentDynamics
from rfa.nn.dynamics import FullPrecision
from rfa.nn.projections import TokenLogits, normal_projection
from rfa.ops.positions import Positions, check_tensor
from rfa.ops.transforms import joined, recorded_weights

from .configuration import DecoderConfig, auto_map
from .packing import CACHE_NAME, CACHE_NAMES, one_cache

NOT_SCORED = -100  # transformers' loss ignores this label
_FULL_PRECISION = {"dynamics", "geometry", "clock", "state_scale", "gate_projection"}  # modules of a layer


@dataclass
class DecoderOutput(BaseModelOutputWithPast):
    """The decoder's output.

    Fields:
        attentions: of each layer, `(batch, heads, queries, keys)`: weights after the softmax, before decay and dropout.
            Each row sums to one, or to zero where a query sees no key.
        log_precisions: of each layer, `(batch, heads, queries)`: the log precision of each token's estimate, which is
            less the more uncertain the model is; -inf where a query sees no key. None where weights are not precisions.
    """

    log_precisions: tuple[Tensor, ...] | None = None

    def beside_states(self) -> dict[str, Any]:
        """The fields that the output of a model with a head takes over."""
        return {name: value for name, value in self.items() if name != "last_hidden_state"}


@dataclass
class LanguageModelOutput(CausalLMOutputWithPast):
    """The output of a language model, also a masked one; `attentions` and `log_precisions` as in `DecoderOutput`."""

    log_precisions: tuple[Tensor, ...] | None = None


class RFABlock(GradientCheckpointingLayer):
    """`x + attention(norm(x))`, then `x + feed_forward(norm(x))`."""

    def __init__(self, config: DecoderConfig, layer_index: int):
        super().__init__()
        size, inner = config.hidden_size, cast(int, config.intermediate_size)
        self.layer_index = layer_index
        self.attention_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.attention = config.build_attention()
        self.feed_forward_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.feed_forward = nn.Sequential(normal_projection(size, inner), nn.GELU(), normal_projection(inner, size))

    def forward(
        self,
        hidden_states: Float[Tensor, "batch length hidden"],
        positions: Positions | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "batch length hidden"]:
        """The block's output."""
        hidden_states = hidden_states + self.attention(
            self.attention_norm(hidden_states),
            positions=positions,
            past_key_values=one_cache(past_key_values, cache),
            layer_index=self.layer_index,
        )
        return hidden_states + self.feed_forward(self.feed_forward_norm(hidden_states))


_LANGUAGE, _CLASSIFIER = {"lm_head.weight", "lm_head.bias"}, {"score.weight", "score.bias"}
_HEADS: dict[str, set[str]] = {  # the parameters of the heads, by the class that a checkpoint names
    "RFAModel": set(),
    "RFAForCausalLM": _LANGUAGE,
    "RFAForMaskedLM": _LANGUAGE,
    "RFAForSequenceClassification": _CLASSIFIER,
    "RFAForTokenClassification": _CLASSIFIER,
}


class RFAPreTrainedModel(PreTrainedModel):
    """Weights and their initialisation."""

    config_class = DecoderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["RFABlock"]  # noqa: RUF012
    _skip_keys_device_placement = list(CACHE_NAMES)  # noqa: RUF012
    _keep_in_fp32_modules_strict = _FULL_PRECISION
    _can_record_outputs = {"hidden_states": RFABlock}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and hasattr(module, "deviation"):
            NormalLinear.reset_parameters(cast(NormalLinear, module))
        elif isinstance(module, nn.Linear):  # the head; it shares the embedding's weight unless it is untied
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:  # the head of a classifier has none
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):  # also the head's weight, which then gives logits of unit variance
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, TokenLogits):
            module.reset_parameters()
        elif isinstance(module, FullPrecision):  # parameters missing in a checkpoint start as in a new layer
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                fresh = cast(DecoderConfig, self.config).build_attention()
            initial = next(child for child in fresh.children() if type(child) is type(module)).state_dict()
            for name, tensor in module.state_dict().items():
                initialization.copy_(tensor, initial[name])

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """The model of a checkpoint, as in transformers, but it must be complete.

        A checkpoint of a class with another head, or with none, gets a new head, and its own one is left out. With
        `tie_word_embeddings=False` the head of a checkpoint with a tied one begins as the embedding.

        Raises:
            ValueError: for a `tp_plan` or `tp_size`, also of a `distributed_config`: the models have none. Where other
                parameters are missing, or there are others: transformers would draw the missing ones at random with a
                warning. With `output_loading_info` the caller judges.
        """
        for name in ("tp_plan", "tp_size"):
            for given in (kwargs.get(name), getattr(kwargs.get("distributed_config"), name, None)):
                require(given is None, name, given, "None: rfa.parallel.fully_sharded shares the weights")
        loaded = cast(Any, super()).from_pretrained(*args, output_loading_info=True, **kwargs)
        if output_loading_info:
            return loaded
        model, info = loaded
        missing, unknown = set(info["missing_keys"]), set(info["unexpected_keys"])
        if kwargs.get("tie_word_embeddings") is False and "lm_head.weight" in missing:
            model.lm_head.weight.data.copy_(model.get_input_embeddings().weight)
            missing.remove("lm_head.weight")
        head = (_LANGUAGE | _CLASSIFIER) & set(model.state_dict())
        saved = set().union(*(_HEADS.get(each, head) for each in model.config.architectures or [cls.__name__]))
        if not head & saved:
            missing -= head
        unknown -= saved - head
        for fault, found in (("without", missing), ("with the unknown", unknown)):
            names = sorted(found)
            given = f"a checkpoint {fault} {', '.join(names[:3])}{', ...' * (len(names) > 3)} ({len(names)} in all)"
            expected = f"the parameters of {cls.__name__} in this version and configuration"
            require(not names, "checkpoint", given, expected)
        return model

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Upload the model as transformers does, with the files that let it load without `import rfa`.

        `AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)` loads it where the package is installed.
        `rfa export` adds a tokenizer and a model card.
        """
        self.config.auto_map = auto_map(self.config.model_type)
        return super().push_to_hub(*args, **kwargs)

    def token_loss(
        self,
        logits: Float[Tensor, "batch length vocabulary"],
        labels: Tensor | None,
        num_items: int | Tensor | None,
        first: int = 0,
    ) -> Tensor | None:
        """Cross entropy as transformers' `loss_function`, which scores labels from the `first` on; None without labels.

        Raises:
            ValueError: unless there is one label a token, of the vocabulary or -100, which is not scored.
        """
        if labels is None:
            return None
        vocabulary = self.config.vocab_size
        check_labels(labels, tuple(logits.shape[:2]), vocabulary)
        divisor = loss_divisor(labels[:, first:], num_items)
        return self.loss_function(logits=logits, labels=labels, vocab_size=vocabulary, num_items_in_batch=divisor)

    @classmethod
    def register_for_auto_class(cls, auto_class: object = None) -> None:
        """Do nothing, as `DecoderConfig.register_for_auto_class`."""

    def head_dynamics(self) -> dict[int, HeadDynamics]:
        """The dynamics of each layer by the layer's index. Layers without dynamics of their heads are left out."""
        blocks = (module for module in self.modules() if isinstance(module, RFABlock))
        found = {block.layer_index: getattr(block.attention, "dynamics", None) for block in blocks}
        return {index: dynamics for index, dynamics in found.items() if isinstance(dynamics, HeadDynamics)}

    def sde_parameters(self) -> list[nn.Parameter]:
        """The learned dynamics and noises, which an optimiser treats apart (appendix F)."""
        found = [parameter for dynamics in self.head_dynamics().values() for parameter in dynamics.parameters()]
        content = (module for module in self.modules() if isinstance(module, ContentDynamics))
        # the map of the content is a projection
        return found + [p for each in content for name, p in each.named_parameters() if name.startswith("raw_")]

    def add_blocks(self, config: DecoderConfig) -> None:
        """Make the decoder's modules: a linear map, the blocks, a norm and a linear map."""
        # tokens enter the residual stream with unit variance; with less, attention's output would dominate them
        self.input_projection = normal_projection(config.hidden_size, config.hidden_size, deviation=1.0)
        self.layers = nn.ModuleList(RFABlock(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.output_projection = normal_projection(config.hidden_size, config.hidden_size)

    def run_blocks(
        self,
        embedded: Float[Tensor, "batch length hidden"],
        positions: Positions,
        past_key_values: Cache | None = None,
        weights: list[tuple[Tensor, Tensor]] | None = None,
    ) -> Float[Tensor, "batch length hidden"]:
        """Final hidden states of embedded tokens, whose parts have variance `1 / hidden_size`.

        Each block's attention weights and their log sums join `weights`, by the reference backend.
        """
        # in the embedding's precision: under autocast the residual stream would be of half precision else
        hidden_states = self.input_projection(embedded).to(embedded.dtype)
        for layer in self.layers:
            with nullcontext() if weights is None else recorded_weights() as rows:
                # by keyword, for gradient checkpointing to find the cache
                hidden_states = layer(hidden_states, positions=positions, **{CACHE_NAME: past_key_values})
            if weights is not None and rows is not None:
                weights.append(joined(rows, positions.visible(cast(RFABlock, layer).attention.causal)))
        return self.output_projection(self.norm(hidden_states))


def loss_divisor(labels: Tensor, num_items: int | Tensor | None = None) -> int | Tensor:
    """What the summed loss is divided by: the scored labels; 1 where there is none, whose loss is 0 and not 0 / 0."""
    count = (labels != NOT_SCORED).sum() if num_items is None else num_items
    return count + (count == 0)


def check_labels(labels: object, shape: tuple[int, ...], classes: int) -> None:
    """Raise `ValueError` unless labels are int64 of this shape, each a class or -100."""
    labels = check_tensor("labels", labels)
    fits = labels.dtype == torch.int64 and tuple(labels.shape) == shape
    require(fits, "labels", f"{labels.dtype} {tuple(labels.shape)}", f"torch.int64 {shape}, as the logits")
    check_ids("labels", labels, classes, NOT_SCORED)
