"""Whether answers ended before they began: cut inside a reasoning block."""

import sys
from collections.abc import Sequence

from harness.store.predictions import Prediction


def warn_of_cut_reasoning(predictions: Sequence[Prediction]) -> None:
    """Say so loudly where answers ended inside a reasoning block: their scores say nothing of the model."""
    cut = [p.sample_id for p in predictions if p.cut_in_reasoning]
    if cut:
        print(
            f"warning: {len(cut)} of {len(predictions)} answers were cut inside a reasoning block (<think>), before "
            f"anything that was asked for, for example {cut[0]}: their scores mean nothing. Switch reasoning off, for "
            "most models with model.template_arguments.enable_thinking=false.",
            file=sys.stderr,
            flush=True,
        )
