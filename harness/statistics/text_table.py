"""Plain text tables: the same on a terminal, in a pipe and in a log."""

from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns under a header; the first column is left-aligned, all others right-aligned."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join(_aligned(line, widths)).rstrip() for line in lines)


def format_interval(low: float | None, high: float | None) -> str:
    """Return "[low, high]" with two decimals, "-" without an interval."""
    return "-" if low is None or high is None else f"[{low:.2f}, {high:.2f}]"


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *others = line
    return [first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(others, widths[1:], strict=True))]
