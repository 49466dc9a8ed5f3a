"""From scores of pages to those that are read: the part that policies which read less share."""

import torch
from torch.nn.functional import pad

from policies.selection import ranks
from policies.views import ReadView


def best_pages(view: ReadView, scores: torch.Tensor, count: int, always: torch.Tensor | None = None) -> torch.Tensor:
    """The `count` best pages of each row: first the newest and those in `always`, then by score, then the later.

    Scores are compared as in `policies.selection`. A row that holds fewer pages reads them all.

    Args:
        view: gives the pages that each row holds.
        scores: float32 [N, H, W], anything for pages that are not held.
        count: pages to read.
        always: bool [N, H, W], pages that are read whatever their score, even where they are more than `count`.

    Returns:
        bool [N, H, W].
    """
    page = torch.arange(view.num_pages, device=scores.device)
    num_held = pages_of(view.lengths, view.block_size)[..., None]
    first = page == num_held - 1
    if always is not None:
        first = first | (always & (page < num_held))
    scores = scores.masked_fill(page >= num_held, float("-inf"))
    ranked = ranks(scores, page.expand_as(scores), first)
    best = ranked.topk(min(count, view.num_pages), dim=-1).indices
    chosen = torch.zeros_like(first).scatter_(-1, best, True)
    return (chosen | first) & (page < num_held)


def pages_of(lengths: torch.Tensor, block_size: int) -> torch.Tensor:
    """Pages that so many tokens fill, the newest perhaps in part."""
    return (lengths + block_size - 1).div(block_size, rounding_mode="floor")


def by_page(values: torch.Tensor, block_size: int) -> torch.Tensor:
    """[..., T] -> [..., W, B], False or -inf behind the last slot."""
    nothing = False if values.dtype == torch.bool else float("-inf")
    return pad(values, (0, -values.shape[-1] % block_size), value=nothing).unflatten(-1, (-1, block_size))
