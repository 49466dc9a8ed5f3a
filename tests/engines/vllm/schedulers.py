"""Real schedulers on a real cache manager, without a model: outputs are made up as a worker would send them."""

import torch
from vllm import EngineArgs, SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from harness.engines.vllm.arguments import EngineShape, eviction_arguments, stock_arguments
from harness.engines.vllm.kv_cache import EvictingAttentionSpec
from harness.engines.vllm.scheduler import EvictionScheduler
from harness.engines.vllm.settings import EvictionSettings

LAYERS = ["one", "two"]
EOS, TOKEN = 2, 5


def build_scheduler(
    shape: EngineShape, settings: EvictionSettings | None, num_blocks: int, prefix_caching: bool = False
) -> Scheduler:
    """A scheduler of an engine of this shape, stock without settings."""
    arguments = stock_arguments(shape) if settings is None else eviction_arguments(shape, settings)
    config = EngineArgs(**arguments | {"enable_prefix_caching": prefix_caching}).create_engine_config()
    config.cache_config.num_gpu_blocks = num_blocks
    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=shape.block_size, num_kv_heads=2, head_size=32, dtype=torch.float32)
    if settings is not None:
        spec = EvictingAttentionSpec.from_full(spec, None, settings.build_policy(shape.block_size))
    size = spec.page_size_bytes * num_blocks * len(LAYERS)
    tensor = KVCacheTensor(size=size, layers=LAYERS, layer_stride=0, block_stride=0)
    cache = KVCacheConfig(num_blocks, [tensor], [KVCacheGroupSpec(LAYERS, spec)])
    kind = Scheduler if settings is None else EvictionScheduler
    return kind(config, cache, StructuredOutputManager(config), block_size=shape.block_size)


def add_request(
    scheduler: Scheduler, name: str, num_prompt: int, max_tokens: int, prompt: list[int] | None = None
) -> None:
    """A request that ends with its last token only; `prompt`: its tokens, if it is to be found in the prefix cache."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    params.update_from_generation_config({}, EOS)
    hasher = None if prompt is None else get_request_block_hasher(scheduler.block_size, sha256)
    tokens = [TOKEN] * num_prompt if prompt is None else prompt
    scheduler.add_request(Request(name, tokens, params, pooling_params=None, block_hasher=hasher))


def answer(scheduler: Scheduler, output: SchedulerOutput) -> dict[str, int]:
    """Hand in one token for every request whose tokens have all been computed.

    Returns:
        Tokens that came out, by request.
    """
    names = list(output.num_scheduled_tokens)
    tokens = []
    for name in names:
        request = scheduler.requests[name]
        tokens.append([TOKEN] if request.num_computed_tokens >= request.num_tokens else [])
    places = {name: index for index, name in enumerate(names)}
    scheduler.update_from_output(
        output, ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=tokens)
    )
    return {name: len(new) for name, new in zip(names, tokens, strict=True)}
