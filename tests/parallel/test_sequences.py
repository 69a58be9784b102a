"""Kernels and models over shards of a sequence against one process: outputs and gradients; what is refused."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models.small import assert_same, small, tokens
from torch.nn.parallel import DistributedDataParallel

from parallel.processes import together
from parallel.test_context import check_all_variants, check_bad_input
from rfa.parallel import context_parallel, sequence_shard

LENGTH = 12


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def check_models():
    ids = tokens(2, LENGTH + 1)
    ids, targets = ids[:, :-1], ids[:, 1:]
    segments = torch.tensor([[0] * 5 + [1] * 7, [0] * LENGTH])
    marks = {"times": torch.arange(2.0 * LENGTH).view(2, LENGTH) ** 1.2, "segment_ids": segments}
    precise = {"step": "precision", "normalise_states": True, "output_gain": True}
    for name, options, given in (
        ("m2-sc-rfa", {}, {}),
        ("x2-riccati-alibi", {}, marks),
        ("m2-sc-rfa", precise, {"attention_mask": torch.ones(2, LENGTH).index_fill(1, torch.tensor([0, 1]), 0)}),
    ):
        alone, shared = small(name, **options), small(name, **options)
        assert context_parallel(shared) is shared
        replica = DistributedDataParallel(shared, find_unused_parameters=False)
        whole = alone(ids, **given).logits
        loss_of(whole, targets).backward()
        logits = replica(sequence_shard(ids), **{n: sequence_shard(x) for n, x in given.items()}).logits
        loss_of(logits, sequence_shard(targets)).backward()
        assert_same(logits, sequence_shard(whole))
        for mine, theirs in zip(shared.parameters(), alone.parameters(), strict=True):
            assert_same(mine.grad, theirs.grad)
        with torch.no_grad():
            assert_same(shared(sequence_shard(ids)).logits, sequence_shard(alone(ids).logits))


def check_refused():
    shared, ids = context_parallel(small("m2-sc-rfa")), tokens(2, 4)
    for message, call in (
        ("labels: got", lambda: shared(ids, labels=ids)),
        ("past_key_values: got", lambda: shared.generate(ids, max_new_tokens=2)),
        ("sequence: got 'length 3', expected a multiple of the 2", lambda: sequence_shard(ids[:, :3])),
        ("shards of lengths", lambda: shared(ids[:, dist.get_rank() :])),
        ("attention: got 'DotProductAttention'", lambda: context_parallel(small("b1-rope"))),
        ("attention: got 'clock'", lambda: context_parallel(small("x5-content-clock"))),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def check_all():
    """In one launch, of which most of the time goes into imports."""
    check_all_variants("kernel")
    check_bad_input()
    check_models()
    check_refused()


def test_two_processes_are_one_to_1e_5():
    together(check_all, 2)
