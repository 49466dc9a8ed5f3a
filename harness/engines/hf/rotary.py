"""Rotary position embedding of a Hugging Face model, done and undone."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from harness.errors import UserError


@dataclass(frozen=True)
class Rotary:
    """How a model rotates: float32 frequencies [D / 2], and a factor on both rotated queries and keys (1 if plain)."""

    inv_freq: torch.Tensor
    scaling: float

    @classmethod
    def of(cls, model: PreTrainedModel, head_size: int) -> "Rotary":
        """Read from the model.

        Raises:
            UserError: the model does not rotate whole heads by one embedding shared by its layers.
        """
        embedding = getattr(model.base_model, "rotary_emb", None)
        if not hasattr(embedding, "inv_freq") or 2 * embedding.inv_freq.numel() != head_size:
            raise UserError(
                f"model={type(model).__name__} does not rotate its whole heads, so its queries cannot be un-rotated. "
                "Use a Llama-like model or a policy without query moments."
            )
        return cls(embedding.inv_freq.float(), float(embedding.attention_scaling))

    def undo(self, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Queries as they were before rotation.

        Args:
            queries: float32 [Q, n, D], rotated, the pair of coordinate i being i + D / 2.
            positions: int64 [n].

        Returns:
            float32 [Q, n, D].
        """
        return self._turn(queries, -positions) / self.scaling

    def apply(self, raw: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The inverse of `undo`: rotate float32 [Q, n, D] to positions int64 [n]."""
        return self._turn(raw, positions) * self.scaling

    def _turn(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None].float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        first, second = vectors.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
