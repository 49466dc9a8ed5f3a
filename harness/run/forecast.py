"""How many runs a sweep has and about how long they take, printed before it begins."""

import itertools
from collections.abc import Sequence

from omegaconf import DictConfig

from harness.gpu_hours import Work, hours

TOKENS_PER_WORD = 1.4
USUAL_REQUESTS = 64  # at once, where the engine decides
# Mean words (code) or characters (Chinese) a row: LongBench, arXiv 2308.14508, table 1.
MEAN_LENGTHS = {
    "narrativeqa": 18409,
    "qasper": 3619,
    "multifieldqa_en": 4559,
    "multifieldqa_zh": 6701,
    "hotpotqa": 9151,
    "2wikimqa": 4887,
    "musique": 11214,
    "dureader": 15768,
    "gov_report": 8734,
    "qmsum": 10614,
    "multi_news": 2113,
    "vcsum": 15380,
    "trec": 5177,
    "triviaqa": 8209,
    "samsum": 6258,
    "lsht": 22337,
    "passage_count": 11141,
    "passage_retrieval_en": 9289,
    "passage_retrieval_zh": 6745,
    "lcc": 1235,
    "repobench-p": 4206,
}


def jobs(config: DictConfig) -> list[dict[str, str]]:
    """The overrides of every distinct run of a sweep, in order; runs of the full cache at several budgets are one.

    Args:
        config: as Hydra hands it to a callback, its own node included.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    given = [f"{key}={value}" for key, value in config.hydra.sweeper.params.items()] + list(config.hydra.overrides.task)
    choices: dict[str, list[str]] = {}
    for override in OverridesParser.create().parse_overrides(given):
        key = override.get_key_element()
        swept = override.is_discrete_sweep()
        choices[key] = list(override.sweep_string_iterator()) if swept else [override.get_value_element_as_str()]
    found = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    distinct = {tuple(sorted(_without_idle_budget(job).items())): job for job in reversed(found)}
    return list(reversed(distinct.values()))


def work(benchmark: DictConfig, max_model_len: int) -> Work | None:
    """What one run over a benchmark reads and writes at most; None where the rows are not known before loading."""
    from harness.benchmarks.generated import TASKS_OF
    from harness.benchmarks.longbench.tasks import PUBLISHED
    from harness.benchmarks.tasks import TASKS

    names = benchmark.tasks or TASKS_OF.get(benchmark.source) or tuple(PUBLISHED)
    if benchmark.source == "mini" or any(name not in TASKS for name in names):
        return None
    if benchmark.source in TASKS_OF:
        rows = (benchmark.limit or 0) * (benchmark.depths or 1)
        read = sum(rows * sum(benchmark.lengths) for _ in names)
        return Work(read, sum(rows * len(benchmark.lengths) * TASKS[name].max_new_tokens for name in names))
    if any(name not in MEAN_LENGTHS for name in names):
        return None
    wanted = [number for number in (benchmark.limit, benchmark.sample) if number is not None]
    rows = {name: min([TASKS[name].num_rows, *wanted]) for name in names}
    read = sum(rows[name] * min(MEAN_LENGTHS[name] * TOKENS_PER_WORD, max_model_len) for name in names)
    return Work(read, sum(rows[name] * TASKS[name].max_new_tokens for name in names))


def announcement(config: DictConfig) -> str:
    """The sentence that a sweep begins with."""
    found = jobs(config)
    total = _total_hours(config, found)
    estimate = "" if total is None else f", about {total:.1f} hours on one A100 (calculated, see harness.gpu_hours)"
    return f"{len(found)} runs{estimate}; a run that is finished is not made again"


def _total_hours(config: DictConfig, found: Sequence[dict[str, str]]) -> float | None:
    """Hours of all runs; None for models that run on CPU, and where rows are not known."""
    from hydra import compose

    costs: dict[tuple[str, ...], float | None] = {}
    total = 0.0
    for job in found:
        relevant = {key: value for key, value in job.items() if not key.startswith(("policy", "hydra", "tracker"))}
        key = tuple(f"{name}={value}" for name, value in relevant.items())
        if key not in costs:
            plain = compose(config.hydra.job.config_name, [*key]) if key else config
            model, of_run = plain.model, work(plain.benchmark, plain.model.max_model_len)
            known = of_run is not None and model.dtype != "float32"
            costs[key] = (
                hours(of_run, model.weights_gib, plain.engine.max_num_seqs or USUAL_REQUESTS) if known else None
            )
        if costs[key] is None:
            return None
        total += costs[key]
    return total


def _without_idle_budget(job: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in job.items() if key != "policy.budget"} if job.get("policy") == "full" else job
