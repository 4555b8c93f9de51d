"""A prefix cache simulated at the grain of requests, with LRU and the offline optimum: what `policies.py` stands on.

Prompts are replayed one after another, as by `kvproof replay`: leading blocks are found, a prompt's last block never,
and a prompt of more blocks than there are is refused.

A request that uses a block takes it over from the one before, and eviction starts at the tail. So each request owns one
stretch of its prompt, from the first block that no later request has used to the last one not yet evicted, and a replay
takes seconds where one by blocks takes minutes.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

NEVER = 2**40  # later than any request
UNLIMITED = 2**40  # blocks

Ints = NDArray[np.int64]
Prompts = list[NDArray[np.int32]]  # the identities of each request's blocks: equal ones have equal prefixes
Stretches = list[tuple[int, int, int]]  # (owner, first block, end) of what a prompt found, head first


class Policy(Protocol):
    def admit(self, cache: Cache, request: int, found: Stretches) -> None:
        """`request` arrives and finds these blocks, before it takes them over."""

    def victim(self, cache: Cache) -> tuple[int, int]:
        """Whose tail is evicted, and how many blocks of it at most, before another is asked for."""
        ...


class Cache:
    """A prefix cache of `capacity` blocks: `run` says how many blocks each prompt found.

    start, stop  of each request, the stretch of its prompt that it owns
    clock        of each request, prompt blocks that had arrived when its own had
    """

    def __init__(self, prompts: Prompts, capacity: int, policy: Policy) -> None:
        self.prompts, self.capacity, self.policy = prompts, capacity, policy
        self.lengths: Ints = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        self.clock: Ints = np.cumsum(self.lengths)
        self.start, self.stop = np.zeros_like(self.lengths), np.zeros_like(self.lengths)
        self._owner: Ints = np.full(1 + max(int(prompt.max()) for prompt in prompts), -1, dtype=np.int64)
        self._owners, self._place = np.zeros_like(self.lengths), dict[int, int]()  # those with a stretch: a set
        self._below = defaultdict[int, set[int]](set)  # of a block, the owners whose stretches go on from it
        self._used = 0

    @property
    def owners(self) -> Ints:
        """The requests that own blocks, in no order."""
        return self._owners[: len(self._place)]

    def run(self) -> Ints:
        hits = np.zeros_like(self.lengths)
        for request, prompt in enumerate(self.prompts):
            if len(prompt) > self.capacity:
                continue
            found = self._find(prompt)
            end = found[-1][2] if found else 0
            hits[request] = min(end, len(prompt) - 1)
            self.policy.admit(self, request, found)
            for owner, _, stop in found:
                self._take_over(owner, stop)
            while self._used + len(prompt) - hits[request] > self.capacity:
                owner, most = self.policy.victim(self)
                excess = self._used + int(len(prompt) - hits[request]) - self.capacity
                self._cut(owner, max(self.start[owner], self.stop[owner] - min(most, excess)))
            self._used += len(prompt) - end
            self.stop[request] = len(prompt)
            self._owner[prompt] = request
            self._owners[len(self._place)] = request
            self._place[request] = len(self._place)
        return hits

    def _find(self, prompt: NDArray[np.int32]) -> Stretches:
        found: Stretches = []
        at = 0
        while at < len(prompt):
            owner = int(self._owner[prompt[at]])
            if owner < 0 or not self.start[owner] <= at < self.stop[owner]:
                break
            end = min(len(prompt), int(self.stop[owner]))
            same = prompt[at:end] == self.prompts[owner][at:end]
            end = end if same[-1] else at + int(same.argmin())  # equal up to where they part
            found.append((owner, at, end))
            at = end
        return found

    def _take_over(self, owner: int, start: int) -> None:
        """What `owner` has up to `start` is another's now."""
        self._unhang(owner)
        self.start[owner] = start
        if start < self.stop[owner]:
            self._below[int(self.prompts[owner][start - 1])].add(owner)
        else:
            self._forget(owner)

    def _cut(self, owner: int, stop: int) -> None:
        """The blocks from `stop` on are evicted, and what goes on from them can't be found any more."""
        lost = self.prompts[owner][stop : self.stop[owner]].tolist()
        self._used -= len(lost)
        self.stop[owner] = stop
        for block in lost:
            for other in self._below.pop(block, ()):
                self._cut(other, int(self.start[other]))
        if stop == self.start[owner]:
            self._unhang(owner)
            self._forget(owner)

    def _unhang(self, owner: int) -> None:
        if start := int(self.start[owner]):
            self._below[int(self.prompts[owner][start - 1])].discard(owner)

    def _forget(self, owner: int) -> None:
        place, last = self._place.pop(owner), int(self._owners[len(self._place)])
        if last != owner:
            self._owners[place] = last
            self._place[last] = place


class LRU:
    def admit(self, cache: Cache, request: int, found: Stretches) -> None: ...

    def victim(self, cache: Cache) -> tuple[int, int]:
        return int(cache.owners.min()), UNLIMITED


class Optimum(LRU):
    """Evicts the block that is used again last (Belady, 1966).

    It is the optimum here too, where a prompt needs all of its blocks at once: a hit is an interval between two uses,
    the room beside the prompt limits how many intervals pass a request, and dropping the one that ends last is optimal
    for intervals of equal worth. Prefixes don't change that: a block is used whenever its children are.
    """

    def __init__(self, prompts: Prompts, capacity: int) -> None:
        self._next_use = np.concatenate(next_uses(prompts, capacity))
        self._offset = np.array([0, *accumulate(map(len, prompts))])

    def victim(self, cache: Cache) -> tuple[int, int]:
        owners = cache.owners
        last = self._next_use[self._offset[owners] + cache.stop[owners] - 1]
        owner, use = int(owners[last.argmax()]), last.max()
        low, high = self._offset[owner] + cache.start[owner], self._offset[owner] + cache.stop[owner]
        return owner, int(high - low - np.searchsorted(self._next_use[low:high], use))


def next_uses(prompts: Prompts, capacity: int) -> list[Ints]:
    """Of each request's blocks, the next request that uses them; a refused one uses nothing."""
    later: Ints = np.full(1 + max(int(prompt.max()) for prompt in prompts), NEVER, dtype=np.int64)
    uses: list[Ints] = []
    for request in reversed(range(len(prompts))):
        uses.append(later[prompts[request]])
        if len(prompts[request]) <= capacity:
            later[prompts[request]] = request
    return uses[::-1]
