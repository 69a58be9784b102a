"""Text samples from a run. This file stands alone because sampling shares no code with measuring."""

import sys
from pathlib import Path
from typing import Any, cast

import torch

from rfa.checks import check_range, require
from rfa_lab.training import RunFolder

COLDEST = 1e-6  # logits divided by a smaller temperature could overflow in float32


def generate(
    run: str | Path,
    prompt: str = "",
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> str:
    """The prompt and a continuation.

    Args:
        run: a run folder.
        prompt: beginning of the text; an empty prompt counts as the end-of-text token.
        max_new_tokens: number of tokens to add.
        temperature: of the sampling, at least 1e-6; with 0 the most likely token is taken.
        top_k: sample among this many most likely tokens; 0 for all.
        seed: of the sampling, from 0 to 2^64 - 1.

    Raises:
        ValueError: for a folder that is no run, a prompt that is not valid text, or a number out of range.
    """
    check_range("max_new_tokens", max_new_tokens, 1, 2**31 - 1)
    check_range("temperature", temperature, 0, sys.float_info.max)
    check_range("top_k", top_k, 0, 2**31 - 1)
    check_range("seed", seed, 0, 2**64 - 1)
    require(not 0 < temperature < COLDEST, "temperature", temperature, f"0 or at least {COLDEST}")
    surrogates = [letter for letter in prompt if "\ud800" <= letter <= "\udfff"]  # stand for bytes that were not UTF-8
    require(not surrogates, "prompt", prompt[:80], "text that UTF-8 can write")
    folder = RunFolder(run)
    model, tokenizer = folder.load_model(), folder.load_tokenizer()
    ids = tokenizer.encode(prompt) or [tokenizer.eos_token_id]
    sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k} if temperature else {"do_sample": False}
    torch.manual_seed(seed)
    output = cast(Any, model).generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.eos_token_id,
        **sampling,
    )
    return str(tokenizer.decode(output[0], skip_special_tokens=True))
