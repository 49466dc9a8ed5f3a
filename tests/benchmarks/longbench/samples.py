"""Samples of the right shape for any task, and random texts."""

from hypothesis import strategies as st

from harness.benchmarks.task import Task

TEXT = st.lists(st.sampled_from(["a", "the", "cat", "sat", "Mat", " ", " ", ".", "\n", "7"]), max_size=40).map("".join)


def example_sample(task: Task) -> tuple[list[str], list[str] | None]:
    """Answers and classes as a row of the task has them."""
    answer = {"retrieval": "Paragraph 12", "retrieval_zh": "段落12", "count": "12"}.get(task.metric, "Paris")
    return [answer], [answer, "London"] if task.metric == "classification" else None
