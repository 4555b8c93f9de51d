"""Everything that vLLM's own unit tests look at in a block pool, asked of vLLM's and of ours. Runs where vLLM is.

The questions are those of vLLM's tests/v1/core/test_prefix_caching.py, in its order of things: a prompt, a second one
that shares its prefix, what is evicted and in which order, a reset; then the pool by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from vllm.v1.core.block_pool import BlockPool as StockBlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler

from kvproof.backend.integrations.vllm import PoolScheduler
from kvproof.backend.integrations.vllm.pool import BlockPool
from kvproof.fuzz.machines.vllm_engine import Ask, Shape, make

SHAPE = Shape(num_blocks=11, events=True)
PLUGIN = "kvproof.backend.integrations.vllm.pool_tests"


def pool_answers_as_vllms() -> None:
    """Below vLLM's manager, and alone: every answer is vLLM's."""
    managers = [make(kind, SHAPE).kv_cache_manager for kind in (StockScheduler, PoolScheduler)]
    pools = [kind(8, enable_caching=True, hash_block_size=4) for kind in (StockBlockPool, BlockPool)]
    assert [type(manager.block_pool) for manager in managers] == [StockBlockPool, BlockPool]
    for ask, (stock, ours) in ((ask_manager, managers), (ask_pool, pools)):
        for right, answer in zip(ask(stock), ask(ours), strict=True):
            assert answer == right, f"vLLM's: {right}, ours: {answer}"


def vllms_tests_get_our_pool() -> None:
    """The plugin for vLLM's own tests puts our pool wherever vLLM's was."""
    users = [module for module in list(sys.modules.values()) if vars(module).get("BlockPool") is StockBlockPool]
    names = {module.__name__ for module in users}
    assert {"vllm.v1.core.block_pool", "vllm.v1.core.kv_cache_coordinator"} <= names, names
    before = [(module, vars(module)["BlockPool"]) for module in users]
    sys.modules.pop(PLUGIN, None)
    try:
        __import__(PLUGIN)
        left = {module.__name__ for module, _ in before if vars(module)["BlockPool"] is not BlockPool}
        assert left == {"kvproof.backend.integrations.vllm.seam"}, left
        manager = make(StockScheduler, SHAPE).kv_cache_manager
        assert type(manager.block_pool) is type(manager.coordinator.block_pool) is BlockPool
    finally:
        for module, pool in before:
            module.BlockPool = pool  # type: ignore[attr-defined]


def look(pool: Any, in_order: bool = True) -> dict[str, Any]:
    """All that can be seen of a pool. A free block that loses its content keeps its place in vLLM's queue only."""
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    return {
        "free": free if in_order else sorted(free),
        "numbers of free blocks": (pool.free_block_queue.num_free_blocks, pool.get_num_free_blocks()),
        "usage": pool.get_usage(),
        "cached": len(pool.cached_block_hash_to_block),
        "references": [block.ref_cnt for block in pool.blocks[1:]],  # vLLM counts the null block's too, and so what
        "hashes": [(block.block_id, block.block_hash, block.block_hash_num_tokens) for block in pool.blocks],
        "null": (pool.null_block.block_id, pool.null_block.is_null, [b.is_null for b in pool.blocks].count(True)),
        "sizes": (pool.num_gpu_blocks, pool.hash_block_size, pool.enable_caching),
        "events": pool.take_events(),
    }


def ask_manager(manager: Any) -> Iterator[Any]:
    """Requests through `KVCacheManager`, as `test_prefill` and its neighbours send them."""
    pool, group = manager.block_pool, manager.coordinator.single_type_managers[0]
    prompts = {"0": tuple(range(15)), "1": (*range(13), 7, 7, 7), "2": tuple(range(50, 66)), "3": tuple(range(13))}
    requests = {name: Ask(name, prompt).request(SHAPE) for name, prompt in prompts.items()}

    def tables() -> dict[str, list[int]]:
        return {name: [block.block_id for block in blocks] for name, blocks in group.req_to_blocks.items() if blocks}

    def admit(name: str) -> Any:
        request = requests[name]
        found, num_found = manager.get_computed_blocks(request)[:2]
        given = manager.allocate_slots(request, request.num_tokens - num_found, num_found, found)
        ids = None if given is None else given.get_block_ids()
        return [block.block_id for block in found.blocks[0]], num_found, ids, tables(), look(pool)

    yield look(pool)
    yield admit("0")
    yield admit("1")
    yield [block.ref_cnt for block in manager.get_blocks("1").blocks[0]], manager.get_block_ids("1")
    yield manager.reset_prefix_cache(), look(pool)  # refused
    manager.free(requests["0"])
    yield tables(), look(pool)
    manager.free(requests["1"])
    yield tables(), look(pool)
    yield admit("2")
    yield admit("3")  # of a prefix that nobody references
    manager.evict_blocks({1, 2})
    yield look(pool)
    manager.free(requests["3"])
    manager.free(requests["2"])
    yield look(pool)
    yield manager.reset_prefix_cache(), manager.usage, look(pool, in_order=False)


def ask_pool(pool: Any) -> Iterator[Any]:
    """The methods of `BlockPool`, as `test_cache_blocks`, `test_maybe_evict_cached_block` and others call them."""
    request = Ask("0", tuple(range(14))).request(Shape())
    keys = [make_block_hash_with_group_id(block_hash, 0) for block_hash in request.block_hashes]
    found = pool.cached_block_hash_to_block

    def ids(blocks: Any) -> Any:
        return None if blocks is None else [block.block_id for block in blocks]

    def cached() -> Any:
        one = [found.get_one_block(key) for key in keys]
        return [block and block.block_id for block in one], [
            ids(pool.get_cached_block(block_hash, [0])) for block_hash in request.block_hashes
        ]

    blocks = pool.get_new_blocks(3)
    yield ids(blocks), look(pool), cached()
    pool.cache_full_blocks(request, blocks, 0, 2, 4, 0)
    yield look(pool), cached()
    pool.cache_full_blocks(request, blocks, 2, 3, 4, 0)
    yield look(pool), cached(), [found.contain(key, block.block_id) for key, block in zip(keys, blocks, strict=True)]
    twins = pool.get_new_blocks(1)
    pool.cache_full_blocks(request, twins, 0, 1, 4, 0)
    yield look(pool), cached()
    pool.touch(blocks[:2])
    pool.free_blocks(reversed(blocks))
    yield look(pool), cached()
    yield [pool._maybe_evict_cached_block(block) for block in (blocks[0], blocks[0])], look(pool), cached()
    pool.evict_blocks({block.block_id for block in twins})
    yield look(pool), cached()
    pool.free_blocks([blocks[1], blocks[0], twins[0]])
    taken = pool.get_new_blocks(4)
    yield ids(taken), look(pool), cached()
    yield _refused(lambda: pool.get_new_blocks(4)), look(pool)
    taken += pool.get_new_blocks(3)  # the last ones, whose content goes
    yield ids(taken), look(pool), cached(), pool.reset_prefix_cache()
    pool.cache_full_blocks(request, taken, 0, 3, 4, 0)
    pool.free_blocks(taken)
    pool.evict_blocks({taken[1].block_id})
    yield look(pool, in_order=False), cached()
    yield pool.reset_prefix_cache(), look(pool, in_order=False), cached()


def _refused(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


POOL_CASES: tuple[Callable[[], None], ...] = (pool_answers_as_vllms, vllms_tests_get_our_pool)
