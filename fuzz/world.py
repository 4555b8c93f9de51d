"""The real `BlockManager`, driven by the actions of the specification, beside the memory that its blocks stand for."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import combinations, product
from typing import NamedTuple

from kvproof.allocator import (
    Admission,
    BlockManager,
    HashBlock,
    InvalidArgument,
    InvariantViolation,
    Namespace,
    Node,
    Pin,
    Sequence,
    SequenceStateError,
)
from kvproof.fuzz.canonical import Prefix, State, pending_copies, prefix_of, state_of
from kvproof.fuzz.spec.scopes import Scope


class Action(NamedTuple):
    """One call, by its name in the specification and with its arguments there."""

    name: str
    args: tuple[object, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.args))})"


class World:
    """A manager, its callers' sequences, pins and launched steps, and the memory that its blocks stand for.

    A slot of the memory holds the whole prefix its KV was computed from, so that a wrong block shows as a wrong read.
    A method is an action; it returns or raises as the code does, and True stands for "not refused".
    """

    def __init__(self, scope: Scope, hash_block: HashBlock) -> None:
        self.scope = scope
        self.manager = BlockManager(
            scope.num_blocks, scope.block_size, merge_duplicates=scope.merge, hash_block=hash_block
        )
        self.seqs: list[Sequence | None] = [None] * scope.num_seqs
        self.pins: list[Pin | None] = [None] * scope.num_pins
        self.steps: list[int] = []
        self.memory: dict[tuple[int, int], Prefix] = {}

    def state(self) -> State:
        return state_of(self.manager, self.seqs, self.pins)

    def actions(self) -> Iterator[Action]:
        """Every call that the specification knows, those that the code must refuse among them.

        Left out is only what says nothing (a reserve of slots that are reserved), what exceeds the scope, and what the
        specification forbids the caller: to write a block that an order to copy names.
        """
        scope, size = self.scope, self.scope.block_size
        copies = pending_copies(self.manager)
        ordered = {*copies, *copies.values()}
        idle = [s for s, seq in enumerate(self.seqs) if seq is None]
        admitted = [(s, seq) for s, seq in enumerate(self.seqs) if seq is not None]
        for s, namespace, tokens, limit in product(idle, _namespaces(scope), _prompts(scope), scope.limits):
            yield Action("Admit", (s, namespace, tokens, limit))
        for s, seq in admitted:
            known, computed, reserved = len(seq), seq.num_computed, seq.num_reserved
            if known < scope.max_length:
                yield from (Action("Extend", (s, token)) for token in range(scope.num_tokens))
            yield from (Action("Reserve", (s, target)) for target in range(reserved + 1, known + scope.ahead + 1))
            for n in range(1, scope.max_length + 1):
                if ordered.isdisjoint(seq.block_table[computed // size : -(-(computed + n) // size)]):
                    yield Action("Commit", (s, n))
            if scope.forks:
                yield from (Action("Fork", (s, child)) for child in idle)
            if scope.truncates:
                yield from (Action("Truncate", (s, length)) for length in range(1, max(known, reserved)))
            yield Action("Release", (s,))
            if computed >= size:
                yield from (Action("Pin", (s, p)) for p, pin in enumerate(self.pins) if pin is None)
        yield from (Action("Unpin", (p,)) for p, pin in enumerate(self.pins) if pin is not None)
        if copies:
            yield Action("Copy")
        if len(self.steps) < scope.max_flights:
            for n in range(1, len(admitted) + 1):
                yield from (Action("Launch", batch) for batch in combinations([s for s, _ in admitted], n))
        yield from (Action("Retire", (place,)) for place in range(1, len(self.steps) + 1))

    def perform(self, action: Action) -> bool:
        """False when the code refuses, whether it answers so or raises; any other exception is passed on."""
        try:
            return bool(getattr(self, action.name.lower())(*action.args))
        except (InvalidArgument, SequenceStateError):
            return False

    # ---- the actions

    def admit(self, s: int, namespace: str, tokens: tuple[int, ...], limit: int) -> bool:
        seq = self.manager.sequence(tokens, namespace=Namespace(namespace))
        if self.manager.admit(seq, limit) is not Admission.NOW:
            self._may_be_refused(seq, len(tokens))
            return False
        if seq.num_computed >= len(tokens):
            raise InvariantViolation("Contract", f"nothing is left to compute of {seq}")
        self.seqs[s] = seq
        return True

    def extend(self, s: int, token: int) -> bool:
        self._admitted(s).append(token)
        return True

    def reserve(self, s: int, reserved: int) -> bool:
        seq = self._admitted(s)
        if self.manager.reserve(seq, reserved - seq.num_computed):
            return True
        self._may_be_refused(seq, reserved)
        return False

    def copy(self) -> bool:
        """All sources are read before any destination is written."""
        orders, slots = self.manager.take_copies(), range(self.manager.block_size)
        read = {(to, i): self.memory[source, i] for source, to in orders for i in slots if (source, i) in self.memory}
        self.memory.update(read)
        return bool(orders)

    def commit(self, s: int, n: int) -> bool:
        seq = self._admitted(s)
        first, table = seq.num_computed, seq.block_table[:]
        self.manager.commit(seq, n)
        for i in range(first, first + n):
            self.memory[self._slot(table, i)] = self._kv(seq, i)
        return True

    def fork(self, s: int, child: int) -> bool:
        self.seqs[child] = self.manager.fork(self._admitted(s))
        return True

    def truncate(self, s: int, length: int) -> bool:
        self.manager.truncate(self._admitted(s), length)
        return True

    def release(self, s: int) -> bool:
        seq = self._admitted(s)
        self.manager.release(seq)
        self.seqs[s] = None
        self._is_single(lambda: self.manager.release(seq))
        return True

    def pin(self, s: int, p: int) -> bool:
        self.pins[p] = self.manager.pin(self._admitted(s))
        return True

    def unpin(self, p: int) -> bool:
        pin = self.pins[p]
        assert pin is not None
        self.manager.unpin(pin)
        self.pins[p] = None
        self._is_single(lambda: self.manager.unpin(pin))
        return True

    def launch(self, *batch: int) -> bool:
        self.steps.append(self.manager.launch([self._admitted(s) for s in batch]))
        return True

    def retire(self, place: int) -> bool:
        """`place` counts from 1, the oldest step in flight."""
        self.manager.retire(self.steps[place - 1])
        del self.steps[place - 1]
        return True

    # ---- what is checked after each

    def check(self) -> None:
        """The invariants that a state shows, those of the memory included."""
        self.manager.check()
        for seq in filter(None, self.seqs):
            self._check_what_it_reads(seq)
        for node in self.manager.index.nodes():
            self._check_what_is_published(node)

    def _check_what_it_reads(self, seq: Sequence) -> None:
        copies, pool = pending_copies(self.manager), self.manager.pool
        for i in range(seq.num_computed):
            block, offset = self._slot(seq.block_table, i)
            read = self.memory.get((copies.get(block, block), offset))
            if read != self._kv(seq, i):
                raise InvariantViolation("I13", f"position {i} of {seq} reads {read}")
        for block in seq.block_table[: seq.num_computed // self.scope.block_size]:
            if pool.content(block) is None:
                raise InvariantViolation("I3", f"block {block} of {seq} is full and computed, and not published")

    def _check_what_is_published(self, node: Node) -> None:
        namespace, tokens = prefix_of(node)
        first = len(tokens) - self.scope.block_size
        for block, offset in product(node.blocks, range(self.scope.block_size)):
            held = self.memory.get((block, offset))
            if held != (namespace, tokens[: first + offset + 1]):
                raise InvariantViolation("I6", f"block {block} is published as {tokens} and holds {held}")
        # The audit looks it up by the hash that the node carries; a newcomer has to compute that.
        newcomer = self.manager.sequence((*tokens, 0), namespace=Namespace(namespace))
        if (found := self.manager.match(newcomer)) != len(tokens):
            raise InvariantViolation("I3", f"{tokens} is published in {node.blocks}, and only {found} tokens are found")

    def _is_single(self, again: Callable[[], None]) -> None:
        """I10: what was given back once is refused a second time."""
        before = self.state()
        with suppress(SequenceStateError):
            again()
            raise InvariantViolation("I10", "a second time was accepted")
        if self.state() != before:
            raise InvariantViolation("I8", "refused a second time, and yet something changed")

    def _may_be_refused(self, seq: Sequence, num_slots: int) -> None:
        """I12: what is alone gets every slot for which the pool has blocks at all."""
        manager = self.manager
        is_alone = all(other is seq for other in manager.sequences) and not manager.held_otherwise and not self.steps
        if is_alone and num_slots <= manager.num_blocks * manager.block_size:
            raise InvariantViolation("I12", f"{seq} is alone and can't have {num_slots} slots")

    def _admitted(self, s: int) -> Sequence:
        seq = self.seqs[s]
        assert seq is not None
        return seq

    def _slot(self, table: array[int], i: int) -> tuple[int, int]:
        entry, offset = divmod(i, self.manager.block_size)
        return table[entry], offset

    def _kv(self, seq: Sequence, i: int) -> Prefix:
        return seq.namespace.salt, tuple(seq.tokens(0, i + 1))


@cache
def _prompts(scope: Scope) -> list[tuple[int, ...]]:
    lengths = range(1, scope.max_prompt + 1)
    return [prompt for n in lengths for prompt in product(range(scope.num_tokens), repeat=n)]


@cache
def _namespaces(scope: Scope) -> list[str]:
    return [f"n{i}" for i in range(scope.num_namespaces)]
