"""What vLLM loads: a KV connector that moves no bytes, and has vLLM keep its cache in a kvpage pool (docs/vllm.md).

vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvpageConnector", "kv_role": "kv_both",
  "kv_connector_module_path": "kvpage.integrations.vllm"}'
"""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvpage.errors import KvpageError
from kvpage.integrations.vllm.engine_checks import RankAnswer, check_ranks, check_stays_awake, check_version
from kvpage.integrations.vllm.engine_plan import EnginePlan, engine_plan
from kvpage.integrations.vllm.engine_pool import Allocation, EnginePool, PoolChoice

log = logging.getLogger("vllm.kvpage")  # below vLLM's own, so that its settings count


class Nothing(KVConnectorMetadata):  # type: ignore[misc] # vLLM is not there where types are checked
    """What the scheduler tells the workers in each step."""


class KvpageConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # the same
    """In a worker it holds the rank's pool from before the cache is allocated until `shutdown`. In the scheduler it
    holds nothing, and knows of no tokens that others have computed."""

    _pool: EnginePool | None = None

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises `KvpageError` where the cache cannot be kept in a pool: the engine does not start then."""
        check_version(vllm.__version__)
        check_stays_awake(vllm_config.model_config)
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.WORKER:
            choice = PoolChoice.of(vllm_config)
            planned = _agreed_plan(vllm_config, kv_cache_config)
            self._pool = EnginePool.open(planned, choice)
            log.info(
                "the KV cache, %d blocks in %d bytes, goes to pool %r on %s (plan %s)",
                planned.plan.num_blocks,
                planned.plan.buffer_size_bytes,
                choice.name,
                choice.device,
                planned.plan.plan_id,
            )

    # --- in a worker --------------------------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> Allocation | None:
        return None if self._pool is None else self._pool.allocation()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._pool is not None:
            self._pool.check_registered(kv_caches)

    def shutdown(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    # --- in the scheduler ---------------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # nobody waits for what a request leaves behind

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Nothing:
        return Nothing()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        return False, None


def _agreed_plan(vllm_config: Any, kv_cache_config: Any) -> EnginePlan:
    """This rank's plan, once all ranks have one and a block id means the same on each. None waits for one that failed:
    each says so first."""
    layers = vllm_config.compilation_config.static_forward_context
    backends = {name: layer.get_attn_backend() for name, layer in layers.items() if hasattr(layer, "get_attn_backend")}
    rank = vllm_config.parallel_config.rank
    try:
        planned = engine_plan(kv_cache_config, backends)
    except KvpageError as error:
        _answers(vllm_config, RankAnswer(rank, 0, (), refusal=error.message))
        raise
    check_ranks(_answers(vllm_config, RankAnswer.of(rank, planned.plan)))
    return planned


def _answers(vllm_config: Any, mine: RankAnswer) -> list[RankAnswer]:
    """Of all ranks."""
    if vllm_config.parallel_config.world_size == 1:
        return [mine]
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    answers: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(answers, mine, group=group.cpu_group)
    return answers
