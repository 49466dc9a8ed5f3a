"""Read selection without an engine: bounds of pages, tables of what is read, addresses, and no wait for the device."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM (make setup)")

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.utils import CpuGpuBuffer

from harness.engines.vllm.layout import InterleavedLayout
from harness.engines.vllm.ragged import sentences as sentences_module
from harness.engines.vllm.ragged.bounds import PageBounds
from harness.engines.vllm.ragged.reading import Reading
from harness.engines.vllm.ragged.sentences import Sentences, token_texts
from harness.engines.vllm.ragged.steps import HeadSteps
from harness.engines.vllm.ragged.table import PageTable
from harness.engines.vllm.slices import TRANSIENT_BYTES
from policies import build_policy
from policies.quest import Quest
from tests.engines.vllm.test_gpu_syncs import META, NoSync
from tests.gpu.caches import BLOCK, HEAD_SIZE, NUM_HEADS, NUM_LAYERS, allocate, spec_of

POOL, GROUP = 20, 2
QUERY = (NUM_HEADS, GROUP, HEAD_SIZE)
BUILDER = SimpleNamespace(build=lambda prefix, common, fast_build: common)
QUEST_READ = Quest.read
QUEST = build_policy("quest", budget=3 * BLOCK, block_size=BLOCK, options={"dense_layers": 1})


class World:
    """Two requests that decode and one whose prompt is attended, on some device."""

    def __init__(self, device, policy=QUEST):
        def make_buffer(*size, dtype):
            return CpuGpuBuffer(*size, dtype=dtype, device=device, pin_memory=False)

        self.device = device
        buffer = torch.zeros(NUM_LAYERS, POOL, NUM_HEADS, BLOCK, 2 * HEAD_SIZE, device=device)
        self.layout = InterleavedLayout(buffer.unbind())
        self.steps = HeadSteps(PageTable(self.layout.grid, 4, POOL), 64, BLOCK, make_buffer)
        self.bounds = PageBounds(self.layout)
        self.reading = Reading(policy, self.layout, self.steps, self.bounds, None)
        self.blocks = {"a": [*range(1, 7)], "b": [7, 8], "c": [*range(9, 13)]}

    def step(self, lengths, counts=(1, 1, 5)):
        starts = np.cumsum([0, *counts]).astype(np.int32)
        request_of = torch.arange(3).repeat_interleave(torch.tensor(counts))
        places = torch.cat([torch.arange(n - count, n) for n, count in zip(lengths, counts, strict=True)])
        device = self.device
        self.steps.begin(
            list(self.blocks), list(self.blocks.values()), starts, torch.tensor(lengths, dtype=torch.int32).to(device),
            request_of.to(device), places.to(device),
        )  # fmt: skip
        self.steps.metadata(BUILDER, list(self.blocks), max(counts))
        last = (torch.from_numpy(starts[1:]).long() - 1).to(device)
        self.reading.begin(list(self.blocks), [count == 1 for count in counts], last)


def test_what_is_read_is_the_chosen_pages_in_order_and_the_newest_last():
    world = World(torch.device("cpu"))
    lengths = (5 * BLOCK + 3, BLOCK + 7, 3 * BLOCK + 9)
    world.step(lengths)
    pages = world.steps.table.pages[1, :3].clone()
    chosen = torch.zeros(2, NUM_HEADS, 6, dtype=torch.bool)
    chosen[0, 0, [1, 3]], chosen[0, 1, [0, 4]] = True, True
    object.__setattr__(world.reading, "_policy", SimpleNamespace(full_read_layers=1, read=lambda view: chosen))
    query = torch.randn(7, NUM_HEADS * GROUP, HEAD_SIZE)
    assert world.reading.metadata(0, query) is None
    found = world.reading.metadata(1, query)
    table = found.block_table_tensor.unflatten(0, (3, NUM_HEADS))
    assert table[0, 0, :3].tolist() == pages[0, 0, [1, 3, 5]].tolist()
    assert table[0, 1, :3].tolist() == pages[0, 1, [0, 4, 5]].tolist()
    assert table[1, 0, 0] == pages[1, 0, 1], "nothing was chosen: the newest"
    assert torch.equal(table[2, :, :4], pages[2, :, :4]), "a prompt is read whole"
    expected = [[2 * BLOCK + 3] * 2, [7, 7], [3 * BLOCK + 9] * 2]
    assert found.seq_lens.view(3, NUM_HEADS).tolist() == expected
    counts = world.reading.counts()
    assert counts.num_steps == 2
    assert counts.resident == [[lengths[0] + lengths[1]] * NUM_HEADS] * NUM_LAYERS
    assert counts.read[:2] == [counts.resident[0], [2 * BLOCK + 10] * NUM_HEADS]


@pytest.mark.parametrize(("room", "num_slices"), [(1 << 20, 1), (1, 2)], ids=["at once", "one by one"])
def test_only_requests_that_decode_are_looked_at_as_many_at_once_as_there_is_room_for(monkeypatch, room, num_slices):
    monkeypatch.setitem(TRANSIENT_BYTES, "cpu", room)
    monkeypatch.setattr(Quest, "read", lambda policy, view: views.append(view) or QUEST_READ(policy, view))
    views, world = [], World(torch.device("cpu"))
    world.blocks["c"] = [*range(9, 19)]
    world.layout.pages.normal_(generator=torch.Generator().manual_seed(0))
    lengths = (5 * BLOCK + 3, BLOCK + 7, 9 * BLOCK + 9)
    world.step(lengths)
    numbers = world.steps.table.pages[1, :3].clone()
    keys = world.layout.read_keys(numbers[0].long(), 5 * BLOCK + 3)
    for head, slots in enumerate(numbers[0, :, :6].long()):
        slots = (slots[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[: 5 * BLOCK + 3]
        world.bounds.wrote(slots, keys[head])
    query = torch.ones(7, NUM_HEADS * GROUP, HEAD_SIZE)
    found = world.reading.metadata(1, query)
    table, read_lengths = found.block_table_tensor.unflatten(0, (3, NUM_HEADS)), found.seq_lens.view(3, NUM_HEADS)
    assert [view.num_pages for view in views] == [6] * num_slices, "the prompt has 10"
    assert sum(len(view.lengths) for view in views) == 2
    assert torch.equal(table[2, :, :10], numbers[2, :, :10])
    assert read_lengths.tolist() == [[2 * BLOCK + 3] * 2, [BLOCK + 7] * 2, [9 * BLOCK + 9] * 2]
    for head, page_keys in enumerate(keys):
        bounds = torch.stack([page.amax(dim=0).sum() for page in page_keys.split(BLOCK)[:5]])
        best = sorted(bounds.topk(2).indices.tolist())
        assert table[0, head, :3].tolist() == numbers[0, head, [*best, 5]].tolist()


def test_tables_and_lengths_lie_where_they_lay():
    world = World(torch.device("cpu"))
    seen = set()
    for length in (70, 71):
        world.step((5 * BLOCK + length % BLOCK, BLOCK + 1, 60))
        for layer in range(1, NUM_LAYERS):
            found = world.reading.metadata(layer, torch.randn(7, NUM_HEADS * GROUP, HEAD_SIZE))
            seen.add((found.block_table_tensor.data_ptr(), found.seq_lens.data_ptr()))
    assert len(seen) == 1


@pytest.mark.usefixtures("copies_as_on_a_gpu")
def test_nothing_in_a_step_waits_for_the_device():
    mode = NoSync()
    with mode:
        world = World(META)
        world.step((5 * BLOCK + 3, BLOCK + 7, 60))
        query = torch.empty(7, NUM_HEADS * GROUP, HEAD_SIZE, device=META)
        keys = torch.empty(7 * NUM_HEADS, 1, HEAD_SIZE, device=META)
        mode.armed = True
        world.reading.wrote(1, keys, world.steps.slot_mapping(1, 7))
        assert world.reading.metadata(1, query) is not None


@pytest.mark.usefixtures("copies_as_on_a_gpu")
def test_noting_sentences_does_not_wait_for_the_device():
    mode = NoSync()
    with mode:
        sentences = Sentences([9], 10, 4, 256, (NUM_LAYERS, *QUERY), META)
        tokens, last, places = (torch.empty(count, dtype=torch.int64, device=META) for count in (7, 3, 2))
        queries = torch.empty(2, *QUERY, device=META)
        positions = torch.empty(2, NUM_HEADS, 90, dtype=torch.int64, device=META)
        mode.armed = True
        sentences.begin(["a", "b", "c"], [3, 3, 90], 90, tokens, tokens, tokens, last, places)
        for part in (slice(0, 1), slice(1, 2)):
            sentences.fields(1, part, queries[part], positions[part])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), cuts=st.lists(st.integers(1, 99), min_size=1, max_size=6))
def test_bounds_are_those_of_the_keys_however_they_come(seed, cuts):
    """Pages are written from their first slot on, in steps of any size; what a page held before is forgotten."""
    generator = torch.Generator().manual_seed(seed)
    layout = InterleavedLayout(allocate(KVCacheLayout.LBHNC, POOL, spec_of(torch.float32)))
    bounds = PageBounds(layout)
    numbers = torch.randperm(POOL - 1, generator=generator)[:4] + 1
    for _ in range(2):
        keys = torch.randn(4 * BLOCK - 3, HEAD_SIZE, generator=generator)
        slots = (numbers[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[: len(keys)]
        start = 0
        for count in [*cuts, len(keys)]:
            part = slice(start, start + count)
            padded = torch.cat([slots[part], torch.tensor([-1])])
            bounds.wrote(padded, torch.cat([keys[part], torch.full((1, HEAD_SIZE), 99.0)]))
            start += count
        lowest, highest = bounds.read(numbers)
        for page, part in enumerate(keys.split(BLOCK)):
            assert torch.equal(lowest[page], part.amin(dim=0))
            assert torch.equal(highest[page], part.amax(dim=0))


class Story:
    """Requests whose tokens come step by step; token 9 ends a sentence, and the query of each token is its position."""

    def __init__(self):
        self.sentences = Sentences([9], 10, 2, 64, (1, *QUERY), torch.device("cpu"))

    def step(self, **requests):
        """One step of requests, name=(prompt tokens, position of the first new token, new tokens).

        Returns:
            The mean query of each request that decodes, which is the same number everywhere.
        """
        starts = np.cumsum([0, *(len(tokens) for _, _, tokens in requests.values())])
        positions = torch.cat([torch.arange(at, at + len(tokens)) for _, at, tokens in requests.values()])
        decoding = [place for place, (num, at, new) in enumerate(requests.values()) if at >= num and len(new) == 1]
        places, names = torch.tensor(decoding, dtype=torch.int64), list(requests)
        last = torch.from_numpy(starts[1:]) - 1
        self.sentences.begin(
            names, [one[0] for one in requests.values()], int(positions[last[places]].max()) + 1 if decoding else 0,
            torch.cat([torch.tensor(one[2]) for one in requests.values()]), positions,
            torch.arange(len(requests)).repeat_interleave(torch.from_numpy(np.diff(starts))), last, places,
        )  # fmt: skip
        found = {}
        for index, place in enumerate(decoding):
            part = slice(index, index + 1)
            queries = positions[last[place]].float().expand(1, *QUERY)
            fields = self.sentences.fields(0, part, queries, torch.arange(64).expand(1, NUM_HEADS, 64))
            found[names[place]] = fields["sentence_queries"].unique().item()
        return found


def test_the_mean_query_is_that_of_the_sentence_so_far():
    story = Story()
    assert story.step(a=(4, 0, [1, 1, 1, 1])) == {}
    found = [story.step(a=(4, at, [token]))["a"] for at, token in [(4, 1), (5, 1), (6, 9), (7, 1), (8, 1)]]
    assert found == [4, 4.5, 6, 7, 7.5], "the token that ends one reads everything"


@pytest.mark.parametrize("others", [{}, {"b": (3, 9, [1])}], ids=["alone", "beside one that decodes"])
def test_a_request_that_was_preempted_within_a_sentence_starts_from_its_own_queries(others):
    story = Story()
    story.step(a=(4, 0, [1, 1, 1, 1]), b=(3, 0, [1, 1, 1]))
    for step in range(5):
        story.step(a=(4, 4 + step, [1]), b=(3, 3 + step, [1]))
    for name in "ab":  # both are preempted; b comes first, and so to the other's row
        story.sentences.forget(name)
    story.step(b=(3, 0, [1] * 8))
    story.step(b=(3, 8, [1]))
    story.step(a=(4, 0, [1] * 9), **others)
    assert story.step(a=(4, 9, [1]))["a"] == 9
    assert story.step(a=(4, 10, [1]))["a"] == 9.5


def test_an_end_that_is_no_token_of_the_model_is_named():
    with pytest.raises(ValueError, match=r"policy\.options\.ends has 10, and the model has tokens 0 to 9"):
        Sentences([9, 10], 10, 2, 64, (1, *QUERY), torch.device("cpu"))


def test_a_tokenizer_with_more_tokens_than_the_model_tells_of_those_that_both_have(monkeypatch):
    class Tokenizer(list):
        def decode(self, tokens):
            return "".join(self[token] for token in tokens)

    monkeypatch.setattr(sentences_module, "cached_get_tokenizer", lambda *names, **options: Tokenizer("ab.!"))
    model = SimpleNamespace(
        tokenizer="t", runner_type="generate", tokenizer_mode="auto", tokenizer_revision=None, trust_remote_code=False,
        get_vocab_size=lambda: 3,
    )  # fmt: skip
    assert token_texts(model) == ["a", "b", "."]
