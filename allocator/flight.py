"""Steps in flight: blocks that a running step may still read or write are not handed out before it has retired."""

from __future__ import annotations

from collections.abc import Iterable

from kvproof.allocator.errors import SequenceStateError, shown
from kvproof.allocator.pool import BlockPool
from kvproof.allocator.sequence import Sequence


class Flights:
    """The launched steps, numbered from 0, which retire in the order of their launch."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._parked: dict[int, list[int]] = {}  # by step; a parked block keeps the reference its table held
        self._num_launched = 0

    def launch(self, seqs: Iterable[Sequence]) -> int:
        step = self._num_launched
        for seq in seqs:
            seq._flight = step
        self._parked[step] = []
        self._num_launched += 1
        return step

    def retire(self, step: int) -> None:
        oldest = next(iter(self._parked), None)
        if step != oldest or type(step) is not int:
            in_flight = "none is in flight" if oldest is None else f"{oldest} is the oldest in flight"
            raise SequenceStateError(f"step {shown(step)} can't retire: {in_flight}")
        for block in self._parked.pop(step):
            self._pool.release(block)

    def drop(self, seq: Sequence, blocks: Iterable[int]) -> None:
        """Give up the references that entries of `seq`'s table held: now, or when its step has retired."""
        parked = self._parked.get(seq._flight) if seq._flight is not None else None
        if parked is None:
            self._pool.release_all(blocks)
        else:
            parked.extend(blocks)

    @property
    def steps(self) -> dict[int, list[int]]:
        """The steps in flight, oldest first, with the blocks parked until each retires."""
        return {step: list(blocks) for step, blocks in self._parked.items()}

    @property
    def parked(self) -> list[int]:
        """Every parked block, as often as it is held."""
        return [block for blocks in self._parked.values() for block in blocks]

    def __len__(self) -> int:
        return len(self._parked)
