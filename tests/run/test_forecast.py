"""How many runs a sweep has and how long it takes, said beforehand."""

import pytest
from hydra import compose, initialize_config_module

from harness.config import register_schema
from harness.gpu_hours import START_S, Work, hours
from harness.run.forecast import announcement, jobs, work


@pytest.fixture(scope="module")
def composed():
    register_schema()
    with initialize_config_module(version_base="1.3", config_module="conf"):

        def compose_with(*overrides):
            config = compose("config", list(overrides), return_hydra_config=True)
            config.hydra.job.config_name = "config"
            return config

        yield compose_with


def test_the_papers_accuracy_is_78_runs_and_says_so(composed):
    config = composed("experiment=paper_accuracy")
    found = jobs(config)
    assert len(found) == 3 * (5 * 5 + 1)
    assert sum(job["policy"] == "full" for job in found) == 3
    text = announcement(config)
    assert text.startswith("78 runs, about ")
    assert 5 < float(text.split()[3]) < 50


def test_the_command_line_narrows_a_sweep(composed):
    config = composed("experiment=paper_accuracy", "policy=full", "model=llama3.2-1b")
    assert jobs(config) == [{"model": "llama3.2-1b", "policy": "full", "policy.budget": "256"} | jobs(config)[0]]
    assert len(jobs(composed("experiment=retrieval", "policy.budget=192"))) == 8


def test_a_model_on_cpu_has_no_hours(composed):
    config = composed("experiment=retrieval")
    assert config.record_retention
    assert announcement(config).startswith("8 runs; ")


def test_rows_and_lengths_make_the_work(composed):
    ruler = composed(
        "benchmark=ruler", "benchmark.lengths=[1000,3000]", "benchmark.limit=10", "benchmark.tasks=[ruler_vt]"
    )
    assert work(ruler.benchmark, 8192) == Work(40_000, 600)
    cut = composed("benchmark=longbench", "benchmark.tasks=[lsht]", "+benchmark.limit=5")
    assert work(cut.benchmark, 2000) == Work(10_000, 320)
    assert work(composed("benchmark=longbench_mini").benchmark, 8192) is None


def test_hours_grow_with_the_model_and_the_tokens():
    base = hours(Work(1e6, 1e5), 2.0, 16)
    assert base > START_S / 3600
    start = START_S / 3600
    assert hours(Work(2e6, 2e5), 2.0, 16) - start == pytest.approx(2 * (base - start))
    assert hours(Work(1e6, 1e5), 4.0, 16) - start == pytest.approx(2 * (base - start))
    assert hours(Work(0, 1e5), 2.0, 32) - start == pytest.approx((hours(Work(0, 1e5), 2.0, 16) - start) / 2)
