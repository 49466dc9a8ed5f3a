"""KV-cache eviction policies: what to keep. Pure torch; nothing here knows an engine or a data set."""

from policies.base import Phase, Policy, Signal, Unit, View
from policies.registry import available_policies, build_policy

__all__ = ["Phase", "Policy", "Signal", "Unit", "View", "available_policies", "build_policy"]
