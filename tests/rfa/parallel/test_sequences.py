"""Kernels and models over shards of a sequence against one process: outputs and gradients; what is refused."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models.small import SIZES, assert_same, small, tokens
from models.test_certified_windows import steep
from torch.nn.parallel import DistributedDataParallel

from parallel.processes import together
from parallel.test_context import check_all_variants, check_bad_input
from rfa.models import RFAForSequenceClassification, preset
from rfa.models.decoder import NOT_SCORED
from rfa.ops.cpu import operator
from rfa.parallel import context_parallel, sequence_shard

LENGTH = 12


def check_models():
    """With the loss of the page on scaling: the mean over tokens that are scored, of which the shards have 1 and 11."""
    ids = tokens(2, LENGTH + 1)
    ids, targets = ids[:, :-1], ids[:, 1:].index_fill(1, torch.tensor([0, 1, 2, 3, 4]), NOT_SCORED)
    targets[0, 5] = NOT_SCORED
    targets[1, -1] = NOT_SCORED
    restarts = torch.tensor([[*range(5), *range(7)], [*range(3, 11), *range(3, 7)]])  # within and beyond a shard
    marks = {"times": torch.arange(2.0 * LENGTH).view(2, LENGTH) ** 1.2, "segment_ids": torch.zeros(2, LENGTH).long()}
    marks["segment_ids"][0, 5:] = 1
    precise = {"step": "precision", "normalise_states": True}
    absent = {"attention_mask": torch.ones(2, LENGTH).index_fill(1, torch.tensor([0, 1]), 0)}
    absent |= {"position_ids": torch.arange(LENGTH)[None] % 4, "times": torch.arange(LENGTH) ** 2}  # one row for all
    for name, options, given in (
        ("m2-sc-rfa", {}, {"position_ids": restarts}),
        ("x2-riccati-alibi", {}, marks),
        ("m2-sc-rfa", precise, absent),
        ("x1-riccati", {}, {"attention_mask": torch.ones(2, LENGTH).index_fill(1, torch.tensor([3, 5, 6]), 0)}),
    ):
        alone, shared = small(name, **options), small(name, **options)
        assert context_parallel(shared) is shared
        replica = DistributedDataParallel(shared, find_unused_parameters=False)
        whole = alone(ids, **given).logits
        F.cross_entropy(whole.flatten(0, 1), targets.flatten()).backward()
        logits = replica(sequence_shard(ids), **{n: sequence_shard(x) for n, x in given.items()}).logits
        own = sequence_shard(targets).flatten()
        scored = (own != NOT_SCORED).sum()
        dist.all_reduce(scored)
        total = F.cross_entropy(logits.flatten(0, 1), own, reduction="sum")
        (dist.get_world_size() * total / scored).backward()
        assert_same(logits, sequence_shard(whole))
        for mine, theirs in zip(shared.parameters(), alone.parameters(), strict=True):
            assert_same(mine.grad, theirs.grad)
        with torch.no_grad():
            mine = shared(sequence_shard(ids), output_hidden_states=True)
            theirs = alone(ids, output_hidden_states=True)
            assert_same(mine.logits, sequence_shard(theirs.logits))
            assert_same(mine.hidden_states[1], sequence_shard(theirs.hidden_states[1]))


def check_certified():
    """Each process leaves out keys of each shard by the sum of the shard, which is less than that of the row."""
    ids = tokens(2, 800)
    alone, shared = steep(certified=None), context_parallel(steep())
    visits, outputs = [], operator._outputs
    operator._outputs = lambda inputs: visits.append(outputs(inputs)) or visits[-1]
    try:
        logits = shared(sequence_shard(ids)).logits
        (dist.get_world_size() * logits.square().mean()).backward()
    finally:
        operator._outputs = outputs
    assert any(bool(first.any()) for _, _, first in visits)
    whole = alone(ids).logits
    whole.square().mean().backward()
    assert_same(logits, sequence_shard(whole))
    for mine, theirs in zip(shared.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(mine.grad)
        assert_same(mine.grad / dist.get_world_size() ** 2, theirs.grad)


def check_checkpointing():
    """Two forward passes and an evaluation before one backward pass, which computes the two again."""
    alone, shared = small("m2-sc-rfa").train(), context_parallel(small("m2-sc-rfa").train())
    shared.activation_checkpointing_enable()
    for model, part in ((alone, lambda x: x), (shared, sequence_shard)):
        losses = []
        for seed, border in enumerate((5, 9)):
            segments = (torch.arange(LENGTH) >= border).long().expand(2, -1)
            logits = model(part(tokens(2, LENGTH, seed)), segment_ids=part(segments)).logits
            losses.append(logits.square().mean())
        with torch.no_grad():
            model(part(tokens(2, 4)))
        sum(losses).backward()
    for mine, theirs in zip(shared.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(mine.grad)
        assert_same(mine.grad / dist.get_world_size(), theirs.grad)


def check_refused():
    shared, ids = context_parallel(small("m2-sc-rfa")), tokens(2, 4)
    classifier = RFAForSequenceClassification(preset("m2-sc-rfa", **SIZES))
    rank = dist.get_rank()

    def in_half():
        with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):
            shared(ids)

    for message, call in (
        ("labels: got", lambda: shared(ids, labels=ids)),
        ("past_key_values: got", lambda: shared.generate(ids, max_new_tokens=2)),
        ("output_attentions: got True", lambda: shared(ids, output_attentions=True)),
        (r"position_ids: got shape \(2, 3\)", lambda: shared(ids, position_ids=ids[:, 1:])),
        ("misspelt: not an argument", lambda: shared(ids, misspelt=ids)),
        ("sequence: got 'length 3', expected a multiple of the 2", lambda: sequence_shard(ids[:, :3])),
        ("sequence: got list, expected a tensor", lambda: sequence_shard([1, 2])),
        (r"length \[4, 3\] on the 2", lambda: shared(ids[:, rank:])),
        ("rank 1 were refused" if rank == 0 else "output_attentions", lambda: shared(ids, output_attentions=rank == 1)),
        (
            "rank 1 were refused" if rank == 0 else "input_ids: got 999",
            lambda: shared(torch.full_like(ids, 999) if rank else ids),
        ),
        (r"autocast \['None', 'torch.bfloat16'\]", in_half),
        ("attention: got 'DotProductAttention'", lambda: context_parallel(small("b1-rope"))),
        ("attention: got 'clock'", lambda: context_parallel(small("x5-content-clock"))),
        ("model: got 'RFAForSequenceClassification'", lambda: context_parallel(classifier)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def check_all():
    """In one launch: the processes have to meet first."""
    check_all_variants("kernel")
    check_bad_input()
    check_models()
    check_certified()
    check_checkpointing()
    check_refused()


def test_two_processes_are_one_to_1e_5():
    together(check_all, 2)
