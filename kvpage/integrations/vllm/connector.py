"""What vLLM loads: a KV connector that has vLLM keep its cache in a kvpage pool, and, where a store is named, copies
finished blocks to it for the engines after this one (docs/vllm.md).

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
from kvpage.integrations.vllm.store_choice import StoreChoice, weights_salt, why_not_stored
from kvpage.integrations.vllm.store_scheduler import StoreScheduler
from kvpage.integrations.vllm.store_values import StoreReport, Transfers
from kvpage.integrations.vllm.store_worker import StoreWorker

log = logging.getLogger("vllm.kvpage")  # below vLLM's own, so that its settings count


class StepMetadata(KVConnectorMetadata):  # type: ignore[misc] # vLLM is not there where types are checked
    """What the scheduler tells the workers in each step."""

    def __init__(self, transfers: Transfers | None = None) -> None:
        self.transfers = transfers


class KvpageConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # the same
    """In a worker it holds the rank's pool from before the cache is allocated until `shutdown`. In the scheduler it
    holds no memory. With a store, finished blocks are kept there too, and found by the next engine."""

    _pool: EnginePool | None = None
    _store: StoreWorker | None = None
    _kept: StoreScheduler | None = None

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises `KvpageError` where the cache cannot be kept in a pool: the engine does not start then."""
        check_version(vllm.__version__)
        check_stays_awake(vllm_config.model_config)
        super().__init__(vllm_config, role, kv_cache_config)
        store = _store_of(vllm_config, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER and store is not None:
            self._kept = StoreScheduler.open(store, weights_salt(vllm_config, vllm.__version__, store))
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
            if store is not None:
                self._begin_keeping(planned, store)

    def _begin_keeping(self, planned: EnginePlan, store: StoreChoice) -> None:
        try:
            self._store = StoreWorker.open(planned, store)
        except BaseException:
            self.shutdown()
            raise
        log.info("finished blocks are kept in pool %r, at most %d", store.name, store.num_blocks - 1)

    # --- in a worker --------------------------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> Allocation | None:
        return None if self._pool is None else self._pool.allocation()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._pool is not None:
            self._pool.check_registered(kv_caches)
        if self._store is not None:
            self._store.register(kv_caches)

    def shutdown(self) -> None:
        for held in (self._store, self._kept, self._pool):
            if held is not None:
                held.close()
        self._store = self._kept = self._pool = None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._store is not None:
            self._store.load(self._get_connector_metadata().transfers)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        if self._store is not None:
            self._store.save(self._get_connector_metadata().transfers)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._store is None else self._store.take_failed()

    def build_connector_worker_meta(self) -> StoreReport | None:
        return None if self._store is None else self._store.report

    # --- in the scheduler ---------------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # nobody waits for what a request leaves behind

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return (0 if self._kept is None else self._kept.matched(request, num_computed_tokens)), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._kept is not None:
            self._kept.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return StepMetadata(None if self._kept is None else self._kept.transfers(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        if self._kept is not None and connector_output.kv_connector_worker_meta is not None:
            self._kept.reported(connector_output.kv_connector_worker_meta)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        if self._kept is not None:
            self._kept.finished(request)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        return self.request_finished(request, block_ids[0])


def _store_of(vllm_config: Any, kv_cache_config: Any) -> StoreChoice | None:
    """None, and said in the log, where one is asked for and cannot be."""
    choice = StoreChoice.of(vllm_config)
    why_not = None if choice is None else why_not_stored(vllm_config, kv_cache_config)
    if why_not is not None:
        log.warning("finished blocks are not kept: %s", why_not)
        return None
    return choice


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
