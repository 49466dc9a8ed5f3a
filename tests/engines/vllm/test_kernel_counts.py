"""How many kernels a step of decoding costs beside the forward pass, counted on meta tensors.

Views and allocations launch nothing. The counts are those of one slice of layers (`slices.py`): what is too large to be
done at once takes as many for each slice.
"""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.engines.vllm.compaction import Victim
from harness.engines.vllm.plan import Eviction
from policies import Phase, Unit
from tests.engines.vllm.test_gpu_syncs import BLOCK, VARIANTS, build, step

pytestmark = pytest.mark.usefixtures("copies_as_on_a_gpu")
AT_MOST = 40
MORE = {  # of what is no default
    ("paged_eviction", "decode_scope"): 45,
    ("streaming_llm", "position_mode"): 64,
    ("cascading", "choice"): 50,
}
CASES = [*VARIANTS, ("cascading", {"protect_first": 4, "choice": "attention"})]


class CountKernels(TorchDispatchMode):
    """Counts what a GPU would launch, by name."""

    def __init__(self):
        super().__init__()
        self.kernels = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._can_decompose() and func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not is_view and name not in ("empty", "new_empty", "empty_like", "lift_fresh", "detach_"):
            self.kernels[name] += 1
        return result


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_an_eviction_while_decoding_takes_few_kernels(name, options):
    with torch.inference_mode():
        engine = build(name, options)
        policy = engine.compactor._policy
        if policy.decode_unit is Unit.NONE:
            return
        num_before = policy.budget + (BLOCK if policy.decode_unit is Unit.BLOCK else 1)
        step(engine, [num_before] * 3, num_new=num_before, prefilling=True)
        step(engine, [num_before] * 3, num_new=1, prefilling=False)
        eviction = Eviction(Phase.DECODE, num_before, policy.budget, 2 * num_before)
        victims = [Victim(f"r{index}", eviction, range(-(-num_before // BLOCK))) for index in range(3)]
        engine.compactor.evict(victims)  # what is made once
        with CountKernels() as count:
            engine.compactor.evict(victims)
    at_most = next((more for (policy, option), more in MORE.items() if policy == name and option in options), AT_MOST)
    assert count.kernels.total() <= at_most, (count.kernels.total(), count.kernels)
