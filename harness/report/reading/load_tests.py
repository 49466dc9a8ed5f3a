"""Load tests as the report sees them: what `bench.json` must hold, read from the folders of `harness.bench`.

`bench.json` is a list of objects, one a repeat of one setting, with the fields of `BenchRow` as keys. Times are
seconds, rates are per second of the timed part without warm-up, blocks are KV blocks of vLLM's pool. Keys without a
default are required; other keys are left alone, so that a load test may record more than the report shows. The load
test's own settings come from the `bench_manifest.json` beside it, if there is one.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from harness.errors import UserError
from harness.report.reading.runs import FULL_CACHE_POLICY, find_folders

FILE_NAME = "bench.json"
MANIFEST = "bench_manifest.json"
SHORT_DIGEST = 10


@dataclass(frozen=True)
class BenchRow:
    """One repeat of one setting.

    Attributes:
        model, policy: names, as in a run's configuration; `variant` tells settings of one policy apart.
        budget: tokens, or below 1 the share of each prompt; None for the full cache.
        block_size: tokens a KV block.
        repeat: number of the repeat; repeats with one number ran side by side and are compared with each other.
        num_requests, input_tokens, output_tokens: the load; token counts are means a request.
        output_tok_s, total_tok_s: answer tokens, prompt and answer tokens a second.
        ttft_*, tpot_*, itl_*, e2e_*: seconds to the first token, a token after the first, between tokens, to the end.
        peak_blocks, mean_blocks, peak_prefill_blocks: KV blocks in use: at most, over time, at most in steps that read
            prompts.
        bytes_per_block: of all layers.
        eviction_time_s, duration_s: spent in evictions, of the timed part.
        device: GPU or CPU model.
        load_test: name of the load test, unique in the report; only rows of one are compared.
        request_rate: requests a second, None for all at once.
        conditions: precision, weights, engine settings and code of the load test in words, "" if not recorded.
    """

    model: str
    policy: str
    budget: float | None
    block_size: int
    repeat: int
    output_tok_s: float
    total_tok_s: float
    variant: str = ""
    num_requests: int | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    ttft_p50: float | None = None
    ttft_p90: float | None = None
    ttft_p99: float | None = None
    tpot_p50: float | None = None
    tpot_p90: float | None = None
    tpot_p99: float | None = None
    itl_p50: float | None = None
    itl_p90: float | None = None
    itl_p99: float | None = None
    e2e_p50: float | None = None
    e2e_p90: float | None = None
    e2e_p99: float | None = None
    peak_blocks: int | None = None
    mean_blocks: float | None = None
    peak_prefill_blocks: int | None = None
    bytes_per_block: int | None = None
    num_preemptions: int | None = None
    num_evictions: int | None = None
    eviction_time_s: float | None = None
    duration_s: float | None = None
    device: str = ""
    load_test: str = ""
    request_rate: float | None = None
    conditions: str = ""

    @property
    def shared(self) -> tuple[Any, ...]:
        """What rows have in common that are compared with each other; they differ in policy and budget."""
        return self.load_test, self.model, self.device, self.load, self.block_size

    @property
    def series(self) -> str:
        """Policy and variant: rows of one series differ in budget, block size and load only."""
        return f"{self.policy} ({self.variant})" if self.variant else self.policy

    @property
    def load(self) -> str:
        """The load in words, "" if it was not recorded."""
        if None in (self.num_requests, self.input_tokens, self.output_tokens):
            return ""
        rate = "" if self.request_rate is None else f", {self.request_rate:g} a second"
        return f"{self.num_requests} × {self.input_tokens:.0f} in, {self.output_tokens:.0f} out{rate}"


@dataclass(frozen=True)
class BenchSetting:
    """All repeats of one setting in one load test, and those of the full cache in the same one."""

    rows: Sequence[BenchRow]
    full: Sequence[BenchRow]

    def median(self, field: str) -> float | None:
        """Median of a field over the repeats, None if none recorded it."""
        values = [getattr(row, field) for row in self.rows if getattr(row, field) is not None]
        return median(values) if values else None

    def ratios(self, field: str) -> list[float]:
        """The field divided by that of the full cache, for every repeat that both have."""
        full = {row.repeat: getattr(row, field) for row in self.full}
        values = [(getattr(row, field), full.get(row.repeat)) for row in self.rows]
        return [value / reference for value, reference in values if value is not None and reference]


def read_bench(paths: Sequence[Path]) -> list[BenchRow]:
    """Every row of every load test at or below `paths`.

    Raises:
        UserError: a path does not exist, or a file is no list of rows.
    """
    tests = [(folder / FILE_NAME, _read_test(folder)) for folder in find_folders(paths, FILE_NAME)]
    seen: Counter[str] = Counter()
    rows = []
    for path, test in tests:
        seen[test["load_test"]] += 1
        count = seen[test["load_test"]]
        named = test if count == 1 else test | {"load_test": f"{test['load_test']} ({count})"}
        rows += _read_rows(path, named)
    return rows


def settings(rows: Sequence[BenchRow]) -> list[BenchSetting]:
    """Put repeats of one load test together: by `shared`, the full cache first, then by budget and policy."""
    grouped: dict[tuple[Any, ...], list[BenchRow]] = {}
    for row in rows:
        grouped.setdefault((row.shared, row.budget or 0, row.series), []).append(row)
    full = {key[0]: members for key, members in grouped.items() if members[0].policy == FULL_CACHE_POLICY}
    return [BenchSetting(members, full.get(key[0], [])) for key, members in sorted(grouped.items())]


def _read_test(folder: Path) -> dict[str, Any]:
    """What the rows of a load test have in common: its name, its request rate and its conditions."""
    path = folder / MANIFEST
    if not path.exists():
        return {"load_test": folder.name}
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        config = manifest["config"]
        num_sessions = len(manifest.get("sessions", []))
        state = manifest["status"] if num_sessions < 2 else f"{manifest['status']} in {num_sessions} sessions"
        return {
            "load_test": manifest["run_id"],
            "request_rate": config["load"]["request_rate"],
            "conditions": ", ".join([*_words(config), f"code {manifest['code_sha256'][:SHORT_DIGEST]}", state]),
        }
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path} is no manifest of a load test ({error}). Run the load test again, or leave its folder out."
        ) from None


def _words(config: dict[str, Any]) -> list[str]:
    weights = "random weights" if config["load_format"] == "dummy" else "the model's weights"
    engine = {key: value for key, value in config["engine"].items() if value is not None and key != "block_size"}
    engine["engine"] = engine.pop("name")
    return [config["model"]["dtype"], weights, *(f"{key}={value}" for key, value in sorted(engine.items()))]


def _read_rows(path: Path, test: dict[str, Any]) -> list[BenchRow]:
    known = {field.name for field in fields(BenchRow)}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return [BenchRow(**{key: value for key, value in row.items() if key in known} | test) for row in content]
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is no list of load-test rows ({error}). Run the load test again, or leave its folder out."
        ) from None
