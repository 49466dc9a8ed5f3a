"""What every evicting worker can be asked, on both platforms."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.engines.vllm.runner import EvictionRunning


class EvictionReporting:
    """Mixin of methods that the front end calls on every worker through `collective_rpc`."""

    model_runner: "EvictionRunning"

    def record_resident(self) -> None:
        """Write down what is resident of every request that is left; called when the engine is idle."""
        self.model_runner.record_resident()

    def eviction_seconds(self) -> float:
        """Host seconds this worker spent evicting.

        Raises:
            RuntimeError: a policy gave scores that are not finite, so its choices were arbitrary.
        """
        compactor = self.model_runner.compactor
        if compactor is None:
            return 0.0
        if not compactor.scores_were_finite:
            name = self.model_runner.eviction_policy.name
            raise RuntimeError(f"policy {name} gave scores that are not finite; its choices are arbitrary")
        return compactor.seconds
