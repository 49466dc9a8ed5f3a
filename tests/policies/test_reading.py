"""Which pages are read: cases whose answer is known by arithmetic, and laws."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import build_policy
from policies.page_reading import best_pages, pages_of
from policies.sentencekv import ends_sentence
from policies.views import ReadView
from tests.policy_names import READING_CASES

BLOCK = 4
QUEST = build_policy("quest", budget=3 * BLOCK, block_size=BLOCK, options={"dense_layers": 0})
seeds = st.integers(0, 2**31)


def read_quest(policy, keys, queries):
    """Pages that one row reads; keys [T][D], queries [G][D]."""
    pages = [torch.tensor(keys[start : start + BLOCK]).float() for start in range(0, len(keys), BLOCK)]
    view = ReadView(
        layer=0,
        lengths=torch.tensor([[len(keys)]]),
        num_pages=len(pages),
        block_size=BLOCK,
        queries=torch.tensor(queries).float()[None, None],
        lowest=torch.stack([page.amin(dim=0) for page in pages])[None, None],
        highest=torch.stack([page.amax(dim=0) for page in pages])[None, None],
    )
    return policy.read(view)[0, 0].nonzero()[:, 0].tolist()


def test_quest_reads_the_newest_page_and_those_with_the_greatest_bounds():
    keys = [[n, -n] for n in (0, 0, 0, 5, 1, 1, 1, 1, 9, 0, 0, 0, -7, 0, 0, 0, 0)]
    # bounds of q = (1, 0): 5, 1, 9, 0; of (-1, 0): 0, -1, 0, 7; of (1, 1): 5, 0, 9, 7, which no token reaches
    assert read_quest(QUEST, keys, [[1, 0]]) == [0, 2, 4]
    assert read_quest(QUEST, keys, [[-1, 0]]) == [2, 3, 4]  # pages 0 and 2 tie at 0: the later
    assert read_quest(QUEST, keys, [[1, 1]]) == [2, 3, 4]
    assert read_quest(QUEST, keys, [[0, -1]]) == [0, 2, 4]  # 5, 1, 9, 0, by the least of the second channel


def test_quest_joins_a_group_by_its_greatest_bound_or_by_the_mean():
    keys = [[n, m] for n, m in ((9, 0), (6, 6), (0, 8), (5, 5), (0, 0)) for _ in range(BLOCK)]
    mean = build_policy("quest", budget=3 * BLOCK, block_size=BLOCK, options={"dense_layers": 0, "group": "mean"})
    assert read_quest(QUEST, keys, [[1, 0], [0, 1]]) == [0, 2, 4]  # 9, 6, 8, 5
    assert read_quest(mean, keys, [[1, 0], [0, 1]]) == [1, 3, 4]  # 4.5, 6, 4, 5


def test_quest_needs_three_pages():
    with pytest.raises(ValueError, match=r"policy\.budget=8 is below the minimum of 12"):
        build_policy("quest", budget=8, block_size=BLOCK)


def sentence_view(sentences, keys, now, length=2):
    """One row whose tokens have keys D = 1 and belong to these sentences; the query is 1."""
    missing = -len(keys) % BLOCK
    return ReadView(
        layer=0,
        lengths=torch.tensor([[len(keys)]]),
        num_pages=-(-len(keys) // BLOCK),
        block_size=BLOCK,
        queries=torch.ones(1, 1, 1, 1),
        keys=torch.tensor([*keys, *[float("nan")] * missing])[None, None, :, None],
        sentences=torch.tensor([*sentences, *[0] * missing])[None, None],
        sentence=torch.tensor([now]),
        sentence_length=torch.tensor([length]),
        sentence_queries=torch.ones(1, 1, 1, 1),
    )


def read_sentences(view, num_pages):
    """Pages that are read in a budget of so many."""
    options = {"factor": 160 / (num_pages * BLOCK), "ends": [0], "window": 8}
    policy = build_policy("sentencekv", budget=160, block_size=BLOCK, options=options)
    assert policy.read_pages == num_pages
    return policy.read(view)[0, 0].nonzero()[:, 0].tolist()


ENDS = [*range(8), *range(32, 40)]
"""Pages of the first and the last 32 of 160 tokens."""


def test_sentences_are_read_from_the_best_on_in_whole_pages():
    # sentences of 6 tokens: 10 covers slots 60 to 65, pages 15 and 16; 14 covers 84 to 89, pages 21 and 22
    sentences = [slot // 6 for slot in range(160)]
    keys = [0.0] * 160
    keys[60:66], keys[84:90], keys[100] = [2.0] * 6, [1.0] * 6, 5.0  # 16 has a mean of 5 / 6: slots 96 to 101
    view = sentence_view(sentences, keys, now=26)
    assert read_sentences(view, 18) == sorted([*ENDS, 15, 16])
    assert read_sentences(view, 20) == sorted([*ENDS, 15, 16, 21, 22])
    assert read_sentences(view, 21) == sorted([*ENDS, 15, 16, 21, 22, 25])  # the later page of the third sentence
    assert read_sentences(view, 2) == ENDS  # more than the budget


def test_what_is_being_written_is_no_candidate():
    sentences = [0] * 60 + [1] * 100
    assert read_sentences(sentence_view(sentences, [1.0] * 160, now=1), 40) == sorted([*range(15), *ENDS[8:]])


@pytest.mark.parametrize("length", [0, 1])
def test_the_end_of_a_sentence_and_the_next_first_token_read_all(length):
    view = sentence_view([0] * 160, [1.0] * 160, now=1, length=length)
    assert read_sentences(view, 17) == list(range(40))


def test_texts_that_end_a_sentence():
    assert all(map(ends_sentence, [".", "!", " ?", "...", ".\n", "\n\n", "。", "。。", ". "]))
    assert not any(map(ends_sentence, ["", " ", "\n", ",", "a.", ".5", "<s>"]))


def test_ends_come_from_the_tokenizer():
    policy = build_policy("sentencekv", budget=160, block_size=BLOCK)
    assert policy.for_vocabulary(lambda: ["a", ".", "b", "?"]).sentence_ends == (1, 3)
    with pytest.raises(ValueError, match="no token of the model's tokenizer ends a sentence"):
        policy.for_vocabulary(lambda: ["a", "b"])
    plain = build_policy("sentencekv", budget=160, block_size=BLOCK, options={"read_sentences": False})
    assert plain.for_vocabulary(lambda: 1 / 0) is plain
    assert not plain.by_page
    assert plain.is_idle is False


def random_read_view(seed, num_requests=3):
    """Rows of unlike lengths; what lies behind them is no number."""
    generator = torch.Generator().manual_seed(seed)
    num_pages, num_heads, group, size = 12, 2, 2, 3
    num_slots = num_pages * BLOCK
    lengths = torch.randint(1, num_slots + 1, (num_requests, num_heads), generator=generator)
    behind = torch.arange(num_slots) >= lengths[..., None]
    keys = torch.randn(num_requests, num_heads, num_slots, size, generator=generator)
    pages = keys.unflatten(2, (num_pages, BLOCK))
    garbage = torch.arange(num_pages) >= pages_of(lengths, BLOCK)[..., None]
    position = torch.rand(num_requests, num_heads, num_slots, generator=generator).cumsum(dim=-1)
    return ReadView(
        layer=0,
        lengths=lengths,
        num_pages=num_pages,
        block_size=BLOCK,
        queries=torch.randn(num_requests, num_heads, group, size, generator=generator),
        lowest=pages.amin(dim=3).masked_fill(garbage[..., None], float("nan")),
        highest=pages.amax(dim=3).masked_fill(garbage[..., None], float("-inf")),
        keys=keys.masked_fill(behind[..., None], float("nan")),
        sentences=position.div(3, rounding_mode="floor").long(),
        sentence=torch.randint(0, 9, (num_requests,), generator=generator),
        sentence_length=torch.randint(0, 5, (num_requests,), generator=generator),
        sentence_queries=torch.randn(num_requests, num_heads, group, size, generator=generator),
    )


def at(view, rows=slice(None), device="cpu"):
    """Some requests of a view, on a device."""
    values = dict(vars(view))
    tensors = {name: value[rows].to(device) for name, value in values.items() if isinstance(value, torch.Tensor)}
    return ReadView(**(values | tensors))


def with_window(name, options):
    """A case at a small budget."""
    return build_policy(
        name, budget=32, block_size=BLOCK, options=options | ({"window": 8} if "ends" in options else {})
    )


policies = pytest.mark.parametrize("policy", [with_window(*case) for case in READING_CASES], ids=str)


@policies
@settings(max_examples=25, deadline=None)
@given(seed=seeds)
def test_a_request_reads_the_same_alone_and_only_pages_that_it_holds(policy, seed):
    view = random_read_view(seed)
    chosen = policy.read(view)
    held = torch.arange(view.num_pages) < pages_of(view.lengths, BLOCK)[..., None]
    assert not (chosen & ~held)[view.sentence_length > 1].any()
    for row in range(3):
        assert torch.equal(policy.read(at(view, slice(row, row + 1)))[0], chosen[row])


@policies
def test_nothing_waits_for_the_device(policy):
    assert policy.read(at(random_read_view(0), device="meta")).device.type == "meta"


@settings(max_examples=25, deadline=None)
@given(seed=seeds, count=st.integers(1, 14))
def test_as_many_pages_as_asked_for_or_all(seed, count):
    view = random_read_view(seed)
    scores = torch.randn(3, 2, 12, generator=torch.Generator().manual_seed(seed))
    chosen = best_pages(view, scores, count)
    num_held = pages_of(view.lengths, BLOCK)
    assert torch.equal(chosen.sum(dim=-1), num_held.clamp_max(count))
    assert chosen.gather(-1, num_held[..., None] - 1).all(), "the newest page"
    worst_in = scores.masked_fill(~chosen | (torch.arange(12) == num_held[..., None] - 1), 99).amin(dim=-1)
    out = ~chosen & (torch.arange(12) < num_held[..., None])
    assert (scores.masked_fill(~out, -99).amax(dim=-1) <= worst_in).all()


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([4, -1], r"policy\.options\.ends has -1, which is no token id"),
        (["."], r"policy\.options\.ends has '\.', which is no token id"),
        ([True], r"policy\.options\.ends has True, which is no token id"),
        ("13", r"policy\.options\.ends=13 is no list of token ids"),
        (13, r"policy\.options\.ends=13 is no list of token ids"),
    ],
)
def test_ends_are_token_ids(ends, message):
    with pytest.raises(ValueError, match=message):
        build_policy("sentencekv", budget=64, block_size=BLOCK, options={"ends": ends})
