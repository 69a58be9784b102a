"""`generate` of a preset, compared with transformers' Llama of the same size."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from rfa.models import RFAConfig, RFAForCausalLM, preset
from rfa.nn import FilterCache

from .measurement import Setting, Tick, compare, compare_with_tolerances, in_turns

PEER = "llama"
NEW_TOKENS = 64
_CHECKED_PROMPT, _CHECKED_TOKENS = 56, 8
_TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.05}  # of logits; half precision rounds in each layer


@dataclass(frozen=True)
class GenerationCase:
    """Greedy decoding of `NEW_TOKENS` tokens after a prompt. Reading the prompt is included.

    The Llama has the same width, layers, heads, channels a head and vocabulary, and as many parameters in its
    feed-forward networks (three matrices of `8/3 hidden_size` channels for two of `4 hidden_size`).

    Fields:
        preset: of the model.
        batch: number of prompts.
        length: of a prompt.
        model: fields of the configuration.
        setting: of the benchmark. With a half precision all weights have it, except dynamics.
    """

    preset: str
    batch: int
    length: int
    model: Mapping[str, Any]
    setting: Setting

    @property
    def title(self) -> str:
        """For the progress bar."""
        return f"generate {self.preset}"

    @property
    def rounds(self) -> int:
        """How often `lines` ticks."""
        return self.setting.repeats

    @torch.no_grad()
    def lines(self, tick: Tick) -> Iterator[dict[str, Any]]:
        """Check, then measure. Seconds are those of one new token of every prompt."""
        setting, config = self.setting, self.config()
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        channels = 2 * config.hidden_size // config.num_attention_heads
        line = {
            "benchmark": "generate",
            "pass": f"{NEW_TOKENS} tokens",
            "preset": self.preset,
            "batch": self.batch,
            "length": self.length,
            "model": {**{size: getattr(config, size) for size in sizes}, **self.model},
            **setting.fields(),
            "backend": setting.resolved((channels, channels)),
            "check": self.check(),
        }
        if not line["check"]["passed"]:
            yield line
            return
        contestants = {"rfa": self._generation(self._model()), PEER: self._generation(self._llama())}
        seconds = in_turns(contestants, setting.repeats, setting.device, tick)
        of_a_token = {name: [each / NEW_TOKENS for each in of_calls] for name, of_calls in seconds.items()}
        yield {**line, **compare(of_a_token, PEER)}

    def check(self) -> dict[str, Any]:
        """Compare the logits of tokens that enter a cache one by one with those of the whole text in float64."""
        tokens = self._tokens(1, _CHECKED_PROMPT + _CHECKED_TOKENS)
        model, exact, cache = self._model(), self._model("reference", torch.float64), FilterCache()
        exact.load_state_dict(model.state_dict())
        parts = tokens.split([_CHECKED_PROMPT, *[1] * _CHECKED_TOKENS], dim=1)
        found = torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)
        return compare_with_tolerances({"logits": ([(found, exact(tokens).logits)], _TOLERANCES[self.setting.dtype])})

    def config(self, backend: str | None = None) -> RFAConfig:
        """The preset at this size.

        Raises:
            ValueError: for an unknown preset, or fields that do not fit the preset.
        """
        return preset(self.preset, **{**self.model, "backend": backend or self.setting.backend})

    def _model(self, backend: str | None = None, dtype: torch.dtype | None = None) -> PreTrainedModel:
        torch.manual_seed(0)
        return self._placed(RFAForCausalLM(self.config(backend)), dtype)

    def _llama(self) -> PreTrainedModel:
        config = self.config()
        llama = LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=8 * config.hidden_size // 3,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            head_dim=2 * config.hidden_size // config.num_attention_heads,
            tie_word_embeddings=True,
        )
        return self._placed(LlamaForCausalLM(llama))

    def _placed(self, model: Any, dtype: torch.dtype | None = None) -> PreTrainedModel:
        return model.to(self.setting.device, dtype or self.setting.torch_dtype).eval()

    def _generation(self, model: Any) -> Callable[[], Tensor]:
        prompts = self._tokens(self.batch, self.length)
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        mask = torch.ones_like(prompts)
        return lambda: model.generate(prompts, attention_mask=mask, **options)

    def _tokens(self, batch: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.config().vocab_size, (batch, length), generator=generator).to(self.setting.device)
