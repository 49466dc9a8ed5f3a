"""Which pages each layer and KV head of every request holds, and how many.

All heads of a request gain a token in the same step, and all their newest pages fill in the same step. So a head's
count is the request's mean plus a difference that only an eviction changes, and that is what is kept.

Letters: L layers, R rows, N requests, H KV heads, W pages that a row can hold.
"""

from collections.abc import Sequence

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from harness.engines.vllm.paged import PageGrid


class _News:
    """Pages of the longest head of each request of an eviction, on their way from the device.

    Attributes:
        request_ids: N requests.
        mean: blocks that each held after the eviction.
        most: int64 [N] on the host, to be read once it `has_come`.
    """

    def __init__(self, request_ids: tuple[str, ...], mean: int, most: torch.Tensor) -> None:
        self.request_ids, self.mean, self.most, self._event = request_ids, mean, most, None
        if most.is_cuda:
            self.most = torch.empty_like(most, device="cpu", pin_memory=True).copy_(most, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def has_come(self) -> bool:
        """Whether the numbers are here."""
        return self._event is None or self._event.query()


class PageTable:
    """Rows of requests that are under way. `arrange` brings a batch to the first rows, where kernels read in place.

    Attributes:
        pages: int32 [L, R, H, W], page numbers in slot order; what lies behind a head's last page is undefined.
        surplus: int32 [L, R, H], pages of a head less those of the mean: the blocks that the request holds.
    """

    def __init__(self, grid: PageGrid, num_rows: int, width: int) -> None:
        """`grid`: numbers the pages; `num_rows`: requests that can be under way at once; `width`: W."""
        self._grid = grid
        shape = (grid.num_layers, num_rows, grid.num_heads)
        self.pages = torch.zeros(*shape, width, dtype=torch.int32, device=grid.device)
        self.surplus = torch.zeros(shape, dtype=torch.int32, device=grid.device)
        self._layers = torch.arange(grid.num_layers, device=grid.device)[:, None, None]
        self._heads = torch.arange(grid.num_heads, device=grid.device)
        self._rows: dict[str, int] = {}
        self._num_blocks: dict[str, int] = {}
        self._longest: dict[str, int] = {}
        self._news: list[_News] = []
        self._latest: dict[str, _News] = {}

    def hold(self, request_ids: Sequence[str], blocks: Sequence[Sequence[int]]) -> torch.Tensor:
        """Make rows of these requests hold all pages of their blocks; a new block gives each layer and head one page.

        Returns:
            int64 [N], their rows.

        Raises:
            RuntimeError: no row is left.
        """
        self._take([name for name in request_ids if name not in self._rows])
        rows = [self._rows[name] for name in request_ids]
        grown = [
            (row, index, block)
            for name, row, held in zip(request_ids, rows, blocks, strict=True)
            if len(held) > self._num_blocks[name]
            for index, block in enumerate(held[self._num_blocks[name] :], start=self._num_blocks[name])
        ]
        if grown:
            self._append(self._tensor(grown))
            for name, held in zip(request_ids, blocks, strict=True):
                self._longest[name] += len(held) - self._num_blocks[name]
                self._num_blocks[name] = len(held)
        return self._tensor(rows)

    def arrange(self, request_ids: Sequence[str]) -> None:
        """Bring requests that have rows to the first rows, in this order."""
        if all(self._rows[name] == row for row, name in enumerate(request_ids)):
            return
        before, batch = dict(self._rows), set(request_ids)
        others = [name for name in before if name not in batch]
        taken = {before[name] for name in others if before[name] >= len(request_ids)}
        free = iter(row for row in range(len(request_ids), self.pages.shape[1]) if row not in taken)
        self._rows = {name: row for row, name in enumerate(request_ids)}
        self._rows |= {name: before[name] if before[name] >= len(request_ids) else next(free) for name in others}
        moved = [(before[name], row) for name, row in self._rows.items() if before[name] != row]
        source, target = self._tensor(moved).unbind(dim=-1)
        self.pages[:, target] = self.pages[:, source]
        self.surplus[:, target] = self.surplus[:, source]

    def read(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        """The first `width` pages int64 [L, N, H, width] of the requests in `rows` int64 [N]."""
        return self.pages[:, rows, :, :width].long()

    def num_pages(self, rows: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """int64 [L, N, H], pages of requests that hold `num_blocks` blocks."""
        return self.surplus[:, rows].long() + num_blocks

    def evicted(
        self, request_ids: Sequence[str], rows: torch.Tensor, pages: torch.Tensor, num_pages: torch.Tensor, mean: int
    ) -> None:
        """Write down what requests hold after an eviction.

        Args:
            request_ids: N requests.
            rows: int64 [N], see `hold`.
            pages: int64 [L, N, H, W'], page numbers in slot order.
            num_pages: int64 [L, N, H], of mean `mean` over layers and heads.
            mean: blocks that each request now holds.
        """
        self.pages[:, rows, :, : pages.shape[-1]] = pages.int()
        self.surplus[:, rows] = (num_pages - mean).int()
        for name in request_ids:
            self._num_blocks[name], self._longest[name] = mean, pages.shape[-1]
        news = _News(tuple(request_ids), mean, num_pages.amax(dim=(0, 2)))
        self._news = [*self._news, news]
        self._latest.update(dict.fromkeys(request_ids, news))

    def longest(self, request_ids: Sequence[str]) -> int:
        """A bound on the pages of any head of these requests: what is known without waiting for the device."""
        self._read_news()
        return max(self._longest[name] for name in request_ids)

    def is_equal(self, request_ids: Sequence[str]) -> bool:
        """True if all heads of these requests are known to hold equally many pages."""
        self._read_news()
        return all(self._longest[name] == self._num_blocks[name] for name in request_ids)

    def release(self, request_id: str) -> None:
        """The request is finished or preempted."""
        if self._rows.pop(request_id, None) is not None:
            del self._num_blocks[request_id], self._longest[request_id]
            self._latest.pop(request_id, None)

    def _read_news(self) -> None:
        """Tighten bounds by what has come from the device; none that a later eviction has made old."""
        for news in [news for news in self._news if news.has_come]:
            self._news.remove(news)
            for name, most in zip(news.request_ids, news.most.tolist(), strict=True):
                if self._latest.get(name) is news:
                    self._longest[name] = most + self._num_blocks[name] - news.mean

    def _take(self, request_ids: Sequence[str]) -> None:
        """Give rows to new requests."""
        if not request_ids:
            return
        taken = set(self._rows.values())
        free = [row for row in range(self.pages.shape[1]) if row not in taken][: len(request_ids)]
        if len(free) < len(request_ids):
            raise RuntimeError(f"{len(taken) + len(request_ids)} requests for {self.pages.shape[1]} rows of pages")
        for name, row in zip(request_ids, free, strict=True):
            self._rows[name], self._num_blocks[name], self._longest[name] = row, 0, 0
        self.surplus[:, self._tensor(free)] = 0

    def _append(self, grown: torch.Tensor) -> None:
        """`grown`: int64 [M, 3], row, index among the request's blocks, block."""
        row, index, block = grown.unbind(dim=-1)
        column = index[:, None] + self.surplus[:, row]
        self.pages[self._layers, row[:, None], self._heads, column] = self._grid.numbers(block[:, None])[..., 0].int()

    def _tensor(self, values: list) -> torch.Tensor:
        return async_tensor_h2d(values, device=self.pages.device, dtype=torch.int64)
