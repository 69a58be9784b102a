import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from rfa.data import TokenBlocks


@given(st.integers(2, 200), st.integers(2, 50))
def test_blocks_are_the_stream_in_order(tokens, length):
    stream = np.arange(tokens, dtype=np.uint16)
    if tokens < length:
        with pytest.raises(ValueError, match=f"got {tokens} tokens, expected at least {length}"):
            TokenBlocks(stream, length)
        return
    blocks = TokenBlocks(stream, length)
    assert len(blocks) == tokens // length
    joined = torch.cat([block["input_ids"] for block in blocks])
    assert joined.tolist() == list(range(len(blocks) * length))


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_ids_are_long_whole_and_their_own(dtype):
    stream = np.full(4, np.iinfo(dtype).max, dtype)
    stream.flags.writeable = False
    block = TokenBlocks(stream, 2)[1]
    assert block["input_ids"].tolist() == [np.iinfo(dtype).max] * 2
    assert block["input_ids"].dtype == block["labels"].dtype == torch.int64
    block["labels"][0] = -100
    assert block["input_ids"][0] == np.iinfo(dtype).max


def test_default_collate_and_workers():
    blocks = TokenBlocks(np.arange(100, dtype=np.uint16), 10)
    batches = list(DataLoader(blocks, batch_size=4, num_workers=1))
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(4, 10), (4, 10), (2, 10)]
    assert torch.equal(batches[1]["labels"], torch.arange(40, 80).view(4, 10))


@pytest.mark.parametrize("length", [-1, 0, 1])
def test_blocks_too_short(length):
    with pytest.raises(ValueError, match=f"length: got {length}, expected at least 2"):
        TokenBlocks(np.arange(9, dtype=np.uint16), length)
