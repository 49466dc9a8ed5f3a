"""The checks of `make gpu-check` in bfloat16, on CPU in a box, short and few: they pass, and they can fail."""

from dataclasses import replace

import pytest

from tests.engines.vllm.box import Box, in_a_box
from tests.gpu.bfloat16 import check, requests_of, two_ways
from tests.gpu.near_ties import NEAR, Answer, Answers, compare, parting

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    ["keydiff in chunks", *(pytest.param(name, marks=pytest.mark.parity) for name in ("h2o", "streaming_llm"))],
)
def test_the_checks_pass_in_a_box(shape, name):
    bfloat16 = replace(shape, dtype="bfloat16", block_size=16, num_kv_blocks=600, max_num_batched_tokens=1024)
    with in_a_box(Box(graphs=True)):
        alone, together = two_ways(bfloat16, name, requests_of([100, 300, 450, 700], 24), graphs=False)
    assert "of 4 texts equal" in check(name, alone, together)
    broken = replace_answer(together, "r1", Answer([5] * 24, [9.0] * 24))
    with pytest.raises(AssertionError, match="apart: r1 at token 0"):
        check(name, alone, broken)
    if together.recomputed is not None:
        assert together.recomputed.num_compared > 100
        together.recomputed.wrong.append(("r1", 0, 0, [7]))
        with pytest.raises(AssertionError, match=r"1 of .* choices are not those of the CPU, the first: .'r1', 0, 0"):
            check(name, alone, together)


def replace_answer(answers, name, answer):
    return replace(answers, answers={**answers.answers, name: answer})


def test_where_texts_part():
    one = Answer([1, 2, 3], [9.0, NEAR / 2, 9.0])
    assert parting(one, one) is None
    assert parting(one, Answer([1, 4, 3], [9.0, 8.0, 9.0])) == (1, NEAR / 2)
    assert parting(one, Answer([1, 2], [9.0, 9.0]))[0] == 2
    note, apart = compare(Answers({"a": one, "b": one}), Answers({"a": one, "b": Answer([2, 2, 3], [9.0, 9.0, 9.0])}))
    assert note == "1 of 2 texts equal, 0 part at a near-tie"
    assert apart == ["b at token 0, lead 9.000"]
