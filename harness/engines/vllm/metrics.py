"""Prometheus metrics of a stock `vllm serve` (entry point `vllm.stat_logger_plugins`)."""

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from harness.engines.vllm.counters import CounterFile, Counters, forget_name
from harness.engines.vllm.settings import CONFIG_KEY

TOTALS = {
    "num_evictions": Counter("vllm_kv_eviction_evictions", "Evictions carried out.", ["engine"]),
    "num_evicted_tokens": Counter("vllm_kv_eviction_evicted_tokens", "Tokens evicted from each layer.", ["engine"]),
    "num_preemptions": Counter("vllm_kv_eviction_preemptions", "Requests preempted.", ["engine"]),
}
RESIDENT = Gauge("vllm_kv_eviction_resident_blocks", "KV blocks held by requests now.", ["engine"])
POOL = Gauge("vllm_kv_eviction_pool_blocks", "KV blocks of the pool.", ["engine"])
BAD_SCORES = Gauge(
    "vllm_kv_eviction_bad_scores", "1 once the policy gave scores that are not finite: its choices are arbitrary.",
    ["engine"],
)  # fmt: skip


class EvictionStatLogger(StatLoggerBase):
    """Publishes what the scheduler wrote to its counter file; does nothing for an engine without the plugin."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        settings = (vllm_config.additional_config or {}).get(CONFIG_KEY) or {}
        path = settings.get("counters")
        self._path = path
        self._file = CounterFile(path) if path else None
        self._engine = str(engine_index)
        self._last = Counters()

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Called by vLLM after every step; the arguments hold nothing about evictions."""
        if self._file is None:
            return
        now = self._file.read()
        for name, counter in TOTALS.items():
            counter.labels(self._engine).inc(max(getattr(now, name) - getattr(self._last, name), 0))
        RESIDENT.labels(self._engine).set(now.resident_blocks)
        POOL.labels(self._engine).set(now.num_blocks)
        BAD_SCORES.labels(self._engine).set(now.bad_scores)
        self._last = now

    def log_engine_initialized(self) -> None:
        """All processes have opened the counter file by now."""
        if self._path:
            forget_name(self._path)
