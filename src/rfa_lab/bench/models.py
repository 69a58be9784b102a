"""Whole models: a training step beside another preset's, and `generate` beside transformers' Llama of the same size."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from rfa.models import DotProductAttentionConfig, RFAConfig, RFAForCausalLM, preset
from rfa.nn import FilterCache
from rfa_lab.training.trainer import clip_dynamics, make_optimizer

from .measurement import Case, Setting, Tick, compare, compare_with_tolerances, in_turns

PEER, LLAMA = "b1-rope", "llama"
NEW_TOKENS = 64
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_CHECKED_LENGTH = 64  # of a training step
_CHECKED_PROMPT, _CHECKED_TOKENS = 56, 8
# Errors pass through all layers; half precision rounds in each, and autocast in the backward pass too.
_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
_LOGITS_TOLERANCES = {**_TOLERANCES, "float32": 1e-4}


@dataclass(frozen=True)
class ModelCase(Case):
    """A case of a whole model.

    Fields:
        preset: of the model.
        batch: number of texts.
        length: of a text, or of a prompt.
        model: fields of the configuration.
        setting: of the benchmark.
    """

    preset: str
    batch: int
    length: int
    model: Mapping[str, Any]
    setting: Setting

    @property
    def title(self) -> str:
        """For the progress bar."""
        return f"{self.benchmark} {self.preset}"

    def described(self) -> dict[str, Any]:
        """The fields of every line."""
        config = self.config(self.preset)
        return {
            "preset": self.preset,
            "batch": self.batch,
            "length": self.length,
            "model": {**{size: getattr(config, size) for size in _SIZES}, **self.model},
            **self.setting.fields(),
            "backend": self.backend(config),
        }

    def config(self, name: str, backend: str | None = None, **more: Any) -> RFAConfig:
        """A preset at this size. Raises `ValueError` for an unknown preset, or fields that do not fit the preset."""
        return preset(name, **{**self.model, **more, "backend": backend or self.setting.backend})

    def backend(self, config: RFAConfig) -> str:
        """The backend of a model's layers, as `Setting.resolved`; "none" for PyTorch's own kernel, as in `b1-rope`."""
        attention = config.attention
        if isinstance(attention, DotProductAttentionConfig):
            biased = attention.prior not in ("flat", "window") or attention.decay.kind != "none"
            if not (biased or attention.rotate_values):
                return "none"
        channels = 2 * config.hidden_size // config.num_attention_heads
        return self.setting.resolved((channels, channels))

    def new_model(self, name: str, backend: str | None = None) -> RFAForCausalLM:
        """A model with the weights of seed 0, on the CPU."""
        torch.manual_seed(0)
        return RFAForCausalLM(self.config(name, backend))

    def tokens(self, batch: int, length: int) -> Tensor:
        """Random tokens."""
        generator = torch.Generator().manual_seed(0)
        vocabulary = self.config(self.preset).vocab_size
        return torch.randint(vocabulary, (batch, length), generator=generator).to(self.setting.device)


@dataclass(frozen=True)
class TrainingStepCase(ModelCase):
    """A training step of a preset and of its peer, of the same size. Everything but loading data is included."""

    benchmark = "step"
    peer: str = PEER

    def config(self, name: str, backend: str | None = None, **more: Any) -> RFAConfig:
        """A preset at this size, for this length of training."""
        return super().config(name, backend, train_length=self.length, **more)

    def described(self) -> dict[str, Any]:
        """The fields of every line."""
        other = {"peer_backend": self.backend(self.config(self.peer))} if self.peer != PEER else {}
        return {"pass": "training step", **super().described(), **other}

    def check(self, shared: None) -> dict[str, Any]:
        """Check loss and gradients of a short block against the same weights in float64 on the reference backend.

        The peer is checked too, but for `b1-rope`, which runs PyTorch's own attention.
        """
        compared = self._compared(self.preset, "")
        if self.peer != PEER:
            compared |= self._compared(self.peer, f"{self.peer}: ")
        return compare_with_tolerances(compared)

    def measured(self, shared: None, tick: Tick) -> Iterator[dict[str, Any]]:
        """Seconds of a step."""
        tokens, setting = self.tokens(self.batch, self.length), self.setting
        contestants = {"rfa": self._step(self.preset, tokens), self.peer: self._step(self.peer, tokens)}
        yield compare(in_turns(contestants, setting.repeats, setting.device, tick), self.peer)

    def _compared(self, name: str, before: str) -> dict[str, Any]:
        """The pairs of tensors that must agree, with their tolerances, by their names."""
        tokens = self.tokens(1, min(self.length, _CHECKED_LENGTH))
        model, exact = self._trained(name), self._trained(name, "reference").double()
        exact.load_state_dict(model.state_dict())
        with self._autocast():
            loss = model(tokens, labels=tokens).loss
        expected = exact(tokens, labels=tokens).loss
        loss.backward()
        expected.backward()
        groups = [make_optimizer(each, learning_rate=1.0).param_groups for each in (model, exact)]
        tolerance = _TOLERANCES[self.setting.dtype]
        compared = {f"{before}loss": ([(loss, expected)], tolerance)}
        for actual, wanted in zip(*groups, strict=True):
            pair = _gradient(actual["params"]), _gradient(wanted["params"])
            compared[f"{before}gradient of {actual['name']}"] = ([pair], tolerance)
        return compared

    def _step(self, name: str, tokens: Tensor) -> Callable[[], None]:
        """A closure that makes one step as `rfa_lab.training` does: two groups of parameters, two clips, Adam."""
        model = self._trained(name)
        optimizer = make_optimizer(model, learning_rate=1e-3)

        def step() -> None:
            with self._autocast():
                loss = model(tokens, labels=tokens).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            clip_dynamics(optimizer)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def _trained(self, name: str, backend: str | None = None) -> RFAForCausalLM:
        model = self.new_model(name, backend).train()
        return model.to(torch.device(self.setting.device))  # type: ignore[arg-type]

    def _autocast(self) -> torch.autocast:
        half = self.setting.dtype != "float32"
        return torch.autocast(self.setting.device, self.setting.torch_dtype if half else None, enabled=half)


def _gradient(parameters: list[nn.Parameter]) -> Tensor:
    return torch.cat([p.grad.flatten().double() for p in parameters if p.grad is not None])


@dataclass(frozen=True)
class GenerationCase(ModelCase):
    """Greedy decoding of `NEW_TOKENS` tokens after a prompt. Reading the prompt is included.

    The Llama has the same width, layers, heads, channels a head and vocabulary, and as many parameters in its
    feed-forward networks (three matrices of `8/3 hidden_size` channels for two of `4 hidden_size`). With a half
    precision all weights have it, except dynamics.
    """

    benchmark = "generate"

    def described(self) -> dict[str, Any]:
        """The fields of every line."""
        return {"pass": f"{NEW_TOKENS} tokens", **super().described()}

    @torch.no_grad()
    def check(self, shared: None) -> dict[str, Any]:
        """Compare the logits of tokens that enter a cache one by one with those of the whole text in float64."""
        tokens = self.tokens(1, _CHECKED_PROMPT + _CHECKED_TOKENS)
        model = self._placed(self.new_model(self.preset))
        exact = self._placed(self.new_model(self.preset, "reference"), torch.float64)
        exact.load_state_dict(model.state_dict())
        parts, cache = tokens.split([_CHECKED_PROMPT, *[1] * _CHECKED_TOKENS], dim=1), FilterCache()
        found = torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)
        tolerance = _LOGITS_TOLERANCES[self.setting.dtype]
        return compare_with_tolerances({"logits": ([(found, exact(tokens).logits)], tolerance)})

    @torch.no_grad()
    def measured(self, shared: None, tick: Tick) -> Iterator[dict[str, Any]]:
        """Seconds of one new token of every prompt."""
        model = self._placed(self.new_model(self.preset))
        contestants = {"rfa": self._generation(model), LLAMA: self._generation(self._llama())}
        seconds = in_turns(contestants, self.setting.repeats, self.setting.device, tick)
        of_a_token = {name: [each / NEW_TOKENS for each in of_calls] for name, of_calls in seconds.items()}
        yield compare(of_a_token, LLAMA)

    def _llama(self) -> PreTrainedModel:
        config = self.config(self.preset)
        llama = LlamaConfig(
            **{size: getattr(config, size) for size in _SIZES},
            intermediate_size=8 * config.hidden_size // 3,
            head_dim=2 * config.hidden_size // config.num_attention_heads,
            tie_word_embeddings=True,
        )
        return self._placed(LlamaForCausalLM(llama))

    def _placed(self, model: Any, dtype: torch.dtype | None = None) -> PreTrainedModel:
        return model.to(self.setting.device, dtype or self.setting.torch_dtype).eval()

    def _generation(self, model: Any) -> Callable[[], Tensor]:
        prompts = self.tokens(self.batch, self.length)
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        mask = torch.ones_like(prompts)
        return lambda: model.generate(prompts, attention_mask=mask, **options)
