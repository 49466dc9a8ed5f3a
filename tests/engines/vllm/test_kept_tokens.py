"""Tokens kept and read by layer and head, added up and joined over ranks."""

from dataclasses import asdict

import torch

from harness.engines.contract import KeptTokens, ReadTokens
from harness.engines.vllm.ragged.kept_tokens import KeptCounts, join_kept, join_read


def test_groups_of_prompts_add_up_to_what_all_prompts_give():
    counts = torch.randint(0, 500, (3, 7, 2), generator=torch.Generator().manual_seed(0))
    kept = KeptCounts()
    assert kept.read() is None
    for part in counts.split((1, 4, 2), dim=1):
        kept.add(part)
    assert join_kept([kept.read()]) == KeptTokens.over(counts.transpose(0, 1).tolist())


def test_ranks_stand_beside_each_other():
    counts = torch.randint(0, 500, (3, 5, 4), generator=torch.Generator().manual_seed(1))
    ranks = [KeptCounts(), KeptCounts()]
    for rank, part in zip(ranks, counts.split(2, dim=-1), strict=True):
        rank.add(part)
    assert join_kept([rank.read() for rank in ranks]) == KeptTokens.over(counts.transpose(0, 1).tolist())
    assert join_kept([None, None]) is None


def test_what_was_read_adds_up_and_ranks_stand_beside_each_other():
    one, two = ReadTokens(2, [[5], [7]], [[9], [9]]), ReadTokens(2, [[6], [1]], [[9], [9]])
    assert one + two == ReadTokens(4, [[11], [8]], [[18], [18]])
    assert join_read([asdict(one), asdict(two)]) == ReadTokens(2, [[5, 6], [7, 1]], [[9, 9], [9, 9]])
    assert join_read([None, None]) is None
