"""Pages a layer and head: the arithmetic that ragged policies share.

A row is one layer and KV head of one request. It keeps `(pages - 1) * B + rest` tokens: at least one page, at least
what its protected tokens need, at most what it holds. All shapes follow from counts alone, so that nothing waits for
the device.

Letters as in `policies.base`; G rows that share a total, P items (pages or tokens) that a row could have.
"""

import torch

from policies.base import Ranking


def split_by_wishes(ranking: Ranking, wishes: torch.Tensor, *, over_layers: bool) -> torch.Tensor:
    """Pages nearest to wishes in tokens: the largest remainders are rounded up, within the limits of each row.

    What a limit cuts from one row goes to the others in equal parts, and what it adds is taken from them likewise: the
    j-th page of a row is worth as much as its wish exceeds j pages, and the worthiest pages are given. Among equals an
    earlier page goes first, then an earlier layer and head.

    Args:
        ranking: gives limits, B, `rest` and the mean.
        wishes: float64 [L, N, H], tokens.
        over_layers: one total for all layers and heads; False: every layer has the same.

    Returns:
        int64 [L, N, H] of sum `mean_pages` times the number of rows that share.
    """
    page = torch.arange(_num_pages(ranking), device=wishes.device)
    pages = (wishes - ranking.rest) / ranking.block_size + 1
    return _split(ranking, pages[..., None] - page, over_layers)


def split_by_best_page(ranking: Ranking, *, over_layers: bool) -> torch.Tensor:
    """The pages with the greatest largest member stay, int64 [L, N, H].

    A row's tokens fill its pages from the best to the worst (KV-Compress's virtual blocks); the first holds `rest`.

    Args:
        ranking: the candidates.
        over_layers: as in `split_by_wishes`.
    """
    values = best_first(ranking)
    first = torch.full_like(values[..., :1], float("inf"))
    values = torch.cat([first, values[..., ranking.rest :: ranking.block_size]], dim=-1)[..., : _num_pages(ranking)]
    return _split(ranking, values, over_layers)


def best_tokens(ranking: Ranking, totals: torch.Tensor | int, at_least: torch.Tensor | float = 0) -> torch.Tensor:
    """How many of a layer's `totals` best tokens lie in each head: int64 [L, N, H].

    Protected tokens are the best. Among equal scores the better one of its head goes first, then the earlier head.

    Args:
        ranking: the candidates.
        totals: tokens of all heads of a layer together, one number or int64 [L, 1].
        at_least: so many of a head's tokens count as protected, one number or [L, 1, 1].
    """
    values = best_first(ranking)
    if isinstance(at_least, torch.Tensor):
        at_least = at_least[..., None]
    place = torch.arange(values.shape[-1], device=values.device)
    return _take(values.masked_fill(place < at_least, float("inf")), totals)


def best_first(ranking: Ranking) -> torch.Tensor:
    """Scores of every row in falling order, protected tokens as inf: float32 [L, N, H, T]."""
    scores = ranking.scores.masked_fill(ranking.protected, float("inf"))
    return scores.gather(-1, ranking.order.flip(-1))


def mean_tokens(ranking: Ranking) -> int:
    """Tokens that a row keeps on average."""
    return (ranking.mean_pages - 1) * ranking.block_size + ranking.rest


def page_limits(ranking: Ranking) -> tuple[torch.Tensor, torch.Tensor]:
    """Fewest pages that hold a row's protected tokens, and most that its tokens fill: int64 [L, N, H] each."""
    overhang = ranking.protected.sum(dim=-1) - ranking.rest
    least = (overhang + ranking.block_size - 1).div(ranking.block_size, rounding_mode="floor") + 1
    most = (ranking.lengths - ranking.rest).div(ranking.block_size, rounding_mode="floor") + 1
    return least.clamp_min(1), most


def _num_pages(ranking: Ranking) -> int:
    """P: pages that the longest row could keep."""
    return (ranking.scores.shape[-1] - ranking.rest) // ranking.block_size + 1


def _split(ranking: Ranking, values: torch.Tensor, over_layers: bool) -> torch.Tensor:
    """Give the most valuable pages, values [L, N, H, P], within the limits of each row."""
    num_layers, _, num_heads, num_pages = values.shape
    least, most = page_limits(ranking)
    page = torch.arange(num_pages, device=values.device)
    values = values.masked_fill(page < least[..., None], float("inf"))
    values = values.masked_fill(page >= most[..., None], float("-inf"))
    if not over_layers:
        return _take(values, num_heads * ranking.mean_pages)
    joined = values.transpose(0, 1).flatten(1, 2)
    taken = _take(joined, num_layers * num_heads * ranking.mean_pages)
    return taken.unflatten(1, (num_layers, num_heads)).transpose(0, 1)


def _take(values: torch.Tensor, total: torch.Tensor | int) -> torch.Tensor:
    """How many of the `total` most valuable items each row has.

    Args:
        values: [..., G, P], not rising along P.
        total: one number, or int64 that broadcasts to [...].

    Returns:
        int64 [..., G].
    """
    num_rows, num_items = values.shape[-2:]
    by_item = values.transpose(-1, -2).flatten(-2)
    row = by_item.argsort(dim=-1, descending=True, stable=True) % num_rows
    place = torch.arange(num_rows * num_items, device=values.device)
    taken = place < (total[..., None] if isinstance(total, torch.Tensor) else total)
    counts = torch.zeros(values.shape[:-1], dtype=torch.int64, device=values.device)
    return counts.scatter_add_(-1, row, taken.long().expand_as(row))
