"""Blocks: every transition by state machine, exact refusals and orders by hand."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from kvproof.allocator import LRU, BlockPool, BlockState, IllegalTransition, InvalidArgument
from kvproof.fuzz.machines.pool import PoolMachine

TestPoolMachine = PoolMachine.TestCase


def one_of_each() -> BlockPool:
    """Blocks 0 to 3 are free, active, published and cached."""
    pool = BlockPool(4)
    pool.take(4)
    pool.publish(2, 22)
    pool.publish(3, 33)
    pool.release(3)
    pool.release(0)
    assert [pool.state(block) for block in range(4)] == list(BlockState)[:4]
    return pool


def snapshot(pool: BlockPool) -> object:
    blocks = range(pool.num_blocks)
    return [(pool.refs(block), pool.content(block)) for block in blocks], pool.free_lists(), pool.num_free


@pytest.mark.parametrize("value", [0, -1, 2**31, 10**30, True, 4.0, "4", None])
def test_num_blocks_out_of_range(value: int) -> None:
    expected = f"num_blocks is {value!r}, must be an integer from 1 to 268435456"
    with pytest.raises(InvalidArgument, match=re.escape(expected)):
        BlockPool(value)


@pytest.mark.parametrize("value", [-1, 2**31, True, 1.0, "1"])
def test_take_refuses_what_is_no_count(value: int) -> None:
    pool = one_of_each()
    before = snapshot(pool)
    with pytest.raises(InvalidArgument, match=re.escape(f"n is {value!r}, must be an integer from 0 to 268435456")):
        pool.take(value)
    assert snapshot(pool) == before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool: pool.take(3), "cannot take 3 blocks, 2 are free"),
        (lambda pool: pool.share(0), "block 0 is free: there is nothing to share"),
        (lambda pool: pool.release(0), "block 0 is free: there is no reference to release"),
        (lambda pool: pool.release(3), "block 3 is cached: there is no reference to release"),
        (lambda pool: pool.publish(0, 1), "block 0 is free: only an active block can be published"),
        (lambda pool: pool.publish(2, 1), "block 2 is published: only an active block can be published"),
        (lambda pool: pool.publish(3, 1), "block 3 is cached: only an active block can be published"),
        (lambda pool: pool.withdraw(0), "block 0 is free: it has no content to withdraw"),
        (lambda pool: pool.withdraw(1), "block 1 is active: it has no content to withdraw"),
    ],
)
def test_refusals_name_the_block_and_its_state(call: Callable[[BlockPool], object], message: str) -> None:
    pool = one_of_each()
    before = snapshot(pool)
    with pytest.raises(IllegalTransition) as error:
        call(pool)
    assert str(error.value) == message
    assert snapshot(pool) == before


@pytest.mark.parametrize("block", [-1, -4, 4, 2**31, 2**70])
@pytest.mark.parametrize("name", ["refs", "content", "state", "share", "release", "publish", "withdraw"])
def test_there_is_no_such_block(name: str, block: int) -> None:
    """A negative one above all, which as a list index would mean the last block."""
    pool = one_of_each()
    before = snapshot(pool)
    arguments = (block, 1) if name == "publish" else (block,)
    with pytest.raises(IllegalTransition, match=f"^there is no block {block}, the pool has 0 to 3$"):
        getattr(pool, name)(*arguments)
    assert snapshot(pool) == before


@pytest.mark.parametrize("content", [0, -1, 2**64, "x", None])
def test_content_is_a_number_that_is_not_0(content: int) -> None:
    pool = one_of_each()
    before = snapshot(pool)
    with pytest.raises(InvalidArgument, match=r"^content is .*, must be an integer from 1 to 18446744073709551615$"):
        pool.publish(1, content)
    assert snapshot(pool) == before


def test_contentless_first_then_least_recently_released() -> None:
    lost: list[tuple[int, int]] = []
    pool = BlockPool(6, on_evict=lambda block, content: lost.append((block, content)))
    assert pool.take(6) == [0, 1, 2, 3, 4, 5]
    for block in (1, 2, 3, 4):
        pool.publish(block, 100 + block)
    for block in (3, 0, 1, 4, 5, 2):
        pool.release(block)
    assert pool.free_lists() == ([5, 0], [3, 1, 4, 2])
    pool.share(1)
    pool.release(1)  # a hit makes it the newest
    pool.withdraw(4)
    assert pool.free_lists() == ([4, 5, 0], [3, 2, 1])
    assert lost == []
    assert pool.take(5) == [4, 5, 0, 3, 2]
    assert lost == [(3, 103), (2, 102)]


def test_withdraw_and_share_keep_the_references() -> None:
    pool = one_of_each()
    pool.share(2)
    pool.withdraw(2)
    assert (pool.state(2), pool.refs(2), pool.num_free) == (BlockState.ACTIVE, 2, 2)
    pool.release(2)
    pool.publish(2, 23)
    pool.release(2)
    assert pool.free_lists() == ([0], [3, 2])


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (0, "the eviction policy chose block 0, which is active"),
        (2, "the eviction policy chose block 2, which is published"),
        (-1, "there is no block -1, the pool has 0 to 3"),
        (4, "there is no block 4, the pool has 0 to 3"),
    ],
)
def test_a_policy_may_only_choose_what_is_cached(choice: int, message: str) -> None:
    """A published block handed out would be written by two owners."""

    class Wrong(LRU):
        def pop(self) -> int:
            return choice

    pool = BlockPool(4, policy=Wrong())
    pool.take(4)
    pool.publish(2, 22)
    pool.publish(3, 33)
    pool.release(3)
    with pytest.raises(IllegalTransition) as error:
        pool.take()
    assert str(error.value) == message
    assert (pool.refs(2), pool.content(2), pool.content(3)) == (1, 22, 33)


def test_a_policy_decides_among_the_cached_only() -> None:
    class Highest(LRU):
        def pop(self) -> int:
            block = max(self)
            self.remove(block)
            return block

    pool = BlockPool(4, policy=Highest())
    pool.take(4)
    for block in (0, 2, 1):
        pool.publish(block, 1)
        pool.release(block)
    pool.release(3)
    assert pool.take(4) == [3, 2, 1, 0]


def test_a_policy_with_blocks_of_its_own_is_refused() -> None:
    policy = LRU()
    policy.insert(3, 0)
    with pytest.raises(InvalidArgument, match=r"^the eviction policy has 1 blocks already: each pool needs its own$"):
        BlockPool(4, policy=policy)
