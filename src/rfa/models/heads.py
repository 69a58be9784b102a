"""Models around the decoder beside the language model: classifiers of sequences and tokens, and masked language."""

from typing import Any, cast

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.modeling_outputs import SequenceClassifierOutputWithPast, TokenClassifierOutput
from transformers.utils.generic import can_return_tuple

from rfa.checks import require

from .caching import CACHE_NAME
from .configuration import RFAConfig
from .decoder import MaskedModelOutput, RFAPreTrainedModel, check_labels, loss_divisor
from .modeling import RFAModel
from .packing import Mask, read_mask


class RFAForSequenceClassification(GenericForSequenceClassification, RFAPreTrainedModel):
    """The decoder and a linear map of each sequence's last token to `config.num_labels` numbers.

    Losses are transformers' own. The last token is the last one that takes part: that the mask does not leave out, and
    whose id is not `config.pad_token_id`, on either side of padding. A batch of several sequences of ids needs a mask
    or such an id.
    """

    config_class = RFAConfig
    accepts_loss_kwargs = False  # for the Trainer: the loss is the mean of its batch

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "batch length"] | None = None,
        attention_mask: Mask | None = None,
        position_ids: Int[Tensor, "*p length"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "batch length hidden"] | None = None,
        labels: Shaped[Tensor, "..."] | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Logits `(batch, num_labels)`, and the loss where labels are given.

        Args:
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, kwargs: as in
                `RFAForCausalLM.forward`.
            labels: one class a sequence `(batch,)`, -100 for one that is not scored; or numbers `(batch, num_labels)`
                of several labels or of a regression.

        Raises:
            ValueError: for an unknown argument, or one that does not fit.
        """
        outputs = self.model(
            input_ids, attention_mask, past_key_values, use_cache, None, None, inputs_embeds, position_ids, **kwargs
        )
        hidden_states = outputs.last_hidden_state
        last = self._last_tokens(input_ids, attention_mask, hidden_states)
        logits, loss = self.score(hidden_states[torch.arange(len(last), device=last.device), last]), None
        if labels is not None:
            divisor = {"num_items_in_batch": loss_divisor(labels)} if self._check_classes(labels, logits) else {}
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, logits=logits, **divisor)
        shared = {name: outputs.get(name) for name in (CACHE_NAME, "hidden_states", "attentions")}
        return SequenceClassifierOutputWithPast(loss=loss, logits=logits, **shared)

    def _last_tokens(
        self,
        input_ids: Int[Tensor, "batch length"] | None,
        attention_mask: Mask | None,
        hidden_states: Float[Tensor, "batch length hidden"],
    ) -> Int[Tensor, " batch"]:
        """The column of each row's last token that takes part; 0 where none does."""
        batch, length, pad = *hidden_states.shape[:2], self.config.pad_token_id
        known = batch == 1 or input_ids is None or attention_mask is not None or pad is not None
        require(known, "attention_mask", None, "a mask or config.pad_token_id, for a batch of several sequences")
        columns = torch.arange(length, device=hidden_states.device).expand(batch, -1)
        if input_ids is not None and pad is not None:
            columns = columns.masked_fill(input_ids == pad, 0)
        if attention_mask is not None:
            keys = attention_mask.shape[-1]
            key_mask = read_mask(attention_mask, batch, length, keys, self.config.causal).key_mask
            if key_mask is not None:
                columns = columns.masked_fill(~key_mask[:, keys - length :], 0)
        return columns.amax(-1)

    def _check_classes(self, labels: object, logits: Float[Tensor, "batch classes"]) -> bool:
        """Whether there is one class a sequence. transformers infers the problem where it is not given.

        Raises:
            ValueError: for labels that do not fit it.
        """
        batch, classes, kind = logits.shape[0], cast(int, self.config.num_labels), self.config.problem_type
        numbers = isinstance(labels, Tensor) and labels.is_floating_point()
        if kind == "single_label_classification" or (kind is None and classes > 1 and not numbers):
            check_labels(labels, (batch,), classes)
            return True
        shapes = [(batch, classes), *([(batch,)] if classes == 1 else [])]
        given = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        fits = isinstance(labels, Tensor) and tuple(labels.shape) in shapes
        require(numbers and fits, "labels", given, f"floating-point {shapes[0]}")
        return False


class RFAForTokenClassification(GenericForTokenClassification, RFAPreTrainedModel):
    """The decoder, dropout of `config.classifier_dropout` (0.1), and a linear map of each token to labels.

    The loss is transformers' own. A token sees later ones only with `causal=False`.
    """

    config_class = RFAConfig

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "batch length"] | None = None,
        attention_mask: Mask | None = None,
        position_ids: Int[Tensor, "*p length"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "batch length hidden"] | None = None,
        labels: Int[Tensor, "batch length"] | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: int | Int[Tensor, ""] | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Logits `(batch, length, num_labels)`, and the loss where labels are given.

        Args:
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, kwargs: as in
                `RFAForCausalLM.forward`.
            labels: `(batch, length)`, a class for each token; -100 is not scored.
            num_items_in_batch: what the summed loss is divided by; by default the scored tokens.

        Raises:
            ValueError: for an unknown argument, or one that does not fit.
        """
        outputs = self.model(
            input_ids, attention_mask, past_key_values, use_cache, None, None, inputs_embeds, position_ids, **kwargs
        )
        logits, loss = self.score(self.dropout(outputs.last_hidden_state)), None
        if labels is not None:
            check_labels(labels, tuple(logits.shape[:2]), cast(int, self.config.num_labels))
            divisor = loss_divisor(labels, num_items_in_batch)
            loss = self.loss_function(logits, labels, self.config, num_items_in_batch=divisor)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class RFAForMaskedLM(RFAPreTrainedModel):
    """The masked language model: a bidirectional decoder, and a head that shares the embedding's weight, with a bias.

    Args:
        config: with `causal=False`.

    Raises:
        ValueError: for a causal configuration, whose tokens do not see what follows them.
    """

    config_class = RFAConfig

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: RFAConfig):
        require(not config.causal, "causal", config.causal, "False for a masked language model")
        super().__init__(config)
        self.model = RFAModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "batch length"] | None = None,
        attention_mask: Mask | None = None,
        labels: Int[Tensor, "batch length"] | None = None,
        inputs_embeds: Float[Tensor, "batch length hidden"] | None = None,
        num_items_in_batch: int | Int[Tensor, ""] | None = None,
        **kwargs: Any,
    ) -> MaskedModelOutput:
        """Logits of each token from all others, and the loss where labels are given.

        Args:
            input_ids: `(batch, length)`, with the tokens to foretell replaced.
            attention_mask: `(batch, length)`, 1 for tokens that take part; or of all pairs, as in `RFAForCausalLM`.
            labels: `(batch, length)`, of the same places; -100 is not scored, and the loss is 0 where nothing is.
            inputs_embeds: embeddings instead of `input_ids`.
            num_items_in_batch: what the summed loss is divided by; by default the scored tokens.
            kwargs: `times`, `segment_ids` and more, as in `RFAForCausalLM.forward`; no cache.

        Raises:
            ValueError: for an unknown argument, or one that does not fit.
        """
        outputs = self.model(input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        logits = self.lm_head(outputs.last_hidden_state)
        loss = self.token_loss(logits, labels, num_items_in_batch)
        return MaskedModelOutput(loss=loss, logits=logits, **outputs.beside_states())
