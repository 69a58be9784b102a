"""Models around the decoder beside the language model: classifiers of sequences and tokens, and masked language."""

from collections.abc import Callable
from typing import Any, cast

from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.utils.generic import can_return_tuple

from rfa.checks import require
from rfa.nn.checks import check_ids

from .configuration import RFAConfig
from .decoder import NOT_SCORED, MaskedModelOutput, RFAPreTrainedModel
from .modeling import RFAModel


class _Classifier(RFAPreTrainedModel):
    """Labels are checked before transformers' loss meets them: a class that there is not would stop a GPU's process."""

    label_dims: int  # of one label a sequence, or one a token

    @property
    def loss_function(self) -> Callable[..., Tensor]:
        """transformers' loss for the kind of labels."""
        loss = cast(Any, super()).loss_function

        def of_labels(logits: Tensor, labels: Tensor, *rest: Any, **options: Any) -> Tensor:
            classes, kind = cast(int, self.config.num_labels), self.config.problem_type
            if classes > 1 and kind in (None, "single_label_classification") and not labels.is_floating_point():
                shape = tuple(logits.shape[: self.label_dims])
                require(tuple(labels.shape) == shape, "labels", tuple(labels.shape), f"shape {shape}")
                check_ids("labels", labels, classes, NOT_SCORED)
            if rest:
                return loss(logits, labels, *rest, **options)
            return loss(logits=logits, labels=labels, **options)  # in another order for sequences

        return of_labels

    @loss_function.setter
    def loss_function(self, loss: Callable[..., Tensor]) -> None:
        self._loss_function = loss


class RFAForSequenceClassification(GenericForSequenceClassification, _Classifier):
    """The decoder and a linear map of each sequence's last token to `config.num_labels` numbers.

    Forward, losses and the choice of the last token are transformers' own. It is the last one whose id is not
    `config.pad_token_id`, on either side of padding. A batch of several sequences needs such an id and a mask. Further
    arguments, such as `times`, are those of `RFAModel`.
    """

    config_class = RFAConfig
    label_dims = 1


class RFAForTokenClassification(GenericForTokenClassification, _Classifier):
    """The decoder, dropout of `config.classifier_dropout` (0.1), and a linear map of each token to labels.

    Forward and loss are transformers' own. A token sees later ones only with `causal=False`.
    """

    config_class = RFAConfig
    label_dims = 2


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
