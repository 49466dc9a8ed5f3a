"""The answer first: how much of the full cache's score each run keeps, and what memory and time it saves for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.report.reading.runs import FULL_CACHE_POLICY, Group, Run, budget_text
from harness.report.tables.conditions import key_cells, key_columns, key_record, setting, speed_warnings, warnings
from harness.report.tables.costs import nominal_saving, request_kv_mib, samples_per_s
from harness.report.tables.differences import Differences
from harness.report.tables.grid import Cell, Column, Table, interval_text, number_cell
from harness.statistics.paired import SIGNIFICANT

MIN_IN_A_ROW = 3
CAPTION = (
    "Score: mean of tasks, 0 to 100, and its share of the full cache's; the interval is that of the paired difference, "
    "in percent of the full cache's score. KV memory: of a running request, mean over time. Time: of a sample with all "
    "samples sent at once, one run a row; load tests measure speed better."
)


@dataclass(frozen=True)
class Answer:
    """What a finished run keeps and needs, in percent of the full cache; None where it is not known.

    Attributes:
        kept, kept_low, kept_high: score, and the 95 % interval of the paired difference around it.
        memory: KV memory of a running request.
        time: seconds a sample.
        is_told_apart: whether its score differs from the full cache's after Holm's adjustment; None without a test.
    """

    run: Run
    score: float
    kept: float | None
    kept_low: float | None
    kept_high: float | None
    memory: float | None
    time: float | None
    is_told_apart: bool | None


def find_answers(group: Group, differences: Differences) -> list[Answer]:
    """One a finished run that has a score, the full cache included."""
    return [_answer(group, run, differences) for run in group.finished if run.averages[0].score is not None]


def sentences(answers: Sequence[Answer]) -> list[tuple[str, str]]:
    """One a series: its name and what it does, the best kept score first, budgets ascending."""
    named: dict[str, list[Answer]] = {}
    for one in answers:
        named.setdefault(one.run.series, []).append(one)
    ordered = sorted(named.items(), key=lambda item: (not _is_full(item[1]), -max(_rank(one) for one in item[1])))
    return [(name, f"{_text(members)}.") for name, members in ordered]


def answer_table(group: Group, answers: Sequence[Answer]) -> Table:
    """Score kept, memory and time of every finished run."""
    keys = key_columns(group)
    columns = [
        *keys,
        Column("Score", "mean of tasks"),
        Column("Score kept", "% of full"),
        Column("KV memory", "% of full"),
        Column("Time a sample", "% of full"),
    ]
    fields = ("score", "kept", "kept_low", "kept_high", "memory", "time")
    return Table(
        name=f"answer-{group.name}",
        title=f"Score kept, memory and time, {group.title}",
        caption=f"{setting(group)} {CAPTION}",
        columns=columns,
        rows=[_row(group, one) for one in answers],
        num_keys=len(keys),
        notes=[*warnings(group), *speed_warnings(group)],
        records=[key_record(one.run) | {key: getattr(one, key) for key in fields} for one in answers],
    )


def _answer(group: Group, run: Run, differences: Differences) -> Answer:
    score = run.averages[0].score or 0.0
    baseline, peer, found = group.baseline(run), group.cost_baseline(run), differences.to_full(run)
    full = baseline.averages[0].score if baseline else None
    if run.policy == FULL_CACHE_POLICY:
        return Answer(run, score, 100.0, None, None, 100.0, 100.0, None)
    interval = found.comparison.interval if found else None
    low, high = (100 + 100 * side / full for side in interval) if interval and full else (None, None)
    p_holm = found.comparison.p_holm if found else None
    return Answer(
        run=run,
        score=score,
        kept=100 * score / full if full and found else None,
        kept_low=low,
        kept_high=high,
        memory=_share(request_kv_mib(run), peer and request_kv_mib(peer)),
        time=_share(peer and samples_per_s(peer), samples_per_s(run)),
        is_told_apart=None if p_holm is None else p_holm < SIGNIFICANT,
    )


def _share(mine: float | None, full: float | None) -> float | None:
    return 100 * mine / full if mine and full else None


def _is_full(members: Sequence[Answer]) -> bool:
    return members[0].run.policy == FULL_CACHE_POLICY


def _rank(one: Answer) -> float:
    return one.score if one.kept is None else one.kept


def _text(members: Sequence[Answer]) -> str:
    """Budget by budget for one or two of them, else the figures of all in a row."""
    if len(members) < MIN_IN_A_ROW or any(one.kept is None for one in members):
        return "; ".join(_clause(one) for one in members)
    apart = [one for one in members if one.is_told_apart]
    where = "all" if len(apart) == len(members) else ", ".join(budget_text(one.run.budget) for one in apart)
    word = "significantly less" if all(one.kept < 100 for one in apart) else "told apart from full"
    verdict = f"({word}: {where})" if apart else "(not told apart)"
    if all(one.is_told_apart is None for one in members):
        verdict = "(not tested)"
    costs = {share: [getattr(one, share) for one in members] for share in ("memory", "time")}
    known = [f"{_in_a_row(values)} % of the {share}" for share, values in costs.items() if None not in values]
    at = " / ".join(budget_text(one.run.budget) for one in members)
    kept = _in_a_row([one.kept for one in members])
    said = ", with ".join(filter(None, [f"at {at} keeps {kept} % of the score {verdict}", ", ".join(known)]))
    return said + _unfreed(members[0])


def _in_a_row(values: Sequence[float]) -> str:
    texts = [f"{value:.0f}" for value in values]
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def _unfreed(one: Answer) -> str:
    nominal = nominal_saving(one.run)
    return "" if nominal is None else f" (up to {nominal:.0f} % of the memory saved in name only, not freed)"


def _clause(one: Answer) -> str:
    at = f"at {budget_text(one.run.budget)} " if one.run.budget is not None else ""
    if one.run.policy == FULL_CACHE_POLICY:
        memory, speed = request_kv_mib(one.run), samples_per_s(one.run)
        costs = [] if memory is None else [f"{memory:.1f} MiB of KV memory a request"]
        costs += [f"{1 / speed:.1f} s a sample"] if speed else []
        return f"scores {one.score:.1f}" + (f" with {' and '.join(costs)}" if costs else "")
    if one.kept is None:
        return f"{at}scores {one.score:.1f}, with no full cache to hold it against"
    spread = "" if one.kept_low is None else f" {interval_text(one.kept_low, one.kept_high, 0)}"
    told = "significantly less" if one.kept < 100 else "significantly more"
    verdict = {True: f", {told}", False: ", not told apart", None: ""}[one.is_told_apart]
    costs = [] if one.memory is None else [f"{one.memory:.0f} % of the memory{_unfreed(one)}"]
    costs += [] if one.time is None else [f"{one.time:.0f} % of the time"]
    return f"{at}keeps {one.kept:.0f} %{spread} of the score{verdict}" + (f", with {', '.join(costs)}" if costs else "")


def _row(group: Group, one: Answer) -> list[Cell]:
    average = one.run.averages[0]
    kept = number_cell(one.kept, 0)
    interval = interval_text(one.kept_low, one.kept_high, 0)
    return [
        *key_cells(one.run, group),
        Cell(f"{one.score:.2f}", one.score, interval_text(average.ci_low, average.ci_high)),
        Cell(kept.text, kept.value, interval),
        number_cell(one.memory, 0),
        number_cell(one.time, 0),
    ]
