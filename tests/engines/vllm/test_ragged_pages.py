"""Pages, their table and their placement, without an engine: every page has one owner, and nothing kept is lost."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM (make setup)")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engines.vllm.paged import PageGrid
from harness.engines.vllm.ragged.moves import plan_moves, slots_of
from harness.engines.vllm.ragged.placement import Placement, true_places
from harness.engines.vllm.ragged.table import PageTable
from policies import Phase

CPU = torch.device("cpu")
POOL, ROWS, WIDTH = 14, 4, 40
GRID = PageGrid.dense(3, POOL, 2, 32, CPU)


def test_true_places():
    places, found = true_places(torch.tensor([[False, True, False, True], [True, False, False, False]]), 2)
    assert places[found].tolist() == [1, 3, 0]
    assert found.tolist() == [[True, True], [True, False]]


class World:
    """A pool of blocks; every page of memory carries the tag that was written into it when it was granted."""

    def __init__(self):
        self.table, self.placement = PageTable(GRID, ROWS, WIDTH), Placement(GRID)
        self.free = list(range(1, POOL))
        self.memory = torch.zeros(GRID.num_numbers, dtype=torch.int64)
        self.blocks, self.tags, self.batch, self.tag = {}, {}, [], 0

    def grow(self, name, count):
        held = self.blocks.setdefault(name, [])
        rows = self.tags.setdefault(name, [[[] for _ in range(2)] for _ in range(3)])
        for _ in range(min(count, len(self.free), WIDTH - max(len(row) for layer in rows for row in layer))):
            held.append(self.free.pop(0))
            self.table.hold([name], [held])
            row = self.table.hold([name], [held])
            counts = self.table.num_pages(row, len(held))
            last = self.table.read(row, WIDTH).gather(-1, counts[..., None] - 1)[:, 0, :, 0]
            for layer in range(3):
                for head in range(2):
                    self.tag += 1
                    self.memory[last[layer, head]] = self.tag
                    rows[layer][head].append(self.tag)

    def evict(self, name, num_left, rng):
        """Keep `num_left` blocks' worth of random pages, at least the newest of every head."""
        held, rows = self.blocks[name], self.tags[name]
        row = self.table.hold([name], [held])
        width = max(len(tags) for layer in rows for tags in layer)
        keep = torch.zeros(3, 1, 2, width, dtype=torch.bool)
        old = []
        for layer in range(3):
            for head in range(2):
                count = len(rows[layer][head])
                keep[layer, 0, head, count - 1] = True
                old += [(layer, head, place) for place in range(count - 1)]
        for layer, head, place in rng.sample(old, num_left * 6 - 6):
            keep[layer, 0, head, place] = True
        placed = self.placement.place(self.table.read(row, width), keep, torch.tensor([held]), num_left)
        self.memory[placed.target] = self.memory[placed.source]
        order = (~keep).to(torch.uint8).argsort(dim=-1, stable=True)
        kept = placed.pages.gather(-1, order)
        self.table.evicted([name], row, kept, keep.sum(dim=-1), num_left)
        self.free += held[num_left:]
        del held[num_left:]
        for layer in range(3):
            for head in range(2):
                tags = rows[layer][head]
                rows[layer][head] = [tag for tag, stays in zip(tags, keep[layer, 0, head], strict=False) if stays]

    def check(self):
        owned = []
        for name, rows in self.tags.items():
            row = self.table.hold([name], [self.blocks[name]])
            counts = self.table.num_pages(row, len(self.blocks[name]))[:, 0]
            pages = self.table.read(row, WIDTH)[:, 0]
            assert counts.tolist() == [[len(tags) for tags in layer] for layer in rows]
            assert self.table.longest([name]) >= counts.max()
            bag = []
            for layer in range(3):
                for head in range(2):
                    mine = pages[layer, head, : counts[layer, head]]
                    assert self.memory[mine].tolist() == rows[layer][head], "a page was lost or overwritten"
                    bag += mine.tolist()
            assert sorted(bag) == sorted(GRID.numbers(torch.tensor([self.blocks[name]])).flatten().tolist())
            owned += bag
        assert len(owned) == len(set(owned))


@settings(max_examples=40, deadline=None)
@given(rng=st.randoms(use_true_random=False), steps=st.integers(5, 40))
def test_every_page_has_one_owner_through_any_life(rng, steps):
    world = World()
    for _ in range(steps):
        names = list(world.tags)
        action = rng.choice(["grow", "evict", "arrange", "release"])
        if action == "grow" and world.free:
            unused = [name for name in "abcd" if name not in names]
            world.grow(rng.choice(names + unused[:1]), rng.randint(1, 4))
        elif names and action == "evict":
            name = rng.choice(names)
            if (count := len(world.blocks[name])) > 0:
                world.evict(name, rng.randint(1, count), rng)
        elif names and action == "arrange":
            batch = rng.sample(names, rng.randint(1, len(names)))
            world.table.arrange(batch)
            assert world.table.hold(batch, [world.blocks[name] for name in batch]).tolist() == list(range(len(batch)))
        elif names and action == "release":
            name = rng.choice(names)
            world.table.release(name)
            world.free += world.blocks.pop(name)
            del world.tags[name]
        world.check()


def test_one_request_too_many_is_an_error():
    table = PageTable(GRID, 2, WIDTH)
    with pytest.raises(RuntimeError, match="3 requests for 2 rows"):
        table.hold("abc", [[1], [2], [3]])


@pytest.mark.parametrize("phase", [Phase.PREFILL_END, Phase.DECODE])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_moves_bring_every_kept_token_to_the_front_of_its_own_pages(phase, data):
    lengths = torch.tensor(data.draw(st.lists(st.integers(1, 12), min_size=4, max_size=4))).view(2, 1, 2)
    keep = torch.rand(2, 1, 2, 12, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))) < 0.5
    keep &= torch.arange(12) < lengths[..., None]
    num_kept = keep.sum(dim=-1)
    slots = slots_of(torch.randperm(12).view(2, 1, 2, 3), 4)
    memory = torch.zeros(48, dtype=torch.int64)
    memory[slots] = torch.arange(48).view(2, 1, 2, 12)
    expected = [torch.arange(48).view(4, 12)[row][keep.view(4, 12)[row]].tolist() for row in range(4)]
    source, target, needed = plan_moves(keep, num_kept, slots, phase, limit=int(num_kept.sum()))
    for start in range(0, source.shape[1], 3):  # in pieces, as large caches are moved
        part = needed[0, start : start + 3]
        memory[target[0, start : start + 3][part]] = memory[source[0, start : start + 3][part]]
    for row in range(4):
        found = memory[slots.view(4, 12)[row, : num_kept.view(4)[row]]].tolist()
        assert (sorted(found) if phase is Phase.DECODE else found) == expected[row]
