"""What every evicting worker can be asked, on both platforms, and what it says on its own."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from harness.engines.vllm.counters import CounterFile
from harness.engines.vllm.score_check import ScoreWatch
from harness.engines.vllm.settings import read_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

    from harness.engines.vllm.runner import EvictionRunning

logger = init_logger(f"vllm.{__name__}")


class EvictionReporting:
    """Mixin over a vLLM worker; the front end calls its own methods on every worker through `collective_rpc`."""

    model_runner: "EvictionRunning"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        counters = read_settings(self.vllm_config).counters
        here = counters is not None and Path(counters).exists()  # a worker on another machine has no such file
        self._counters = CounterFile(counters) if here else None
        self._watch = ScoreWatch()

    def execute_model(self, scheduler_output: "SchedulerOutput") -> Any:
        """As stock; now and then look whether the policy's scores are finite."""
        output = super().execute_model(scheduler_output)
        compactor = self.model_runner.compactor
        if compactor is not None and self._watch.look(compactor.finite):
            logger.error("%s", self._bad_scores())
            if self._counters is not None:
                self._counters.report_bad_scores()
        return output

    def record_resident(self) -> None:
        """Write down what is resident of every request that is left; called when the engine is idle."""
        self.model_runner.record_resident()

    def eviction_seconds(self) -> tuple[float, float]:
        """Host seconds this worker spent evicting and watching attention for it; and of those, while decoding.

        Raises:
            RuntimeError: a policy gave scores that are not finite, so its choices were arbitrary.
        """
        compactor = self.model_runner.compactor
        if compactor is None:
            return 0.0, 0.0
        if not compactor.scores_were_finite:
            raise RuntimeError(self._bad_scores())
        return compactor.host_seconds

    def kept_tokens(self) -> dict[str, Any] | None:
        """`KeptCounts.read` of this worker's heads; None where all keep equally many."""
        counts = getattr(self.model_runner.compactor, "kept_counts", None)
        return None if counts is None else counts.read()

    def read_tokens(self) -> dict[str, Any] | None:
        """`Reading.counts` of this worker's heads, plain data; None where everything is read."""
        reading = getattr(self.model_runner, "reading", None)
        counts = None if reading is None else reading.counts()
        return None if counts is None else asdict(counts)

    def _bad_scores(self) -> str:
        name = self.model_runner.eviction_policy.name
        return f"policy {name} gave scores that are not finite; its choices are arbitrary"


def is_ragged(vllm_config: "VllmConfig") -> bool:
    """Whether the engine's policy needs a page table for each layer and head."""
    policy = read_settings(vllm_config).build_policy(vllm_config.cache_config.block_size)
    return policy.by_page
