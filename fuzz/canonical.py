"""The state of a manager in the specification's terms: what the model checker and the code are compared by.

allocator/spec/README.md says what stands for what, and this is the one place that knows where the code keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from kvproof.allocator import BlockManager, Node, Pin, Sequence

Prefix = tuple[str | None, tuple[int, ...]]
"""A namespace and all tokens from a sequence's start: what a slot's KV was computed from, what a node stands for."""


class SequenceState(NamedTuple):
    """`step` is the step the sequence was last launched in: its place among those in flight, or 0."""

    namespace: str | None
    tokens: tuple[int, ...]
    computed: int
    reserved: int
    table: tuple[int, ...]
    step: int


class State(NamedTuple):
    """Two situations with equal states are the same situation. `copies` are (destination, source) in order.

    A block's content is not in it: index and blocks agree, which is I3 and checked on both sides.
    """

    seqs: tuple[SequenceState | None, ...]
    refs: tuple[int, ...]
    free: tuple[int, ...]
    cached: tuple[int, ...]
    index: frozenset[tuple[Prefix, tuple[int, ...]]]  # type: ignore[assignment]  # the specification's name, not tuple's
    parked: tuple[tuple[int, ...], ...]
    pins: tuple[tuple[int, ...], ...]
    copies: tuple[tuple[int, int], ...]

    def in_use_by_step(self, place: int) -> set[int]:
        """The owned blocks that the steps in flight may use from `place` on, which counts from 1."""
        tables = [seq.table for seq in self.seqs if seq is not None and seq.step >= place]
        return set(chain(*tables, *self.parked[place - 1 :]))


def state_of(manager: BlockManager, seqs: List[Sequence | None], pins: List[Pin | None]) -> State:
    """The state of `manager`, whose admitted sequences and whose pins are the given ones; None is an unused place."""
    pool, parked = manager.pool, manager._flights._parked
    free, cached = pool.free_lists()
    places = {step: place for place, step in enumerate(parked, 1)}
    return State(
        tuple([None if seq is None else _sequence_state(seq, places) for seq in seqs]),
        tuple(map(pool.refs, range(pool.num_blocks))),
        tuple(free),
        tuple(cached),
        frozenset([(prefix_of(node), tuple(node.blocks)) for node in manager.index.nodes()]),
        tuple(map(tuple, parked.values())),
        tuple([pin.blocks if pin else () for pin in pins]),
        tuple(sorted(pending_copies(manager).items())),
    )


def _sequence_state(seq: Sequence, places: dict[int, int]) -> SequenceState:
    step = 0 if seq._flight is None else places.get(seq._flight, 0)
    tokens, table = tuple(seq.tokens()), tuple(seq.block_table)
    return SequenceState(seq.namespace.salt, tokens, seq.num_computed, seq.num_reserved, table, step)


def pending_copies(manager: BlockManager) -> dict[int, int]:
    """What `take_copies` would return, as source by destination."""
    return manager._copies


def prefix_of(node: Node) -> Prefix:
    """Everything that a node's content depends on, itself included."""
    if node.parent is None:
        return node.namespace.salt, ()
    namespace, tokens = prefix_of(node.parent)
    return namespace, tokens + _token_ids(node.tokens)


@lru_cache(maxsize=256)
def _token_ids(key: bytes) -> tuple[int, ...]:
    return tuple(memoryview(key).cast("i"))
