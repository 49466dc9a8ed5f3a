"""The worker's own functions, as far as they need no kvpress; `make peer-check` runs the rest."""

import ast
from types import SimpleNamespace

import pytest
import torch

from harness.engines.kvpress import worker
from harness.engines.kvpress.process import WORKER

ALLOWED = {"torch", "transformers", "kvpress"}


def test_the_worker_imports_nothing_that_its_environment_lacks():
    found = set()
    for node in ast.walk(ast.parse(WORKER.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    assert found - ALLOWED <= set(__import__("sys").stdlib_module_names)
    assert found >= ALLOWED


def test_the_ratio_keeps_exactly_the_budget():
    for num_tokens in (33, 64, 100, 1023, 4097, 131071, 1048573):
        for num_kept in {1, 2, 32, num_tokens // 3, num_tokens // 2, num_tokens - 1}:
            assert int(num_tokens * (1 - worker.ratio_removed(num_tokens, num_kept))) == num_kept


def test_kept_positions_are_found_by_the_keys():
    keys = torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    kept = torch.stack([keys[0, 0, [5, 0, 2]], keys[0, 1, [1, 3, 4]]])[None]
    assert worker.kept_positions(keys, kept) == [[0, 2, 5], [1, 3, 4]]
    assert worker.kept_positions(keys.bfloat16(), kept.bfloat16()) == [[0, 2, 5], [1, 3, 4]]


@pytest.mark.parametrize("spoil", ["equal keys", "changed key"])
def test_positions_that_keys_do_not_tell_are_refused(spoil):
    keys = torch.randn(1, 1, 4, 2, generator=torch.Generator().manual_seed(0))
    kept = keys[:, :, :2].clone()
    if spoil == "equal keys":
        keys[0, 0, 3] = keys[0, 0, 1]
    else:
        kept[0, 0, 0, 0] += 1
    with pytest.raises(RuntimeError, match="no positions to record"):
        worker.kept_positions(keys, kept)


class Obedient:
    compression_ratio = 0.0


class ReadOnly:
    @property
    def compression_ratio(self):
        return 0.0


@pytest.mark.parametrize(("press", "takes"), [(Obedient(), True), (ReadOnly(), False), (SimpleNamespace(), False)])
def test_only_presses_with_a_ratio_of_their_own_can_hold_a_budget(press, takes):
    assert worker.takes_ratio(press) is takes
