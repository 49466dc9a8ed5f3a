"""How many prompts may be read at once where something is kept for each of them until it is evicted from.

The window of SnapKV and the query moments of Expected Attention take megabytes a request in every layer, but only until
its prompt has been evicted from. The scheduler lets so many such prompts be under way, and workers have as many rows.
"""

from policies import Policy, Signal, Unit

MOST_PROMPTS = 16
KEPT_BY_REQUEST = frozenset({Signal.WINDOW_QUERIES, Signal.QUERY_MOMENTS})


def prompt_rows(policy: Policy, max_num_seqs: int) -> int | None:
    """Prompts that may be under way at once; None for no bound, where nothing is kept for prompts alone."""
    prompts_only = policy.evicts and policy.decode_unit is Unit.NONE and Signal.ATTENTION_MASS not in policy.signals
    if not (prompts_only and policy.signals & KEPT_BY_REQUEST):
        return None
    return min(max_num_seqs, MOST_PROMPTS)


def rows_of_state(policy: Policy, max_num_seqs: int) -> int:
    """Rows that the workers keep for requests; one more is for all that need none."""
    rows = prompt_rows(policy, max_num_seqs)
    return 1 + (max_num_seqs if rows is None else rows)
