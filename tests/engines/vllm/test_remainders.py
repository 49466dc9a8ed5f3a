"""Keys that are turned at every eviction stay as exact as one rounding to the cache's dtype leaves them."""

import pytest
import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

from harness.engines.vllm.compaction import Compactor, Victim
from harness.engines.vllm.layout import InterleavedLayout
from harness.engines.vllm.plan import Eviction
from harness.engines.vllm.rotation import turn_back
from policies import Phase, build_policy
from tests.gpu.caches import BLOCK, HEAD_SIZE, NUM_HEADS, NUM_LAYERS, allocate, spec_of

BUDGET, STEPS = 512, 508
ROUNDING = 2.0**-8
INV_FREQ = 10000.0 ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
NUM_BLOCKS = BUDGET // BLOCK + 2


class Stream:
    """A request that decodes and loses its oldest token but the sinks at every step; all its keys as they were."""

    def __init__(self, dtype):
        self.policy = build_policy("streaming_llm", budget=BUDGET, block_size=BLOCK, options={"position_mode": "cache"})
        self.layout = InterleavedLayout(allocate(KVCacheLayout.LBNHC, NUM_BLOCKS, spec_of(dtype)))
        self.compactor = Compactor(
            self.policy, self.layout, observers=None, inv_freq=INV_FREQ, average_over_ranks=lambda scores: scores
        )
        self.table = list(range(1, NUM_BLOCKS))
        self.keys = torch.empty(NUM_LAYERS, NUM_HEADS, 0, HEAD_SIZE, dtype=dtype)
        self.num_resident = 0

    def append(self):
        """Write one token behind the others."""
        new = torch.randn(NUM_LAYERS, NUM_HEADS, HEAD_SIZE).to(self.keys.dtype)
        slot = self.table[self.num_resident // BLOCK] * BLOCK + self.num_resident % BLOCK
        page = self.layout.grid.numbers(torch.tensor([[slot // BLOCK]]))[:, 0, :, 0]
        self.layout.pages[page, slot % BLOCK, :HEAD_SIZE] = new
        self.compactor.wrote(torch.tensor([slot]), torch.tensor([self.keys.shape[2]]))
        self.keys = torch.cat([self.keys, new[:, :, None]], dim=2)
        self.num_resident += 1

    def evict(self):
        """Drop one token."""
        eviction = Eviction(Phase.DECODE, self.num_resident, BUDGET, self.keys.shape[2])
        self.compactor.evict([Victim("r", eviction, self.table)])
        self.num_resident = BUDGET

    def error(self):
        """Largest error of a resident key, relative to its length, against one rotation of the original."""
        table = torch.tensor([self.table])
        positions = self.compactor.positions_of(table, BUDGET)[:, 0, 0].long()
        found = self.layout.read_keys(self.layout.grid.numbers(table), BUDGET)[:, 0].float()
        order = positions[0].argsort()
        original = self.keys[:, :, positions[0]].double()
        places = torch.empty(BUDGET, dtype=torch.int64).scatter_(0, order, torch.arange(BUDGET))
        written = positions[0].clamp(max=BUDGET)  # the place that a token had when it was written
        exact = turn_back(original, (written - places)[None, None].double(), INV_FREQ.double())
        return ((found - exact).norm(dim=-1) / exact.norm(dim=-1)).max().item()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, ROUNDING), (torch.float32, 1e-4)])
def test_keys_that_are_turned_at_every_step(dtype, bound):
    torch.manual_seed(0)
    stream = Stream(dtype)
    for _ in range(BUDGET):
        stream.append()
    for _ in range(STEPS):
        stream.append()
        stream.evict()
    assert stream.error() < bound
    if dtype is torch.float32:
        assert stream.compactor.remainders is None


def test_the_errors_would_add_up_without_what_rounding_leaves():
    torch.manual_seed(0)
    stream = Stream(torch.bfloat16)
    stream.compactor.remainders = None
    for _ in range(BUDGET):
        stream.append()
    for _ in range(100):
        stream.append()
        stream.evict()
    assert stream.error() > 4 * ROUNDING
