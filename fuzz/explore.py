"""Visits every state that the real `BlockManager` can reach at a small scope, breadth first.

The design in allocator/spec has a graph of states for each scope of `kvproof.fuzz.spec.scopes`, and the code must have
the same: then whatever the model checker says of the design holds for the code, at these scopes. On the way every
invariant is checked after every call, and a violation comes with a shortest sequence of calls that leads there.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvproof.allocator import HashBlock, InvariantViolation, KvproofError, xxh3_chained
from kvproof.fuzz.canonical import State
from kvproof.fuzz.spec.scopes import Graph, Scope
from kvproof.fuzz.world import Action, World


def parity(tokens: bytes, parent_hash: int) -> int:
    """How many tokens of the prefix are odd, modulo 2."""
    return (parent_hash + sum(tokens[::4])) % 2


def constant(tokens: bytes, parent_hash: int) -> int:
    return 0


HASHES: dict[str, HashBlock] = {"Perfect": xxh3_chained, "Parity": parity, "Constant": constant}
"""Hash functions by the names they have in the specification. Worlds are pickled, so none can be a lambda."""


class Edge(NamedTuple):
    """What a call that was not refused makes of a state."""

    source: State
    action: Action
    target: State


@dataclass(frozen=True, slots=True)
class Exploration:
    """The graph as far as the search went, and what it found `violated` at the end of `trace`, a shortest way there."""

    graph: Graph
    violation: str | None = None
    trace: tuple[Action, ...] = ()


class Explorer:
    """One breadth-first search. `reached_by` has the first edge that led to each state, None for the initial one."""

    def __init__(self, scope: Scope, hash_block: HashBlock = xxh3_chained) -> None:
        self._initial = World(scope, hash_block)
        self.reached_by: dict[State, Edge | None] = {self._initial.state(): None}
        self.depth = 1

    def edges(self) -> Iterator[Edge]:
        """Every edge of the graph, once, in the order of the search. Raises `Broken` at the first violation."""
        # Worlds are copied by pickle: it needs to know nothing of the manager's insides, and deepcopy takes far longer.
        level = [pickle.dumps(self._initial)]
        while level:
            following: list[bytes] = []
            for saved in level:
                for edge, world in self._expand(saved):
                    if edge.target not in self.reached_by:
                        self.reached_by[edge.target] = edge
                        following.append(pickle.dumps(world))
                    yield edge
            level = following
            self.depth += bool(level)

    def trace(self, state: State) -> tuple[Action, ...]:
        """A shortest sequence of actions from the initial state to `state`, which has been reached."""
        actions: list[Action] = []
        while (edge := self.reached_by[state]) is not None:
            actions.append(edge.action)
            state = edge.source
        return tuple(reversed(actions))

    def follow(self, actions: Iterable[tuple[str, tuple[object, ...]]]) -> None:
        """Check what `edges` does on the way along `actions`, up to one that is refused. Raises `Broken`."""
        saved = pickle.dumps(self._initial)
        for action in actions:
            worlds = (world for edge, world in self._expand(saved) if tuple(edge.action) == action)
            if (world := next(worlds, None)) is None:
                return
            saved = pickle.dumps(world)

    def _expand(self, saved: bytes) -> Iterator[tuple[Edge, World]]:
        world: World = pickle.loads(saved)
        source = world.state()
        for action in list(world.actions()):
            try:
                enabled = world.perform(action)
                target = world.state()
                if enabled:
                    world.check()
                    _check_steps_in_flight(source, target)
                elif target != source:
                    raise InvariantViolation("I8", "the call was refused, and yet something changed")
            except Exception as error:  # whatever a broken manager raises
                raise Broken(source, action, error) from error
            if enabled:
                yield Edge(source, action, target), world
                world = pickle.loads(saved)


def _check_steps_in_flight(before: State, after: State) -> None:
    """I14: what a step in flight may use keeps an owner until the step has retired."""
    retired = len(after.parked) < len(before.parked)
    for place in range(1 + retired, len(before.parked) + 1):
        lost = before.in_use_by_step(place) - after.in_use_by_step(place - retired)
        if lost:
            raise InvariantViolation("I14", f"step {place} in flight may still use blocks {sorted(lost)}")


class Broken(KvproofError):
    """`action` breaks the manager in `source`."""

    def __init__(self, source: State, action: Action, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.source = source
        self.action = action


def explore(
    scope: Scope,
    hash_block: HashBlock = xxh3_chained,
    *,
    max_transitions: int | None = None,
    on_progress: Callable[[Graph], object] = lambda graph: None,
) -> Exploration:
    """Visit every reachable state of `scope`, or as many as `max_transitions` lead to.

    `hash_block` is a function of a module, since worlds are pickled. `on_progress` is told the graph so far every
    1,000 transitions.
    """
    explorer = Explorer(scope, hash_block)
    num_transitions = 0

    def graph() -> Graph:
        return Graph(len(explorer.reached_by), num_transitions, explorer.depth)

    try:
        for num_transitions, _ in enumerate(explorer.edges(), 1):
            if num_transitions == max_transitions:
                break
            if num_transitions % 1000 == 0:
                on_progress(graph())
    except Broken as broken:
        return Exploration(graph(), str(broken), (*explorer.trace(broken.source), broken.action))
    return Exploration(graph())
