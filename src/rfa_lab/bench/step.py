"""One training step of a preset, compared with another one's. Everything but loading data is included."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rfa.models import DotProductAttentionConfig, RFAConfig, RFAForCausalLM, preset
from rfa_lab.training.trainer import DYNAMICS_CLIP, make_optimizer

from .measurement import Setting, Tick, compare, compare_with_tolerances, in_turns

PEER = "b1-rope"
_CHECKED_LENGTH = 64
# Errors pass through all layers, forward and backward, and autocast rounds at each.
_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}


@dataclass(frozen=True)
class TrainingStepCase:
    """A training step of a preset and of its peer. `model` has fields of the configuration, the same for both."""

    preset: str
    batch: int
    length: int
    model: Mapping[str, Any]
    setting: Setting
    peer: str = PEER

    @property
    def title(self) -> str:
        """For the progress bar."""
        return f"step {self.preset}"

    @property
    def rounds(self) -> int:
        """How often `lines` ticks."""
        return self.setting.repeats

    def lines(self, tick: Tick) -> Iterator[dict[str, Any]]:
        """Check, then measure."""
        setting, config = self.setting, self.config(self.preset)
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        line = {
            "benchmark": "step",
            "pass": "training step",
            "preset": self.preset,
            "batch": self.batch,
            "length": self.length,
            "model": {**{size: getattr(config, size) for size in sizes}, **self.model},
            **setting.fields(),
            "backend": self.backend(config),
            **({"peer_backend": self.backend(self.config(self.peer))} if self.peer != PEER else {}),
            "check": self.check(),
        }
        if not line["check"]["passed"]:
            yield line
            return
        tokens = self._tokens(self.batch, self.length)
        contestants = {"rfa": self._step(self.preset, tokens), self.peer: self._step(self.peer, tokens)}
        yield {**line, **compare(in_turns(contestants, setting.repeats, setting.device, tick), self.peer)}

    def check(self) -> dict[str, Any]:
        """Check loss and gradients of a short block against the same weights in float64 on the reference backend.

        The peer is checked too, but for `b1-rope`, which runs PyTorch's own attention.
        """
        compared = self._compared(self.preset, "")
        if self.peer != PEER:
            compared |= self._compared(self.peer, f"{self.peer}: ")
        return compare_with_tolerances(compared)

    def _compared(self, name: str, before: str) -> dict[str, Any]:
        """The pairs of tensors that must agree, with their tolerances, by their names."""
        tokens = self._tokens(1, min(self.length, _CHECKED_LENGTH))
        model, exact = self._model(name), self._model(name, "reference").double()
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

    def backend(self, config: RFAConfig) -> str:
        """The backend of a model's layers; "none" if PyTorch's own kernel is used, as in `b1-rope`.

        Raises:
            ValueError, RuntimeError: as `Setting.resolved`.
        """
        attention = config.attention
        if isinstance(attention, DotProductAttentionConfig):
            biased = attention.prior not in ("flat", "window") or attention.decay.kind != "none"
            if not (biased or attention.rotate_values):
                return "none"
        channels = 2 * config.hidden_size // config.num_attention_heads
        return self.setting.resolved((channels, channels))

    def config(self, name: str, backend: str | None = None) -> RFAConfig:
        """A preset at this size.

        Raises:
            ValueError: for an unknown preset, or fields that do not fit the preset.
        """
        chosen = {"train_length": self.length, "backend": backend or self.setting.backend}
        return preset(name, **{**self.model, **chosen})

    def _step(self, name: str, tokens: Tensor) -> Callable[[], None]:
        """A closure that makes one step as `rfa_lab.training` does: two groups of parameters, two clips, Adam."""
        model = self._model(name)
        optimizer = make_optimizer(model, learning_rate=1e-3)

        def step() -> None:
            with self._autocast():
                loss = model(tokens, labels=tokens).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups[1:]:
                nn.utils.clip_grad_norm_(group["params"], DYNAMICS_CLIP)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def _model(self, name: str, backend: str | None = None) -> RFAForCausalLM:
        torch.manual_seed(0)
        model = RFAForCausalLM(self.config(name, backend)).train()
        return model.to(torch.device(self.setting.device))  # type: ignore[arg-type]

    def _tokens(self, batch: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        vocabulary = self.config(self.peer).vocab_size
        return torch.randint(vocabulary, (batch, length), generator=generator).to(self.setting.device)

    def _autocast(self) -> torch.autocast:
        half = self.setting.dtype != "float32"
        return torch.autocast(self.setting.device, self.setting.torch_dtype if half else None, enabled=half)


def _gradient(parameters: list[nn.Parameter]) -> Tensor:
    return torch.cat([p.grad.flatten().double() for p in parameters if p.grad is not None])
