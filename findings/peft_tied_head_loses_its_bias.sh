#!/usr/bin/env bash
# PEFT: trainable tokens of a tied embedding drop the bias of the output head, without a warning.
# Expected by most: a fresh adapter changes nothing. Seen: logits differ by the bias.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q \
  torch==2.13.0 transformers==5.24.0 peft==0.21.2 accelerate==1.15.0
"$place/venv/bin/python" - <<'P'
import sys

import peft
import torch
import transformers
from transformers import PhiConfig, PhiForCausalLM

print("peft", peft.__version__, "transformers", transformers.__version__, "torch", torch.__version__)
torch.manual_seed(0)
sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
ids = torch.arange(1, 9)[None]
moved = {}
for tied in (False, True):  # Phi's head has a bias
    model = PhiForCausalLM(PhiConfig(**sizes, tie_word_embeddings=tied)).eval()
    torch.nn.init.normal_(model.lm_head.bias)
    with torch.no_grad():
        before, bias = model(ids).logits, model.lm_head.bias.detach().clone()
        config = peft.LoraConfig(task_type="CAUSAL_LM", trainable_token_indices=[3, 5])
        after = peft.get_peft_model(model, config).eval()(input_ids=ids).logits
    moved[tied] = float((before - after).abs().max())
    print(f"tie_word_embeddings={tied}: a new adapter moves the logits by {moved[tied]:.3g}")
print(f"expected: 0 and 0; largest bias: {float(bias.abs().max()):.3g}")
sys.exit(not (moved[False] < 1e-6 and abs(moved[True] - float(bias.abs().max())) < 1e-5))
P
