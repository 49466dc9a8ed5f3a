"""Attention that tokens receive: what the observer adds up is the softmax by columns, whoever shares the step."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM (make setup)")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engines.vllm.layout import CpuLayout, InterleavedLayout
from harness.engines.vllm.signals.batch import StepBatch
from harness.engines.vllm.signals.mass import AttentionMass

NUM_LAYERS, NUM_HEADS, GROUP, BLOCK, HEAD_SIZE, SCALE = 3, 2, 2, 16, 8, 0.3
NUM_BLOCKS, WIDE = 40, 8


def in_plain_torch(queries, keys):
    """queries [n, Q, D], keys [H, T, D], the new tokens last: [H, T]."""
    num_new, num_keys = len(queries), keys.shape[1]
    logits = torch.einsum("nhgd,htd->hgnt", queries.view(num_new, NUM_HEADS, GROUP, HEAD_SIZE), keys) * SCALE
    sees = torch.arange(num_keys) <= torch.arange(num_keys - num_new, num_keys)[:, None]
    return logits.masked_fill(~sees, float("-inf")).softmax(dim=-1).sum(dim=(1, 2))


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(
        st.integers(1, WIDE * BLOCK).flatmap(lambda n: st.tuples(st.just(n), st.one_of(st.just(1), st.integers(1, n)))),
        min_size=1,
        max_size=4,
    ),
    layout_class=st.sampled_from([CpuLayout, InterleavedLayout]),
    seed=st.integers(0, 2**31),
)
def test_every_token_gets_the_attention_of_this_step(requests, layout_class, seed):
    random = torch.Generator().manual_seed(seed)
    shape = (NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, BLOCK, 2 * HEAD_SIZE)
    layout = layout_class(torch.randn(shape, generator=random).unbind())
    mass = AttentionMass(layout, len(requests), SCALE)
    free = (1 + torch.randperm(NUM_BLOCKS - 1, generator=random)).tolist()  # block 0 is never used
    tables = [[free.pop() for _ in range(-(-resident // BLOCK))] for resident, _ in requests]
    starts = [0]
    for _, num_new in requests:
        starts.append(starts[-1] + num_new)
    slots = [
        table[place // BLOCK] * BLOCK + place % BLOCK
        for table, (resident, num_new) in zip(tables, requests, strict=True)
        for place in range(resident - num_new, resident)
    ]
    lengths = [resident for resident, _ in requests]
    width = max(map(len, tables))
    batch = StepBatch(
        request_ids=[str(index) for index in range(len(requests))],
        starts=starts,
        num_seen=lengths,
        num_resident=lengths,
        prefilling=[num_new > 1 for _, num_new in requests],
        block_table=torch.tensor([table + [0] * (width - len(table)) for table in tables]),
        slot_mapping=torch.tensor(slots),
    )
    queries = torch.randn(NUM_LAYERS, starts[-1], NUM_HEADS * GROUP, HEAD_SIZE, generator=random)
    before = torch.rand(mass.values._pages.shape, generator=random)
    mass.values._pages.copy_(before)
    mass.begin_step(batch)
    for layer in range(NUM_LAYERS):
        mass.observe(layer, queries[layer])
    mass.end_step()
    for row, (table, (resident, num_new)) in enumerate(zip(tables, requests, strict=True)):
        old = before[:, table].transpose(1, 2).flatten(2)[..., :resident]
        old[..., resident - num_new :] = 0
        pages = layout.grid.numbers(torch.tensor([table]))[:, 0]
        found = mass.values.read(mass.values.grid.numbers(torch.tensor([table])), resident)[:, 0]
        for layer, keys in enumerate(layout.read_keys(pages, resident)):
            new = in_plain_torch(queries[layer, starts[row] : starts[row + 1]], keys)
            torch.testing.assert_close(found[layer], old[layer] + new, rtol=1e-4, atol=1e-5)
