"""The short form of `make soak`."""

import pytest

from tests.engines.vllm.soak import SoakReport, soak_round


@pytest.mark.parametrize(
    ("seed", "name"),
    [
        (1, "paged_eviction"),
        (2, "h2o"),
        pytest.param(3, "snapkv", marks=pytest.mark.parity),
        pytest.param(4, "full", marks=pytest.mark.parity),
        (5, "kv_compress"),
        (6, "sentencekv"),
        pytest.param(7, "quest", marks=pytest.mark.parity),
        pytest.param(8, "mix_attention", marks=pytest.mark.parity),
    ],
)
def test_random_load_leaks_and_loses_nothing(tiny_model, seed, name):
    report = SoakReport()
    soak_round(seed, name, tiny_model, num_requests=25, report=report)
    assert report.counts["finished"] + report.counts["aborted"] == 25
    assert report.counts["compared"] > 0
    assert report.counts["differing"] == 0
