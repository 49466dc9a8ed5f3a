"""Which pages a decode step reads, one page and one sentence after the other in plain Python.

Written from the docstrings of the policies, and sharing nothing with their tensor code, so that the two can be held
against each other. A policy of another package is asked itself.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from harness.engines.contract import ReadTokens
from harness.engines.hf.cache import HeadCache
from harness.engines.hf.selection import Entry
from policies.base import Policy
from policies.views import ReadSignal, ReadView


@dataclass
class Reader:
    """The running request as its read selection sees it, and the record of what was read.

    Attributes:
        token_ids: of all positions so far.
        queries: by layer and KV head, [G, D] of each token of the sentence that is being written.
        reads: pages by step, layer and KV head, all of them where a layer does not choose.
    """

    policy: Policy
    num_prompt_tokens: int
    num_layers: int
    num_heads: int
    token_ids: list[int] = field(default_factory=list)
    queries: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    reads: list[list[list[list[int]]]] = field(default_factory=list)
    _read: list[list[int]] = field(init=False)
    _resident: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        """Nothing was read yet."""
        self._read, self._resident = ([[0] * self.num_heads for _ in range(self.num_layers)] for _ in range(2))

    def begin(self, token_ids: list[int]) -> None:
        """New tokens are about to be attended."""
        self.token_ids = self.token_ids + token_ids
        if len(self.token_ids) > self.num_prompt_tokens:
            self.reads.append([[[] for _ in range(self.num_heads)] for _ in range(self.num_layers)])

    def chooses(self, positions: list[int]) -> bool:
        """True in decode steps; the prompt is read whole."""
        return positions[0] >= self.num_prompt_tokens

    def slots(self, layer: int, index: int, head: HeadCache, query: torch.Tensor) -> list[int]:
        """Slots of a KV head that its group of queries [G, D] reads, in order."""
        size, num_tokens = self.policy.block_size, len(head.positions)
        num_pages = -(-num_tokens // size)
        pages = set(range(num_pages))
        if layer >= self.policy.full_read_layers:
            rule = RULES.get(self.policy.name, _asked)
            pages = rule(self, (layer, index), head, query) & pages | {num_pages - 1}
        read = [slot for slot in range(num_tokens) if slot // size in pages]
        self.reads[-1][layer][index] = sorted(pages)
        self._read[layer][index] += len(read)
        self._resident[layer][index] += num_tokens
        return read

    def record(self) -> dict[str, Any]:
        """Fields of a `ReferenceTrace`."""
        read = ReadTokens(len(self.reads), self._read, self._resident) if self.reads else None
        return {"reads": self.reads, "read": read}

    def sentences(self) -> list[int]:
        """The sentence of each position, and last that of the next token."""
        sentence, found = 0, []
        for position, token in enumerate(self.token_ids):
            found.append(sentence)
            sentence += token in self.policy.sentence_ends or position == self.num_prompt_tokens - 1
        return [*found, sentence]

    def queries_of_sentence(self, row: tuple[int, int], query: torch.Tensor) -> torch.Tensor:
        """Mean [G, D] of the queries of the sentence that is being written, this step's included."""
        found = self.sentences()
        begins = len(found) < 3 or found[-3] != found[-2]
        self.queries[row] = ([] if begins else self.queries[row]) + [query]
        return torch.stack(self.queries[row]).mean(dim=0)


def _quest(reader: Reader, row: tuple[int, int], head: HeadCache, query: torch.Tensor) -> set[int]:
    """The pages with the greatest bound on q . k."""
    policy = reader.policy
    scores = []
    for page in head.keys.float().split(policy.block_size):
        lowest, highest = page.amin(dim=0), page.amax(dim=0)
        bounds = [float(torch.maximum(q * lowest, q * highest).sum()) for q in query]
        scores.append(max(bounds) if policy.group == "max" else sum(bounds) / len(bounds))
    return set(_best_pages(scores, policy.budget // policy.block_size, {len(scores) - 1}))


def _sentencekv(reader: Reader, row: tuple[int, int], head: HeadCache, query: torch.Tensor) -> set[int]:
    """The first and last tokens, and sentences from the best on, until the budget is full."""
    policy, size, found, num_tokens = reader.policy, reader.policy.block_size, reader.sentences(), len(head.positions)
    mean_query = reader.queries_of_sentence(row, query)
    if found[:-1].count(found[-1]) <= 1:
        return set(range(num_tokens))
    members: dict[int, list[int]] = {}
    for slot, position in enumerate(head.positions):
        if found[position] < found[-1]:
            members.setdefault(found[position], []).append(slot)
    pages = {slot // size for slot in [*range(32), *range(num_tokens - 32, num_tokens)] if 0 <= slot < num_tokens}
    from_the_best = sorted(members.values(), key=lambda slots: _rank(policy, slots, head, mean_query), reverse=True)
    for slots in from_the_best:
        for page in sorted({slot // size for slot in slots} - pages, reverse=True):
            if len(pages) < max(1, int(policy.budget / policy.factor) // size):
                pages.add(page)
    return pages


def _rank(policy: Policy, slots: list[int], head: HeadCache, query: torch.Tensor) -> tuple[bool, float, int]:
    """By the product of the mean query [G, D] with the mean key of a sentence; among equals the later."""
    products = (query @ head.keys[slots].float().mean(dim=0)).tolist()
    score = max(products) if policy.group == "max" else sum(products) / len(products)
    return Entry(False, score, slots[-1]).rank()


def _best_pages(scores: list[float], count: int, always: set[int]) -> list[int]:
    """The `count` best: first those in `always`, then by score, then the later."""
    entries = [Entry(page in always, score, page) for page, score in enumerate(scores)]
    return [entry.position for entry in sorted(entries, key=Entry.rank, reverse=True)[: max(count, len(always))]]


def _asked(reader: Reader, row: tuple[int, int], head: HeadCache, query: torch.Tensor) -> set[int]:
    """What the policy answers of a view with N = H = 1."""
    policy, size, num_tokens = reader.policy, reader.policy.block_size, len(head.positions)
    num_pages = -(-num_tokens // size)
    fields: dict[str, torch.Tensor] = {}
    if ReadSignal.PAGE_BOUNDS in policy.read_signals:
        pages = head.keys.split(size)
        fields["lowest"], fields["highest"] = (
            torch.stack([bound(page) for page in pages])[None, None]
            for bound in (lambda page: page.amin(dim=0), lambda page: page.amax(dim=0))
        )
    if ReadSignal.SENTENCES in policy.read_signals:
        found = reader.sentences()
        missing = num_pages * size - num_tokens
        fields |= {
            "keys": torch.nn.functional.pad(head.keys, (0, 0, 0, missing))[None, None],
            "sentences": torch.tensor([[[*(found[p] for p in head.positions), *[0] * missing]]]),
            "sentence": torch.tensor([found[-1]]),
            "sentence_length": torch.tensor([found[:-1].count(found[-1])]),
            "sentence_queries": reader.queries_of_sentence(row, query)[None, None],
        }
    view = ReadView(row[0], torch.tensor([[num_tokens]]), num_pages, size, query[None, None], **fields)
    return {page for page, read in enumerate(policy.read(view)[0, 0].tolist()) if read}


RULES = {"quest": _quest, "sentencekv": _sentencekv}
"""How each policy of ours chooses."""
