"""The two back ends of fuzzywuzzy's `ratio`, chosen by name instead of by what is installed.

fuzzywuzzy 0.18 compares with difflib, but silently with python-Levenshtein where that is installed, which moves the
code tasks by 1 to 5 points (THUDM/LongBench#96). Here its guards and its rounding run on the named back end.
"""

from collections.abc import Callable
from difflib import SequenceMatcher

from fuzzywuzzy.utils import check_empty_string, check_for_equivalence, intr
from rapidfuzz.distance import Indel

from harness.errors import UserError


def _difflib_ratio(first: str, second: str) -> float:
    return SequenceMatcher(None, first, second).ratio()


_RATIOS: dict[str, Callable[[str, str], float]] = {
    "difflib": _difflib_ratio,
    "levenshtein": Indel.normalized_similarity,
}
EDIT_SIMILARITIES = tuple(_RATIOS)
DEFAULT_EDIT_SIMILARITY = "difflib"


def check_edit_similarity(name: str) -> None:
    """Raise UserError unless `name` is one of `EDIT_SIMILARITIES`."""
    if name not in _RATIOS:
        raise UserError(f"edit_similarity={name!r} is unknown. Use {' or '.join(EDIT_SIMILARITIES)}.")


def edit_percent(first: str, second: str, edit_similarity: str) -> int:
    """Return fuzzywuzzy's `ratio` of two texts: a whole number from 0 to 100.

    Equal texts give 100, also when both are empty; otherwise an empty one gives 0.

    Args:
        first: the prediction; difflib's ratio depends on the order.
        second: the answer.
        edit_similarity: "difflib", or "levenshtein" for python-Levenshtein's ratio, computed by rapidfuzz.

    Raises:
        UserError: there is no such back end.
    """
    check_edit_similarity(edit_similarity)
    return _guarded_percent(first, second, _RATIOS[edit_similarity])


@check_for_equivalence
@check_empty_string
def _guarded_percent(first: str, second: str, ratio: Callable[[str, str], float]) -> int:
    return intr(100 * ratio(first, second))
