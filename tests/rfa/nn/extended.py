"""What the tests of the extensions share: the layers and how they are built."""

import torch

from rfa.nn import RobustFilterAttention

from .by_hand import perturb

SIZE, HEADS = 16, 2
MODES = SIZE // HEADS
DECAY = torch.tensor([0.1, 0.4])
EXTENSIONS = {
    "tied": {"tie_key_value": True},
    "tied, values do not turn": {"tie_key_value": True, "rotate_values": False},
    "precision": {"step": "precision"},
    "precision with horizon": {"step": "precision", "horizon": 0.7},
    "precision without gate": {"step": "precision", "gate": False},
    "noise": {"noise": "time_dependent"},
    "noise without gate": {"noise": "time_dependent", "gate": False},
    "routing": {"aggregation": "routing"},
    "routing, values do not turn": {"aggregation": "routing", "rotate_values": False},
    "all that go together": {"tie_key_value": True, "step": "precision", "noise": "time_dependent"},
    "routing with the others": {
        "aggregation": "routing",
        "tie_key_value": True,
        "noise": "time_dependent",
        "source_prior": "exponential",
    },
}
DEFAULTS = {"tie_key_value": False, "step": "learned", "noise": "constant", "aggregation": "consensus"}


def build(dtype=torch.float64, **options):
    return perturb(RobustFilterAttention(SIZE, HEADS, **{"decay": DECAY, **options})).to(dtype)
