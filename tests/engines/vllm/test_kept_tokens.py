"""Tokens kept by layer and head, added up over groups of prompts and joined over ranks."""

import torch

from harness.engines.contract import KeptTokens
from harness.engines.vllm.ragged.kept_tokens import KeptCounts, join_kept


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
