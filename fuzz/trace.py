"""Random runs of the real `BlockManager`, recorded in the specification's terms.

They go where the exhaustive search of `kvproof.fuzz.explore` can't: more and larger blocks, longer prompts, all
features at once. `kvproof.fuzz.spec.traces` has the model checker follow them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

from kvproof.allocator import HashBlock, Sequence, xxh3_chained
from kvproof.fuzz.canonical import State, pending_copies
from kvproof.fuzz.spec.scopes import Graph, Scope
from kvproof.fuzz.world import Action, World

_LARGE = Scope(
    name="6 blocks of 2, duplicates merged",
    covers="everything",
    graph=Graph(0, 0, 0),  # nobody will ever see all of it
    num_blocks=6,
    block_size=2,
    num_seqs=4,
    num_tokens=2,
    num_namespaces=2,
    max_prompt=10,
    max_length=14,
    ahead=2,
    chunked=True,
    forks=True,
    truncates=True,
    num_pins=2,
    max_flights=2,
)
SCOPES = (
    _LARGE,
    replace(_LARGE, name="6 blocks of 2, duplicates kept", merge=False),
    replace(_LARGE, name="8 blocks of 3, duplicates merged", num_blocks=8, block_size=3, num_seqs=5, max_flights=3),
    replace(_LARGE, name="5 blocks of 4, duplicates kept", num_blocks=5, block_size=4, num_seqs=3, merge=False),
)
"""Where runs are recorded. They all fit `max_prompt` tokens: what can never be admitted, the specification can't tell
from what must wait."""


class Event(NamedTuple):
    """A call, whether it was refused, and the state after it, which a refusal leaves as it was."""

    action: Action
    refused: bool
    state: State


@dataclass(frozen=True, slots=True)
class Run:
    """What happened to a new manager of `scope`, in order."""

    scope: Scope
    events: tuple[Event, ...]


def record(scope: Scope, seed: int, num_events: int, hash_block: HashBlock = xxh3_chained) -> Run:
    """A run of `num_events` calls, the same for the same arguments. About one in eight is refused."""
    caller = _Caller(World(scope, hash_block), Random(seed))
    return Run(scope, tuple([caller.call() for _ in range(num_events)]))


class _Caller:
    """Makes random calls that the specification knows, and asks for a little more than there is now and then."""

    def __init__(self, world: World, random: Random) -> None:
        self._world = world
        self._random = random
        self._texts: list[tuple[int, ...]] = [()]  # what prompts begin with, so that there is something to find
        self._weights: dict[Callable[[], Action | None], int] = {
            self._admit: 5,
            self._extend: 4,
            self._reserve: 6,
            self._commit: 20,
            self._fork: 5,
            self._truncate: 2,
            self._release: 3,
            self._pin: 1,
            self._unpin: 2,
            self._copy: 2,
            self._launch: 2,
            self._retire: 3,
        }

    def call(self) -> Event:
        action = None
        while action is None:
            (propose,) = self._random.choices(list(self._weights), list(self._weights.values()))
            action = propose()
        refused = not self._world.perform(action)
        return Event(action, refused, self._world.state())

    # ---- proposals: None where there is nothing of the kind to do

    def _admit(self) -> Action | None:
        scope, random = self._world.scope, self._random
        if (s := self._idle()) is None:
            return None
        beginning = random.choice(self._texts[-6:])[: random.choice((4, 6, scope.max_prompt))]
        prompt = (*beginning, *(self._token() for _ in range(random.randint(1, 3))))[: scope.max_prompt]
        self._texts.append(prompt)
        namespace = 0 if random.random() < 0.8 else random.randrange(scope.num_namespaces)
        limit = random.choice((scope.max_prompt, scope.max_prompt, random.randint(1, scope.max_prompt)))
        return Action("Admit", (s, f"n{namespace}", prompt, limit))

    def _extend(self) -> Action | None:
        if (found := self._admitted()) is None or len(found[1]) >= self._world.scope.max_length:
            return None
        s, seq = found
        token = self._token()
        self._texts.append((*seq.tokens(), token))
        return Action("Extend", (s, token))

    def _reserve(self) -> Action | None:
        if (found := self._admitted()) is None:
            return None
        s, seq = found
        targets = range(seq.num_reserved + 1, len(seq) + self._world.scope.ahead + 1)
        return Action("Reserve", (s, self._random.choice(targets))) if targets else None

    def _commit(self) -> Action | None:
        """One token more than there are is refused. What an order to copy names must be copied before."""
        if (found := self._admitted()) is None:
            return None
        s, seq = found
        room = min(len(seq), seq.num_reserved) - seq.num_computed
        n = (
            room + 1
            if self._random.random() < 0.05
            else self._random.choice((room, room, self._random.randint(0, room)))
        )
        if n == 0:
            return None
        size, orders = self._world.manager.block_size, pending_copies(self._world.manager)
        written = seq.block_table[seq.num_computed // size : -(-(seq.num_computed + n) // size)]
        return Action("Commit", (s, n)) if {*orders, *orders.values()}.isdisjoint(written) else Action("Copy")

    def _fork(self) -> Action | None:
        if (found := self._admitted()) is None or (child := self._idle()) is None:
            return None
        s, seq = found
        refused = seq.num_reserved > seq.num_computed
        return None if refused and self._random.random() < 0.8 else Action("Fork", (s, child))

    def _truncate(self) -> Action | None:
        if (found := self._admitted()) is None:
            return None
        s, seq = found
        lengths = range(max(1, len(seq) - 4), max(len(seq), seq.num_reserved))
        return Action("Truncate", (s, self._random.choice(lengths))) if lengths else None

    def _release(self) -> Action | None:
        return Action("Release", (found[0],)) if (found := self._admitted()) is not None else None

    def _pin(self) -> Action | None:
        found, unused = self._admitted(), [p for p, pin in enumerate(self._world.pins) if pin is None]
        if found is None or not unused or found[1].num_computed < self._world.manager.block_size:
            return None
        return Action("Pin", (found[0], self._random.choice(unused)))

    def _unpin(self) -> Action | None:
        used = [p for p, pin in enumerate(self._world.pins) if pin is not None]
        return Action("Unpin", (self._random.choice(used),)) if used else None

    def _copy(self) -> Action | None:
        return Action("Copy") if pending_copies(self._world.manager) else None

    def _launch(self) -> Action | None:
        admitted = [s for s, seq in enumerate(self._world.seqs) if seq is not None]
        if not admitted or len(self._world.steps) >= self._world.scope.max_flights:
            return None
        return Action("Launch", tuple(sorted(self._random.sample(admitted, self._random.randint(1, len(admitted))))))

    def _retire(self) -> Action | None:
        return Action("Retire", (1,)) if self._world.steps else None

    # ---- choices

    def _token(self) -> int:
        """Usually a low one: equal texts come about independently."""
        return min(self._random.choices(range(self._world.scope.num_tokens), k=2))

    def _idle(self) -> int | None:
        idle = [s for s, seq in enumerate(self._world.seqs) if seq is None]
        return self._random.choice(idle) if idle else None

    def _admitted(self) -> tuple[int, Sequence] | None:
        admitted = [(s, seq) for s, seq in enumerate(self._world.seqs) if seq is not None]
        return self._random.choice(admitted) if admitted else None
