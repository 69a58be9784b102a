"""Models around the decoder beside the language model: classifiers of sequences and tokens, and masked language."""

from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from transformers.utils.generic import can_return_tuple

from rfa.checks import require

from .configuration import RFAConfig
from .decoder import MaskedModelOutput, RFAPreTrainedModel, check_labels, divisor_of
from .modeling import RFAModel


class _Classifier(RFAPreTrainedModel):
    """Labels are checked before transformers' loss meets them: a class that there is not would stop a GPU's process."""

    accepts_loss_kwargs = False  # the loss is a mean over the batch: the Trainer divides where it accumulates

    def check_classes(self, labels: object, logits: Float[Tensor, "batch length classes"]) -> None:
        """Raise `ValueError` for labels that do not fit the problem."""
        raise NotImplementedError

    @property
    def loss_function(self) -> Callable[..., Tensor]:
        """transformers' loss for the kind of labels."""
        loss = cast(Any, super()).loss_function

        def of_labels(logits: Tensor, labels: Tensor, *rest: Any, **options: Any) -> Tensor:
            self.check_classes(labels, logits)
            if not labels.is_floating_point():  # classes, of which all may be -100
                options["num_items_in_batch"] = divisor_of(labels)
            if rest:
                return loss(logits, labels, *rest, **options)
            return loss(logits=logits, labels=labels, **options)  # in another order for sequences

        return of_labels

    @loss_function.setter
    def loss_function(self, loss: Callable[..., Tensor]) -> None:
        self._loss_function = loss


class RFAForSequenceClassification(GenericForSequenceClassification, _Classifier):
    """The decoder and a linear map of each sequence's last token to `config.num_labels` numbers.

    Losses are transformers' own. The last token is the last one whose id is not `config.pad_token_id`, on either side
    of padding. A batch of several sequences needs such an id and a mask. Of embeddings it is the last one of the mask.
    Further arguments, such as `times`, are those of `RFAModel`.
    """

    config_class = RFAConfig

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "batch length"] | None = None,
        attention_mask: Shaped[Tensor, "batch length"] | None = None,
        inputs_embeds: Float[Tensor, "batch length hidden"] | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Numbers `(batch, num_labels)`, and the loss where labels are given.

        Raises:
            ValueError: for an argument that does not fit, or several sequences of ids without `config.pad_token_id`.
        """
        outputs = self.model(input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        states = outputs.last_hidden_state
        pad = cast("int | None", self.config.pad_token_id)
        present = attention_mask
        if input_ids is not None:
            require(pad is not None or len(states) == 1, "pad_token_id", pad, "an id, for several sequences")
            present = None if pad is None else input_ids != pad
        place = torch.arange(states.shape[1], device=states.device)
        last = place[-1] if present is None else (place * (present != 0)).argmax(-1)
        logits = self.score(states)
        pooled = logits[torch.arange(len(states), device=states.device), last]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=pooled, config=self.config)
        beside = {name: value for name, value in outputs.beside_states().items() if name != "log_precisions"}
        return SequenceClassifierOutputWithPast(loss=loss, logits=pooled, **beside)

    def check_classes(self, labels: object, logits: Float[Tensor, "batch length classes"]) -> None:
        """Raise `ValueError` for labels that do not fit the problem, which transformers infers where it is not given.

        One class a sequence; or numbers `(batch, num_labels)` of several labels or of a regression.
        """
        batch, classes, kind = logits.shape[0], cast(int, self.config.num_labels), self.config.problem_type
        numbers = isinstance(labels, Tensor) and labels.is_floating_point()
        if kind == "single_label_classification" or (kind is None and classes > 1 and not numbers):
            return check_labels(labels, (batch,), classes)
        shapes = [(batch, classes), *([(batch,)] if classes == 1 else [])]
        given = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        fits = isinstance(labels, Tensor) and tuple(labels.shape) in shapes
        require(numbers and fits, "labels", given, f"floating-point {shapes[0]}")


class RFAForTokenClassification(GenericForTokenClassification, _Classifier):
    """The decoder, dropout of `config.classifier_dropout` (0.1), and a linear map of each token to labels.

    Forward and loss are transformers' own. A token sees later ones only with `causal=False`.
    """

    config_class = RFAConfig

    def check_classes(self, labels: object, logits: Float[Tensor, "batch length classes"]) -> None:
        """Raise `ValueError` unless each token has a class or -100."""
        check_labels(labels, tuple(logits.shape[:2]), cast(int, self.config.num_labels))


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
        attention_mask: Shaped[Tensor, "batch length"] | None = None,
        labels: Int[Tensor, "batch length"] | None = None,
        inputs_embeds: Float[Tensor, "batch length hidden"] | None = None,
        num_items_in_batch: int | Int[Tensor, ""] | None = None,
        **kwargs: Any,
    ) -> MaskedModelOutput:
        """Logits of each token from all others, and the loss where labels are given.

        Args:
            input_ids: `(batch, length)`, with the tokens to foretell replaced.
            attention_mask: `(batch, length)`, 1 for tokens that take part.
            labels: `(batch, length)`, of the same places; -100 is not scored.
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
