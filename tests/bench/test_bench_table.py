"""What a load test prints says so where its figures are not of a load."""

from collections import defaultdict

import pytest

from harness.bench.summary import summarise
from harness.bench.table import print_summaries


def rows(alone_share, num_requests=8):
    known = {"label": "full", "policy": "full", "block_size": 32, "repeat": 0, "output_tok_s": 10.0}
    return [defaultdict(lambda: None, known, alone_share=alone_share, num_requests=num_requests)]


@pytest.mark.parametrize(
    ("alone_share", "num_requests", "warns"),
    [(0.49, 8, True), (0.2, 8, False), (1.0, 1, False), (None, 8, False)],
    ids=["half of the steps", "a fifth", "a single request", "stock, which counts no steps"],
)
def test_a_load_that_ran_one_request_at_a_time_is_named(capsys, alone_share, num_requests, warns):
    print_summaries("a test", summarise(rows(alone_share, num_requests)))
    printed = " ".join(capsys.readouterr().out.split())
    assert ("warning: full ran a single request in" in printed) == warns
