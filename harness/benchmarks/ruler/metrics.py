"""RULER's string match.

Source: NVIDIA/RULER, scripts/eval/synthetic/constants.py, as behaviour: `string_match_all` is the share of the answers
that the prediction holds, `string_match_part` 1 if it holds any; case does not matter. lm-eval 0.4.13 scores
`string_match_part` a sample as the share of the answers, which is not RULER's.
"""

import re

_CONTROL = re.compile(r"[\x00-\x1f]")


def holds(prediction: str, answer: str) -> float:
    """Return 1 if the prediction holds the answer, else 0."""
    return float(answer.lower() in _CONTROL.sub("\n", prediction.strip()).strip().lower())
