"""How a budget is written."""

import pytest

from harness.budget import budget_text, check_budget, parse_budget, warn_of_idle_policy


@pytest.mark.parametrize(
    ("given", "budget", "text"),
    [
        (None, None, ""),
        (512, 512, "512"),
        (1, 1, "100 %"),
        (0.25, 0.25, "25 %"),
        ("25%", 0.25, "25 %"),
        ("7.5 %", 0.075, "7.5 %"),
        ("12.3%", 0.123, "12.3 %"),
        ("100%", 1.0, "100 %"),
        (1.0, 1.0, "100 %"),
    ],
)
def test_budgets_are_read_as_papers_write_them(given, budget, text):
    found = parse_budget(given)
    assert found == budget
    assert type(found) is type(budget)
    assert budget_text(found) == text


@pytest.mark.parametrize(
    "given", [0.0, -0.1, 1.5, 512.0, "0%", "-5%", "150%", "abc%", "%", "1/0%", "many", "512", True, [512]]
)
def test_other_budgets_are_refused_by_what_was_given(given):
    with pytest.raises(ValueError, match=r"is neither a whole number of tokens nor a share of each prompt") as error:
        parse_budget(given, "the budget")
    assert str(error.value).startswith(f"the budget={given!r} ")


def test_a_share_fits_blocks_of_any_size(capsys):
    check_budget("h2o", 0.25, 32)
    warn_of_idle_policy("h2o", 0.25, 1024)
    assert capsys.readouterr().err == ""
    warn_of_idle_policy("h2o", 1.0, 1024)
    assert "policy.budget=100% keeps every prompt whole" in capsys.readouterr().err
