"""How many pages each layer and KV head keeps, one page after the other in plain Python.

Written from the docstrings of the policies and of `policies.shares`, and sharing nothing with the latter, so that the
two can be held against each other. A policy of another package is asked itself.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from harness.engines.hf.selection import Row
from policies.base import Phase, Policy, Ranking
from policies.ragged_selection import rank

Pages = list[list[int]]
"""By layer and KV head."""


@dataclass(frozen=True)
class Candidates:
    """The tokens of one request, to be cut to `mean_pages` a layer and head on average.

    Attributes:
        rows: by layer and KV head, its tokens from the best to the worst.
        mean_pages: pages that a row keeps on average.
        rest: tokens in the newest page of each row, 1 to `block_size`.
    """

    rows: list[list[Row]]
    mean_pages: int
    rest: int
    block_size: int

    @property
    def mean_tokens(self) -> int:
        """Tokens that a row keeps on average."""
        return self.size(self.mean_pages)

    def size(self, pages: int) -> int:
        """Tokens in so many pages of a row."""
        return (pages - 1) * self.block_size + self.rest

    def limits(self, row: Row) -> tuple[int, int]:
        """Fewest pages that hold the protected tokens, at least one, and most that the row fills."""
        least = 1
        while self.size(least) < sum(entry.protected for entry in row):
            least += 1
        most = least
        while self.size(most + 1) <= len(row):
            most += 1
        return least, most

    def give(self, layers: Iterable[int], worth: Callable[[int, int, int], float]) -> dict[tuple[int, int], int]:
        """Share the pages of some layers: each next one to the row whose next page is worth most.

        Args:
            layers: which layers share.
            worth: of layer, head and the index of the row's next page.
        """
        members = [(layer, head) for layer in layers for head in range(len(self.rows[layer]))]
        bounds = {member: self.limits(self.rows[member[0]][member[1]]) for member in members}
        pages = {member: least for member, (least, _) in bounds.items()}
        while sum(pages.values()) < self.mean_pages * len(members):
            growing = [member for member in members if pages[member] < bounds[member][1]]
            best = max(growing, key=lambda member: (worth(*member, pages[member]), -pages[member], _earlier(member)))
            pages[best] += 1
        return pages

    def give_by_wishes(self, layers: Iterable[int], wishes: list[list[float]]) -> dict[tuple[int, int], int]:
        """As `give`; a page is worth what the row's wish, in tokens, exceeds the pages before it, in pages."""
        return self.give(
            layers, lambda layer, head, page: (wishes[layer][head] - self.rest) / self.block_size + 1 - page
        )


def split_pages(policy: Policy, phase: Phase, candidates: Candidates, num_seen: int) -> Pages:
    """Pages of each layer and head.

    Args:
        policy: a ragged one.
        phase: when the decision is made.
        candidates: what there is to keep.
        num_seen: tokens attended so far.
    """
    layers = range(len(candidates.rows))
    pages: dict[tuple[int, int], int] = {}
    if policy.name not in RULES:
        return policy.split(_ranking(policy, phase, candidates, num_seen))[:, 0].tolist()
    for group in [layers] if _is_one_total(policy) else [[layer] for layer in layers]:
        pages |= RULES[policy.name](policy, candidates, group)
    return [[pages[layer, head] for head in range(len(candidates.rows[layer]))] for layer in layers]


def demanded_pages(policy: Policy, phase: Phase, candidates: Candidates, num_seen: int) -> int:
    """Pages that a row needs on average, where the data decide."""
    if policy.name != "corm":
        return int(policy.demand(_ranking(policy, phase, candidates, num_seen)))
    wishes = [_important_pages(candidates, row) for layer in candidates.rows for row in layer]
    return max(candidates.mean_pages, -(-sum(wishes) // len(wishes)))


def _is_one_total(policy: Policy) -> bool:
    """Whether pages can change layer."""
    if policy.name == "kv_compress":
        return policy.scope == "global"
    return RULES[policy.name] is not _adaptive or _beta(policy) != 1


def _beta(policy: Policy) -> float:
    """Steepness of budgets by depth; 1 where the policy has none."""
    return getattr(policy, "beta", 1)


def _adaptive(policy: Policy, candidates: Candidates, layers: Iterable[int]) -> dict[tuple[int, int], int]:
    means = [float(candidates.mean_tokens)] * len(candidates.rows)
    if _beta(policy) != 1:
        means = _pyramid(candidates, policy.window, policy.beta)
    wishes = [_layer_wishes(policy, heads, mean) for heads, mean in zip(candidates.rows, means, strict=True)]
    return candidates.give_by_wishes(layers, wishes)


def _layer_wishes(policy: Policy, heads: list[Row], mean: float) -> list[float]:
    """Ada-KV: how many of the layer's best tokens each head has, and the floor."""
    safe = int(policy.floor * mean) if policy.floor_rule == "minimum" else 0
    tokens = [
        (float("inf") if place < safe or entry.protected else entry.rank()[1], -place, -head)
        for head, row in enumerate(heads)
        for place, entry in enumerate(row)
    ]
    best = [-head for *_, head in sorted(tokens, reverse=True)[: round(mean * len(heads))]]
    counts = [best.count(head) for head in range(len(heads))]
    if policy.floor_rule == "minimum":
        return [float(count) for count in counts]
    return [(1 - policy.floor) * count + policy.floor * mean for count in counts]


def _depth(policy: Policy, candidates: Candidates, layers: Iterable[int]) -> dict[tuple[int, int], int]:
    means = _pyramid(candidates, policy.window, policy.beta)
    wishes = [[mean] * len(heads) for mean, heads in zip(means, candidates.rows, strict=True)]
    return candidates.give_by_wishes(layers, wishes)


def _pyramid(candidates: Candidates, window: int, beta: float) -> list[float]:
    """PyramidKV: a mean for each layer, falling linearly."""
    num_layers, mean = len(candidates.rows), candidates.mean_tokens - window
    if num_layers == 1:
        return [float(candidates.mean_tokens)]
    high = min(2 * mean - mean / beta, len(candidates.rows[0][0]) - window)
    low = 2 * mean - high
    return [window + high - (high - low) * layer / (num_layers - 1) for layer in range(num_layers)]


def _by_best_member(policy: Policy, candidates: Candidates, layers: Iterable[int]) -> dict[tuple[int, int], int]:
    def worth(layer: int, head: int, page: int) -> float:
        largest = candidates.rows[layer][head][candidates.size(page)]
        return float("inf") if largest.protected else largest.rank()[1]

    return candidates.give(layers, worth)


def _classes(policy: Policy, candidates: Candidates, layers: Iterable[int]) -> dict[tuple[int, int], int]:
    budget = policy.budget - candidates.block_size + candidates.rest
    wishes = [
        [float(len(row)) if whole else float(budget) for row, whole in zip(heads, flags, strict=True)]
        for heads, flags in zip(candidates.rows, policy.whole_rows, strict=True)
    ]
    for layer, lender in enumerate(policy.lenders or ()):
        if lender != layer:  # nobody reads what it keeps
            wishes[layer] = [-1e9] * len(wishes[layer])
    return candidates.give_by_wishes(layers, wishes)


def _important(policy: Policy, candidates: Candidates, layers: Iterable[int]) -> dict[tuple[int, int], int]:
    wishes = [[float(candidates.size(_important_pages(candidates, row))) for row in heads] for heads in candidates.rows]
    return candidates.give_by_wishes(layers, wishes)


def _important_pages(candidates: Candidates, row: Row) -> int:
    """CORM: pages that hold the tokens some query found at least average."""
    least, most = candidates.limits(row)
    needed = sum(entry.protected or entry.rank()[1] >= 1 for entry in row)
    pages = least
    while pages < most and candidates.size(pages) < needed:
        pages += 1
    return pages


RULES: dict[str, Callable[..., dict[tuple[int, int], int]]] = {
    "ada_kv": _adaptive,
    "corm": _important,
    "expected_attention": _adaptive,
    "head_classes": _classes,
    "inverse_key_l2": _classes,
    "kv_compress": _by_best_member,
    "mix_attention": _classes,
    "pyramid_kv": _depth,
}


def _ranking(policy: Policy, phase: Phase, candidates: Candidates, num_seen: int) -> Ranking:
    """The candidates as tensors, N = 1."""
    longest = max(len(row) for heads in candidates.rows for row in heads)

    def tensor(attribute: str, dtype: torch.dtype) -> torch.Tensor:
        rows = [
            [[getattr(entry, attribute) for entry in row] + [0] * (longest - len(row)) for row in heads]
            for heads in candidates.rows
        ]
        return torch.tensor(rows, dtype=dtype)[:, None]

    lengths = torch.tensor([[len(row) for row in heads] for heads in candidates.rows])[:, None]
    scores, positions = tensor("score", torch.float32), tensor("position", torch.int64)
    seen = torch.tensor([num_seen])
    return rank(policy, phase, scores, positions, lengths, seen, candidates.mean_tokens)


def _earlier(member: tuple[int, int]) -> tuple[int, int]:
    """Greater for an earlier layer and head."""
    return -member[0], -member[1]
