"""Which sentence each token belongs to, and the mean query of the one that is being written.

Letters: L layers, N requests, n new tokens, H KV heads, G query heads of one, S positions, D head size.
"""

from collections.abc import Sequence

import torch
from vllm.config import ModelConfig
from vllm.tokenizers.registry import cached_get_tokenizer
from vllm.utils.torch_utils import async_tensor_h2d

from harness.engines.vllm.signals.batch import Rows


class Sentences:
    """Marks of the ends of sentences of all requests under way, and sums of queries."""

    def __init__(
        self,
        ends: Sequence[int],
        vocabulary: int,
        num_rows: int,
        max_length: int,
        queries: tuple[int, int, int, int],
        device: torch.device,
    ) -> None:
        """Allocate.

        Args:
            ends: token ids that end a sentence.
            vocabulary: number of token ids.
            num_rows: requests that can be under way at once.
            max_length: the most tokens of a request.
            queries: L, H, G and D.
            device: of the cache.
        """
        is_end = torch.zeros(vocabulary, dtype=torch.bool)
        is_end[list(ends)] = True
        self._is_end = is_end.to(device)
        self._ends = torch.zeros(num_rows, max_length, dtype=torch.bool, device=device)
        self._counts = torch.zeros(num_rows, dtype=torch.int64, device=device)
        num_layers, *shape = queries
        self._sums = torch.zeros(num_layers, num_rows, *shape, dtype=torch.float32, device=device)
        self._rows = Rows(num_rows)
        self._row = self._of_position = self._sentence = self._length = self._starts = torch.empty(0)

    def begin(
        self,
        request_ids: Sequence[str],
        num_prompt_tokens: Sequence[int],
        num_seen: int,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        request_of: torch.Tensor,
        last: torch.Tensor,
        decoding: torch.Tensor,
    ) -> None:
        """Take in the tokens of a step.

        Args:
            request_ids: N requests.
            num_prompt_tokens: of each; the last one ends a sentence.
            num_seen: the most positions of any of them.
            token_ids, positions, request_of: int64 [n], of the step's tokens.
            last: int64 [N], the last token of each request.
            decoding: bool [N].
        """
        rows = [self._rows.take(name)[0] for name in request_ids]
        numbers = async_tensor_h2d([rows, list(num_prompt_tokens)], device=positions.device, dtype=torch.int64)
        self._row, num_prompt = numbers[0], numbers[1]
        ends = self._is_end[token_ids] | (positions == num_prompt[request_of] - 1)
        self._ends[self._row[request_of], positions] = ends
        marks = self._ends[self._row, :num_seen].long()
        complete = marks.cumsum(dim=-1)
        self._of_position = complete - marks
        newest = positions[last][:, None]
        sentence = complete.gather(1, newest)
        place = torch.arange(num_seen, device=positions.device)
        self._length = ((self._of_position == sentence) & (place <= newest)).sum(dim=-1)
        self._sentence = sentence[:, 0]
        before = self._counts[self._row]  # 0 where the last step was none of decoding
        self._starts = (self._length <= 1) | (before == 0)
        self._counts[self._row] = torch.where(self._starts, 1, before + 1) * decoding

    def fields(self, layer: int, queries: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a `ReadView` is told, once a step and layer.

        Args:
            layer: which layer.
            queries: float32 [N, H, G, D], the newest of each request.
            positions: int64 [N, H, T], anything behind a row's last token.
        """
        sums = torch.where(self._starts[:, None, None, None], 0, self._sums[layer, self._row]) + queries
        self._sums[layer, self._row] = sums
        of_position = self._of_position[:, None].expand(-1, positions.shape[1], -1)
        return {
            "sentences": of_position.gather(-1, positions.clamp(0, of_position.shape[-1] - 1)),
            "sentence": self._sentence,
            "sentence_length": self._length,
            "sentence_queries": sums / self._counts[self._row].clamp_min(1)[:, None, None, None],
        }

    def forget(self, request_id: str) -> None:
        """The request is finished or preempted."""
        self._rows.release(request_id)


def token_texts(model: ModelConfig) -> list[str]:
    """The text of every token id of the model's tokenizer."""
    tokenizer = cached_get_tokenizer(
        model.tokenizer,
        runner_type=model.runner_type,
        tokenizer_mode=model.tokenizer_mode,
        revision=model.tokenizer_revision,
        trust_remote_code=model.trust_remote_code,
    )
    return [tokenizer.decode([token]) for token in range(len(tokenizer))]
