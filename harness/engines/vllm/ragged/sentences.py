"""Which sentence each token belongs to, and the mean query of the one that is being written.

Letters: L layers, N requests, M of them that decode, n new tokens, H KV heads, G query heads of one, T slots, D head
size.
"""

from collections.abc import Sequence

import torch
from vllm.config import ModelConfig
from vllm.tokenizers.registry import cached_get_tokenizer
from vllm.utils.torch_utils import async_tensor_h2d

from harness.engines.vllm.signals.batch import Rows
from harness.engines.vllm.slices import cut, rows_at_once

MARK_BYTES = 32  # a position's mark, as a number, and sentences up to it
SLOT_BYTES = 96  # its position, its sentence, where that begins, how many tokens it has
PRODUCT_BYTES = 48  # products in float64, sums and means


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

        Raises:
            ValueError: an end is no token of the model.
        """
        if unknown := [token for token in ends if token >= vocabulary]:
            raise ValueError(
                f"policy.options.ends has {unknown[0]}, and the model has tokens 0 to {vocabulary - 1}. Leave it out, "
                "or leave out the option: then the tokenizer tells which tokens end a sentence."
            )
        is_end = torch.zeros(vocabulary, dtype=torch.bool)
        is_end[list(ends)] = True
        self._is_end = is_end.to(device)
        self._ends = torch.zeros(num_rows, max_length, dtype=torch.bool, device=device)
        self._counts = torch.zeros(num_rows, dtype=torch.int64, device=device)
        num_layers, *shape = queries
        self._sums = torch.zeros(num_layers, num_rows, *shape, dtype=torch.float32, device=device)
        self._rows = Rows(num_rows)
        self._num_seen = 0
        self._row = self._sentence = self._length = self._starts = torch.empty(0)

    @staticmethod
    def bytes_a_slot(group: int) -> int:
        """What scoring a slot holds for a moment where a KV head has `group` query heads."""
        return SLOT_BYTES + PRODUCT_BYTES * group

    @property
    def bytes_of_marks(self) -> int:
        """What counting the sentences of a request holds for a moment."""
        return MARK_BYTES * self._num_seen

    def begin(
        self,
        request_ids: Sequence[str],
        num_prompt_tokens: Sequence[int],
        num_seen: int,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        request_of: torch.Tensor,
        last: torch.Tensor,
        places: torch.Tensor,
    ) -> None:
        """Take in the tokens of a step.

        Args:
            request_ids: N requests.
            num_prompt_tokens: of each; the last one ends a sentence.
            num_seen: the most positions of any that decodes.
            token_ids, positions, request_of: int64 [n], of the step's tokens.
            last: int64 [N], the last token of each request.
            places: int64 [M], those that decode.
        """
        rows = [self._rows.take(name)[0] for name in request_ids]
        numbers = async_tensor_h2d([rows, list(num_prompt_tokens)], device=positions.device, dtype=torch.int64)
        row, num_prompt = numbers[0], numbers[1]
        ends = self._is_end[token_ids] | (positions == num_prompt[request_of] - 1)
        self._ends[row[request_of], positions] = ends
        before = self._counts[row[places]]  # 0 where the last step was none of decoding
        self._counts[row] = 0
        self._row, self._num_seen = row[places], num_seen
        if not len(places):
            return
        self._find_sentences(positions[last[places]])
        self._starts = (self._length <= 1) | (before == 0)
        self._counts[self._row] = torch.where(self._starts, 1, before + 1)

    def _find_sentences(self, newest: torch.Tensor) -> None:
        """Which sentence the token after `newest` int64 [M] belongs to, and how many tokens that has."""
        place, found = torch.arange(self._num_seen, device=newest.device), []
        for part in cut(len(newest), rows_at_once(self.bytes_of_marks, newest.device)):
            ends = self._ends[self._row[part], : self._num_seen] & (place <= newest[part, None])
            found.append(torch.stack([ends.sum(dim=-1), torch.where(ends, place, -1).amax(dim=-1)]))
        self._sentence, last_end = torch.cat(found, dim=1)
        self._length = newest - last_end

    def fields(
        self, layer: int, part: slice, queries: torch.Tensor, positions: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """What a `ReadView` is told, once a step, layer and request that decodes.

        Args:
            layer: which layer.
            part: which of the M requests, m of them.
            queries: float32 [m, H, G, D], the newest of each request.
            positions: int64 [m, H, T], anything behind a row's last token.
        """
        row, shape = self._row[part], (-1, 1, 1, 1)
        sums = torch.where(self._starts[part].view(shape), 0, self._sums[layer, row]) + queries
        self._sums[layer, row] = sums
        marks = self._ends[row, : self._num_seen].long()
        of_position = (marks.cumsum(dim=-1) - marks)[:, None].expand(-1, positions.shape[1], -1)
        return {
            "sentences": of_position.gather(-1, positions.clamp(0, self._num_seen - 1)),
            "sentence": self._sentence[part],
            "sentence_length": self._length[part],
            "sentence_queries": sums / self._counts[row].view(shape),
        }

    def forget(self, request_id: str) -> None:
        """The request is finished or preempted."""
        self._rows.release(request_id)


def token_texts(model: ModelConfig) -> list[str]:
    """The text of every token id that the model's tokenizer and the model both have."""
    tokenizer = cached_get_tokenizer(
        model.tokenizer,
        runner_type=model.runner_type,
        tokenizer_mode=model.tokenizer_mode,
        revision=model.tokenizer_revision,
        trust_remote_code=model.trust_remote_code,
    )
    return [tokenizer.decode([token]) for token in range(min(len(tokenizer), model.get_vocab_size()))]
