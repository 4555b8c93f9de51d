"""A state machine for `BlockManager`: every operation against the executable model and a shadow memory.

Rules are total: a rule whose sequence is in the wrong state brings it to the right one first, so no draw is wasted.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvproof.allocator import BlockManager, MediaItem, Pin
from kvproof.allocator.sequence import MAX_LENGTH
from kvproof.fuzz.machines.decode import DecodeRules
from kvproof.fuzz.machines.harness import (
    LIMITS,
    MEDIA,
    NAMESPACES,
    NUM_SLOTS,
    SLOTS,
    TOKENS,
)
from kvproof.fuzz.machines.oracles import Pair
from kvproof.fuzz.model import Media, ModelSequence


class ManagerMachine(DecodeRules):
    """All that a manager can be asked to do."""

    @rule(
        slot=SLOTS,
        base=st.integers(0, 7),
        keep=st.none() | st.integers(0, 12),
        suffix=st.lists(st.integers(0, 1), max_size=6),
        namespace=st.sampled_from((0, 0, 0, 1, 2)),
        headroom=st.none() | st.integers(0, 5),
        media=st.sampled_from(MEDIA),
        limit=LIMITS,
    )
    def admit(
        self,
        slot: int,
        base: int,
        keep: int | None,
        suffix: list[int],
        namespace: int,
        headroom: int | None,
        media: Media,
        limit: int | None,
    ) -> None:
        """A new sequence, whose prompt usually begins like one that was seen before."""
        self.vacate(slot)
        prompt = (self.prompts[-1 - base % len(self.prompts)][:keep] + suffix)[: self.capacity + 1] or [0]
        self.prompts.append(prompt)
        max_length = None if headroom is None else len(prompt) + headroom
        items = [MediaItem(*item) for item in media]
        pair = Pair(
            self.manager.sequence(prompt, max_length=max_length, namespace=NAMESPACES[namespace], media=items),
            ModelSequence(NAMESPACES[namespace], list(prompt), max_length, media),
        )
        self.slots[slot] = pair
        self.try_admit(pair, limit)

    @rule(slot=SLOTS, to=SLOTS, namespace=st.integers(0, len(NAMESPACES) - 1))
    def echo(self, slot: int, to: int, namespace: int) -> None:
        """Another tenant asks for the same, and computes it for itself."""
        tokens = list(self.running(slot).model.tokens)
        if slot != to:
            self.vacate(to)
            real = self.manager.sequence(tokens, namespace=NAMESPACES[namespace])
            pair = self.slots[to] = Pair(real, ModelSequence(NAMESPACES[namespace], tokens))
            if self.try_admit(pair, None):
                self.write(pair)
                self.commit(pair)

    @rule()
    def look_up(self) -> None:
        """Whoever goes on from what was seen lately finds what there is of it in their own namespace, and no more."""
        for tokens in ([*prompt, 0] for prompt in self.prompts[-4:]):
            for namespace in NAMESPACES:
                hits = self.model.hits(ModelSequence(namespace, tokens)) if self.model.caching else []
                found = self.manager.match(self.manager.sequence(tokens, namespace=namespace))
                assert found == len(hits) * self.model.block_size, f"{found} tokens of {tokens} found in {namespace}"

    @rule(slot=SLOTS, limit=LIMITS)
    def readmit(self, slot: int, limit: int | None) -> None:
        """Preemption by recompute: release, and later admit what is now a longer prompt."""
        pair = self.occupied(slot)
        self.release_pair(pair)
        self.try_admit(pair, limit)

    @rule(slot=SLOTS, n=st.none() | st.integers(0, 8), dies=st.sampled_from((False, False, True)))
    def compute(self, slot: int, n: int | None, dies: bool) -> None:
        """The KV of a chunk is written, and committed unless the step dies before."""
        pair = self.running(slot)
        self.write(pair, n)
        if not dies:
            self.commit(pair, n)

    @rule(slot=SLOTS, tokens=TOKENS)
    def sample(self, slot: int, tokens: list[int]) -> None:
        """Tokens become known, by sampling one or by accepting several drafts."""
        self.extend(self.occupied(slot), tokens)

    @rule(slot=SLOTS, n=st.integers(0, 9), lookahead=st.sampled_from((0, 1, 4)))
    def reserve(self, slot: int, n: int, lookahead: int) -> None:
        self.try_reserve(self.running(slot), n, lookahead)

    @rule(slot=SLOTS, to=SLOTS, again=st.booleans(), lookahead=st.sampled_from((0, 0, 0, 2)))
    def fork(self, slot: int, to: int, again: bool, lookahead: int) -> None:
        """Parallel sampling. Everything is computed before, since reserved slots can't be shared.

        `again` forks the fork too, while its tail still waits for its copy: it gives up what it has reserved for that.
        """
        pair = self.running(slot)
        self.write(pair)
        self.commit(pair)
        self.try_reserve(pair, 0, lookahead)
        if pair.model.reserved > pair.model.computed:
            self.refused(lambda: self.manager.fork(pair.real))
        elif slot != to:
            self.vacate(to)
            child = self.fork_pair(pair)
            self.slots[to] = child
            if again and child.model.computed:
                self.try_reserve(child, 1)
                self.manager.truncate(child.real, child.model.computed)
                self.model.truncate(child.model, child.model.computed)
                self.vacate(slot)
                grandchild = self.fork_pair(child)
                self.slots[slot] = grandchild
                self.try_reserve(grandchild, 1)

    def fork_pair(self, pair: Pair) -> Pair:
        return Pair(self.manager.fork(pair.real), self.model.fork(pair.model))

    @rule(slot=SLOTS, back=st.integers(0, 9), tokens=TOKENS | st.just([]))
    def truncate(self, slot: int, back: int, tokens: list[int]) -> None:
        """The last tokens are forgotten: rejected drafts, or an edited conversation, which goes on with `tokens`."""
        pair = self.running(slot)
        length = max(1, len(pair.model.tokens) - back)
        if not self.model.has_window(pair.model, min(length, pair.model.computed)):
            self.refused(lambda: self.manager.truncate(pair.real, length))
            return
        self.manager.truncate(pair.real, length)
        self.model.truncate(pair.model, length)
        if tokens:
            self.extend(pair, tokens)
            self.try_reserve(pair, len(pair.model.tokens) - pair.model.computed)
            self.write(pair)
            self.commit(pair)

    @rule(slot=SLOTS)
    def pin(self, slot: int) -> None:
        pair = self.running(slot)
        pin, blocks = self.manager.pin(pair.real), self.model.pin(pair.model)
        assert list(pin.blocks) == blocks
        self.pins.append((pin, blocks))

    @rule(which=st.integers(0, 3))
    def unpin(self, which: int) -> None:
        if self.pins:
            pin, blocks = self.pins.pop(which % len(self.pins))
            self.manager.unpin(pin)
            self.model.unpin(blocks)
            self.refused(lambda: self.manager.unpin(pin))

    @rule(slots=st.sets(SLOTS))
    def launch(self, slots: set[int]) -> None:
        """A step over some of the running sequences is sent off; they may be released while it runs."""
        self.send_off(
            [pair for slot in sorted(slots) if (pair := self.slots[slot]) is not None and pair.model.admitted]
        )

    def send_off(self, batch: list[Pair]) -> None:
        step = self.manager.launch([pair.real for pair in batch])
        assert step == self.model.launch([pair.model for pair in batch])

    @rule()
    def retire(self) -> None:
        if self.model.flights:
            oldest = min(self.model.flights)
            self.refused(lambda: self.manager.retire(oldest + 1))
            self.manager.retire(oldest)
            self.model.retire(oldest)
            self.refused(lambda: self.manager.retire(oldest))

    @rule(idle=st.booleans())
    def reset(self, idle: bool) -> None:
        """Refused while anything is in use."""
        if idle:
            for slot in range(NUM_SLOTS):
                self.vacate(slot)
            self.let_go()
        if self.manager.num_used:
            self.refused(self.manager.reset_prefix_cache)
        else:
            self.manager.reset_prefix_cache()
            self.model.reset()
            assert not self.model.holds

    @rule(slot=SLOTS, tokens=TOKENS, runs_on=st.booleans())
    def step(self, slot: int, tokens: list[int], runs_on: bool) -> None:
        """An engine's step, over every running sequence. All sample alike, so that equal ones stay equal.

        With `runs_on` it is committed before it has retired, as by an engine that prepares the next one meanwhile.
        """
        self.running(slot)
        batch = [pair for pair in self.slots if pair is not None and pair.model.admitted and pair not in self.rows]
        for pair in batch:
            self.write(pair)
        if runs_on:
            self.send_off(batch)
        for pair in batch:
            self.commit(pair)
        for pair in batch:
            self.extend(pair, tokens)
            self.try_reserve(pair, max(0, len(pair.model.tokens) - pair.model.reserved))

    @rule(slot=SLOTS)
    def release(self, slot: int) -> None:
        self.vacate(slot)

    @rule(slot=SLOTS, which=st.integers(0, 63))
    def misuse(self, slot: int, which: int) -> None:
        """Bad input is refused with an error of ours, and nothing changes."""
        manager, seq = self.manager, self.running(slot).real
        foreign = BlockManager(1, 1).sequence([0])
        idle = manager.sequence([0])
        outgrown = manager.sequence([0], max_length=1)
        outgrown.append(0)
        room = (MAX_LENGTH if seq.max_length is None else seq.max_length) - seq.num_computed
        calls: tuple[Callable[[], object], ...] = (
            lambda: manager.admit(seq),
            lambda: manager.can_admit(seq),
            lambda: manager.can_admit(foreign),
            lambda: manager.can_admit(outgrown),
            lambda: manager.can_admit(idle, 0),
            lambda: manager.match(foreign),
            lambda: manager.commit(seq, min(len(seq), seq.num_reserved) - seq.num_computed + 1),
            lambda: manager.commit(seq, -1),
            lambda: manager.commit(idle, 0),
            lambda: manager.reserve(seq, room + 1),
            lambda: manager.reserve(seq, -1),
            lambda: manager.reserve(seq, True),
            lambda: manager.reserve(idle, 0),
            lambda: manager.release(foreign),
            lambda: manager.release(idle),
            lambda: seq.extend([0, -1]),
            lambda: seq.extend([0, 2**31]),
            lambda: manager.sequence([]),
            lambda: manager.sequence([0, 0], max_length=1),
            lambda: manager.reserve(seq, 0, lookahead=-1),
            lambda: manager.truncate(seq, 0),
            lambda: manager.truncate(seq, len(seq) + 1),
            lambda: manager.truncate(idle, 1),
            lambda: manager.fork(idle),
            lambda: manager.pin(idle),
            lambda: manager.unpin(Pin(())),
            lambda: manager.launch([seq, idle]),
            lambda: manager.retire(-1),
            lambda: MediaItem("k", 0, 0),
            lambda: MediaItem(1, 0, 1),  # type: ignore[arg-type]
            lambda: manager.sequence([0], media=["k"]),  # type: ignore[list-item]
            lambda: manager.sequence([0], media=[MediaItem("k", 0, 2), MediaItem("l", 1, 2)]),
            lambda: manager.sequence([0], namespace="x"),  # type: ignore[arg-type]
            lambda: seq.append(1.5),  # type: ignore[arg-type]
            lambda: manager.reserve(seq, 10**5000),
            lambda: manager.retire(10**5000),
            lambda: manager.fork(foreign),
            lambda: manager.pin(foreign),
            lambda: manager.launch([seq, foreign]),
        )
        for i in range(which, which + 4):
            self.refused(calls[i % len(calls)], f"misuse {i % len(calls)}")

    @rule(slot=SLOTS, which=st.integers(0, 5))
    def intrude(self, slot: int, which: int) -> None:
        """In debug mode, no other thread than the first may call."""
        seq = self.running(slot).real
        calls: tuple[Callable[[], object], ...] = (
            lambda: self.manager.release(seq),
            lambda: self.manager.reserve(seq, 1),
            lambda: self.manager.truncate(seq, 1),
            lambda: self.manager.match(seq),
            lambda: self.manager.sequence([0]),
            self.manager.take_events,
        )
        if self.debug:
            with ThreadPoolExecutor(1) as other:
                self.refused(lambda: other.submit(calls[which]).result())
