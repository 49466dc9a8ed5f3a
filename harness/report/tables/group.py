"""All tables of one group of runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.report.reading.runs import Group
from harness.report.tables.answer import Answer, answer_table, find_answers
from harness.report.tables.costs import memory_table, speed_table
from harness.report.tables.differences import difference_tables, find_differences
from harness.report.tables.grid import Table, folded
from harness.report.tables.scores import accuracy_table, own_averages_table, papers_table


@dataclass(frozen=True)
class GroupTables:
    """The tables of one group, in the order in which they are shown.

    Attributes:
        answers: what the first figure, the sentences and the first table say.
        scores: all tasks, then as the field prints them: the papers' 16 tasks, LongBench's own averages.
        costs: memory, speed.
    """

    answers: Sequence[Answer]
    answer: Table
    scores: Sequence[Table]
    differences: Sequence[Table]
    costs: Sequence[Table]

    @property
    def all(self) -> list[Table]:
        """Every table, in order."""
        return [self.answer, *self.scores, *self.differences, *self.costs]


def group_tables(group: Group) -> GroupTables:
    """Everything about one group; runs are compared once."""
    differences = find_differences(group)
    answers = find_answers(group, differences)
    scores = [accuracy_table(group), papers_table(group), own_averages_table(group)]
    return GroupTables(
        answers=answers,
        answer=answer_table(group, answers),
        scores=[table for table in scores if table is not None],
        differences=[folded(table) for table in difference_tables(group, differences)],
        costs=[folded(memory_table(group)), folded(speed_table(group))],
    )
