"""The language model: an embedding, the decoder and a tied head."""

import warnings
from typing import Any, cast

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.modeling_outputs import SequenceClassifierOutputWithPast, TokenClassifierOutput
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from rfa.checks import require
from rfa.nn import FilterCache
from rfa.nn.cache import check_cache, locate_tokens
from rfa.nn.checks import check_ids, check_states
from rfa.ops.positions import check_tensor

from .configuration import RFAConfig
from .decoder import (
    DecoderOutput,
    LanguageModelOutput,
    RFAPreTrainedModel,
    check_labels,
    loss_divisor,
)
from .packing import CACHE_NAME, Mask, NewTokens, check_absolute, one_cache, packed_segments, read_mask

_KNOWN = {"output_hidden_states", "cache_position"}


class RFAModel(RFAPreTrainedModel):
    """The decoder without its head: token ids to final hidden states."""

    config_class = RFAConfig

    def __init__(self, config: RFAConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.add_blocks(config)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Int[Tensor, "batch length"] | None = None,
        attention_mask: Mask | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        times: Float[Tensor, "*t keys"] | Int[Tensor, "*t keys"] | None = None,
        segment_ids: Int[Tensor, "batch keys"] | None = None,
        inputs_embeds: Float[Tensor, "batch length hidden"] | None = None,
        position_ids: Int[Tensor, "*p length"] | None = None,
        output_attentions: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> DecoderOutput:
        """Final hidden states `(batch, length, hidden)`; arguments as `RFAForCausalLM.forward`."""
        refuse_unknown(kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids: expected either input_ids or inputs_embeds, and not both")
        if inputs_embeds is None:
            ids = check_tensor("input_ids", input_ids)
            fits = ids.dim() == 2 and ids.dtype in (torch.int32, torch.int64)
            require(fits, "input_ids", f"{ids.dtype} {tuple(ids.shape)}", "integers (batch, length)")
            check_ids("input_ids", ids, self.config.vocab_size)
            embedded = self.embed_tokens(ids)
        else:
            check_states("inputs_embeds", inputs_embeds, self.config.hidden_size, self.input_projection)
            embedded = inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache and self.config.causal and not torch.is_grad_enabled()
        require(self.config.causal or not use_cache, "use_cache", use_cache, "False with causal=False")
        past_key_values = one_cache(past_key_values, cache)
        if use_cache and past_key_values is None and not self._is_checkpointed():
            past_key_values = FilterCache()
        past_key_values = check_cache(past_key_values)
        if past_key_values is not None and not torch.compiler.is_compiling():
            past_key_values.hold_for(self)
        batch, length = embedded.shape[:2]
        cached = 0 if past_key_values is None else past_key_values.get_seq_length()
        if self._is_checkpointed():
            expected = "an empty cache in training with gradient checkpointing"
            require(not cached, "past_key_values", f"{cached} tokens", expected)
        key_mask, documents = read_mask(attention_mask, batch, length, cached + length, self.config.causal)
        tokens = NewTokens(batch, length, cached, embedded.device, key_mask)
        segment_ids = packed_segments(tokens, segment_ids, documents, position_ids)
        if not self.config.attention.is_relative():
            check_absolute(tokens, segment_ids, position_ids)
        if times is None:
            times = tokens.places()
        positions = locate_tokens(batch, length, embedded.device, times, key_mask, segment_ids, past_key_values)

        weights = self._weights_to_record(output_attentions)
        hidden_states = self.run_blocks(embedded, positions, past_key_values, weights=weights)
        if past_key_values is not None:
            past_key_values.warn_uncertified()
        named: dict[str, Any] = {CACHE_NAME: past_key_values}
        output = DecoderOutput(last_hidden_state=hidden_states, **named)
        if weights is not None:
            output.attentions = tuple(of_layer for of_layer, _ in weights)
            if self.config.attention.has_precision():
                output.log_precisions = tuple(log_sum for _, log_sum in weights)
        return output

    def _is_checkpointed(self) -> bool:
        """Whether gradient checkpointing takes caches away from the layers, which would fill them twice."""
        return bool(self.gradient_checkpointing and self.training)

    def _weights_to_record(self, wanted: bool | None) -> list[tuple[Tensor, Tensor]] | None:
        """An empty list where attention weights are wanted, by the argument or else by the configuration."""
        if not (self.config.output_attentions if wanted is None else wanted):
            return None
        compiled = torch.compiler.is_compiling() or self._is_checkpointed()
        expected = "False under torch.compile and in gradient checkpointing"
        require(not compiled, "output_attentions", True, expected)
        return []


class VocabularyModel(RFAPreTrainedModel):
    """`RFAModel` and a head of logits that shares the embedding's weight and has a bias."""

    config_class = RFAConfig
    is_causal_model: bool

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: RFAConfig):
        fits, wanted = config.causal == self.is_causal_model, self.is_causal_model
        require(fits, "causal", config.causal, f"{wanted} for a {'causal' if wanted else 'masked'} language model")
        super().__init__(config)
        self.model = RFAModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "lm_head" and getattr(value, "bias", None) is None:
            warnings.warn(
                f"lm_head: got {type(value).__name__} without a bias, expected one: other logits, and once saved it "
                "cannot be loaded. PEFT drops it where tokens of a tied head are trained: load the model with "
                "tie_word_embeddings=False, and name embed_tokens alone",
                stacklevel=2,
            )


class RFAForCausalLM(VocabularyModel, GenerationMixin):
    """The language model: `RFAModel` and a head that shares the embedding's weight and has a bias."""

    is_causal_model = True

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "batch length"] | None = None,
        attention_mask: Mask | None = None,
        labels: Int[Tensor, "batch length"] | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        times: Float[Tensor, "*t keys"] | Int[Tensor, "*t keys"] | None = None,
        segment_ids: Int[Tensor, "batch keys"] | None = None,
        inputs_embeds: Float[Tensor, "batch length hidden"] | None = None,
        logits_to_keep: int | Int[Tensor, " kept"] = 0,
        num_items_in_batch: int | Int[Tensor, ""] | None = None,
        position_ids: Int[Tensor, "*p length"] | None = None,
        output_attentions: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> LanguageModelOutput:
        """Logits, and the loss where labels are given.

        Args:
            input_ids: `(batch, length)`.
            attention_mask: `(batch, keys)`, 1 for tokens that take part and 0 for others, cached ones included. Padding
                takes no time, wherever it stands. Or `(batch, 1, length, keys)` of all pairs, boolean or to be added to
                scores, which shows documents beside each other: they are read as `segment_ids`. Not for `generate`.
            labels: `(batch, length)`, shifted inside; -100 is not scored, and the loss is 0 where nothing is. The first
                token of a packed document is to be -100, as transformers' collators make it: nothing foretells it.
            past_key_values: a `FilterCache` of the tokens before these, which the call extends.
            use_cache: make such a cache; by default `config.use_cache`, where no gradient is asked for.
            times: of all tokens, cached ones included, `(keys,)` or `(batch, keys)`; 0, 1, 2, ... by default. For
                `generate`, `(batch, prompt + new tokens)`.
            segment_ids: `(batch, keys)`, the documents of a packed sequence: tokens see their own one only. Not for
                `generate`.
            inputs_embeds: embeddings instead of `input_ids`.
            logits_to_keep: the number of last positions, or the indices of positions; 0 is all.
            num_items_in_batch: what the summed loss is divided by, from the Trainer; by default the scored tokens.
            position_ids: of the new tokens, `(length,)` or `(batch, length)`. Numbers that count up by one change
                nothing: the estimate depends on differences of times. Where they restart, at 0 or at the row's first
                one, a packed document begins. Others are refused; positions that are real times are `times`. After
                cached tokens they continue from the number of these.
            output_attentions: also return the attention weights of each layer, and the log precision of each token's
                estimate (`DecoderOutput`). The slower reference backend computes them, in O(N^2) memory.
            cache: the name of `past_key_values` in transformers 5.24 and later.
            kwargs: `output_hidden_states` and `return_dict`.

        Raises:
            ValueError: for an unknown argument, ids or labels outside the vocabulary, or labels, a mask, segments,
                positions or times that do not fit.
        """
        outputs = self.model(
            input_ids,
            attention_mask,
            past_key_values,
            use_cache,
            times,
            segment_ids,
            inputs_embeds,
            position_ids,
            output_attentions,
            cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else logits_to_keep
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states if isinstance(kept, int) else hidden_states[:, kept])
        loss = self.token_loss(logits, labels, num_items_in_batch, first=1)
        return LanguageModelOutput(loss=loss, logits=logits, **outputs.beside_states())

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Let `generate` decode with a `FilterCache`, of a fixed size with `cache_implementation="static"`.

        In training with gradient checkpointing it decodes without a cache.
        """
        implementation, given = generation_config.cache_implementation, model_kwargs.get(CACHE_NAME)
        served = implementation in (None, "dynamic", "static")
        expected = "None, 'dynamic' or 'static'; use_cache=False and prefill_chunk_size save memory"
        require(served, "cache_implementation", implementation, expected)
        if self.model._is_checkpointed():
            generation_config.use_cache = False  # of a copy that `generate` made
        elif given is None and generation_config.use_cache is not False:
            limit = max(kwargs.get("max_cache_length", args[-1] if args else 0), generation_config.max_cache_len or 0)
            model_kwargs[CACHE_NAME] = FilterCache(limit if implementation == "static" else None)
        else:
            if given is not None:
                model_kwargs[CACHE_NAME] = check_cache(given)
            cast(Any, super())._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)

    def _prepare_position_ids_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """None: positions that count up say nothing new, so none are made at each step."""

    def prepare_inputs_for_generation(
        self,
        input_ids: Int[Tensor, "batch length"],
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "batch length hidden"] | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """For `generate`, `times` are those of the prompt and of all tokens to come: each step takes its part."""
        past_key_values = one_cache(past_key_values, cache)
        kwargs |= {CACHE_NAME: past_key_values, "inputs_embeds": inputs_embeds}
        inputs = cast(Any, super()).prepare_inputs_for_generation(input_ids, **kwargs)
        if CACHE_NAME in inputs:  # peft knows the older name alone: with it, prompts stand before the first token only
            inputs["past_key_values"] = inputs.pop(CACHE_NAME)
        given = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
        cached = 0 if past_key_values is None else past_key_values.get_seq_length()
        if (times := inputs.get("times")) is not None:
            if times.dim() != 2:  # transformers repeats the first dimension for beams and several samples
                raise ValueError(f"times: got shape {tuple(times.shape)}, expected (batch, prompt + new tokens)")
            inputs["times"] = times[:, : cached + given.shape[1]]
        mask = inputs.get("attention_mask")
        if isinstance(mask, Tensor) and bool((mask == 1).all()):
            del inputs["attention_mask"]  # a compiled model cannot see that it says nothing
        return inputs


def refuse_unknown(given: dict[str, object]) -> None:
    """Raise `ValueError` for an unknown argument. Without this a misspelt argument would have no effect."""
    for name, value in given.items():
        if name not in _KNOWN and value is not None and value is not False:
            raise ValueError(f"{name}: not an argument of this model")


# Models around the decoder beside the language model: classifiers of sequences and tokens, and masked language


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
        labels = check_tensor("labels", labels)
        fits = numbers and tuple(labels.shape) in shapes
        require(fits, "labels", f"{labels.dtype} {tuple(labels.shape)}", f"floating-point {shapes[0]}")
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


class RFAForMaskedLM(VocabularyModel):
    """The masked language model: a bidirectional decoder, and a head that shares the embedding's weight, with a bias.

    Args:
        config: with `causal=False`.

    Raises:
        ValueError: for a causal configuration, whose tokens do not see what follows them.
    """

    is_causal_model = False

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "batch length"] | None = None,
        attention_mask: Mask | None = None,
        labels: Int[Tensor, "batch length"] | None = None,
        inputs_embeds: Float[Tensor, "batch length hidden"] | None = None,
        num_items_in_batch: int | Int[Tensor, ""] | None = None,
        **kwargs: Any,
    ) -> LanguageModelOutput:
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
        return LanguageModelOutput(loss=loss, logits=logits, **outputs.beside_states())
