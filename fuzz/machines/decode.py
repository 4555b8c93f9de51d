"""The rules of decode batches: they must do what reserve, commit and append do for each sequence, in order of rows."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvproof.allocator import BlockManager
from kvproof.fuzz.machines.harness import NUM_SLOTS, SLOTS, ManagerHarness, fingerprint
from kvproof.fuzz.machines.oracles import Pair
from kvproof.fuzz.model import ModelSequence


class DecodeRules(ManagerHarness):
    """Sequences come and go while others decode. Between two looks at it, a sequence makes several steps."""

    @rule(
        slots=st.sets(SLOTS, min_size=1),
        steps=st.integers(0, 9),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        shift=st.integers(0, 1),
        leaves=st.sampled_from((0, 1, 1, 2, 3, None)),
        lookahead=st.sampled_from((0, 0, 1, 3, 6)),
        twin=st.booleans(),
    )
    def decode(
        self,
        slots: set[int],
        steps: int,
        tokens: list[int],
        shift: int,
        leaves: int | None,
        lookahead: int,
        twin: bool,
    ) -> None:
        """Some join the batch, perhaps with slots reserved ahead, and all of it decodes; after `leaves` steps the first
        row leaves. Without `shift` all sample alike, so that equal ones stay equal; with it neighbours never do.
        """
        for slot in sorted(slots):
            if self.slots[slot] not in self.rows:
                self.join(slot, lookahead)
        if twin and self.rows:
            self.join_twin()
        for step in range(steps):
            self.finish_the_longest()
            if step == leaves and len(self.rows) > 1:
                self.leave(self.rows[0])
            if not self.make_room():
                break
            self.step_batch([(tokens[step % len(tokens)] + shift * row) % NUM_SLOTS for row in range(len(self.rows))])
        self.finish_the_longest()
        self.rows_are_those_of_the_model()

    def join_twin(self) -> None:
        """A sequence of the first row's tokens, which will fill the same blocks in the same steps."""
        original = self.rows[0].model
        slot = next((slot for slot in range(NUM_SLOTS) if self.slots[slot] not in self.rows), None)
        if slot is not None and not original.media and original.computed:
            self.vacate(slot)
            *tokens, last = original.tokens
            real = self.manager.sequence(tokens, namespace=self.rows[0].real.namespace)
            self.slots[slot] = Pair(real, ModelSequence(original.namespace, tokens))
            self.join(slot, 0, last)

    def join(self, slot: int, lookahead: int, token: int = 0) -> None:
        pair = self.running(slot)
        seq = pair.model
        self.write(pair)
        self.commit(pair)
        if len(seq.tokens) == seq.computed:
            self.extend(pair, [token])
        if len(seq.tokens) != seq.computed + 1:
            self.refused(lambda: self.batch.add(pair.real), "a sequence that can't decode")
            return
        if seq.computed == seq.max_length:
            self.refused(lambda: self.batch.add(pair.real), "a sequence that has all its tokens")
            return
        self.try_reserve(pair, 1, lookahead)
        before = fingerprint(self.manager)
        end = self.model.blocks_for(max(seq.computed + 1, seq.reserved)) * self.model.block_size
        joins = self.batch.add(pair.real)
        assert joins == self.model.reserve(seq, 1, end - seq.computed - 1)
        if joins:
            self.rows.append(pair)
        else:
            event("no block for a newcomer")
            assert fingerprint(self.manager) == before, "a refused newcomer changed something"

    def finish_the_longest(self) -> None:
        """No sequence decodes past its declared length."""
        done = [pair for pair in self.rows if pair.model.computed == pair.model.max_length]
        if done:
            self.refused(self.batch.reserve, "a slot past max_length")
            for pair in done:
                self.leave(pair)
                self.manager.truncate(pair.real, pair.model.computed)  # the last token sampled has no slot
                self.model.truncate(pair.model, pair.model.computed)

    def make_room(self) -> bool:
        """Slots for all rows; those who get none are preempted, the last one first."""
        while True:
            expected = [
                pair for pair in self.rows
                if pair.model.reserved == pair.model.computed
                and not self.model.reserve(pair.model, 1, self.model.block_size - 1)
            ]  # fmt: skip
            assert self.batch.reserve() == [pair.real for pair in expected]
            if not expected:
                return bool(self.rows)
            event("a row was preempted")
            self.refused(lambda: self.batch.commit([0] * len(self.rows)), "a step without slots")
            self.release_pair(expected[-1])

    def step_batch(self, sampled: list[int]) -> None:
        self.copy()
        for pair in self.rows:
            entry, offset = divmod(pair.model.computed, self.model.block_size)
            block = pair.model.table[entry]
            assert self.manager.pool.refs(block) == 1, f"block {block} is written and has other owners"
            assert self.manager.pool.content(block) is None, f"block {block} is written and published"
            self.memory[block, offset] = pair.model.prefix(pair.model.computed + 1)
        expected = [(pair.real, *merge) for pair in self.rows for merge in self.model.commit(pair.model, 1)]
        for pair, token in zip(self.rows, sampled, strict=True):
            pair.model.tokens.append(token)
        merges = self.batch.commit(sampled)
        assert [tuple(merge) for merge in merges] == expected
        tables = self.tables()
        for row, pair in enumerate(self.rows):  # without a look at the sequences, which would bring them up to date
            assert [tables[row, entry] for entry in range(len(pair.model.table))] == pair.model.table
        if merges:
            event("merged a duplicate of the batch")

    def tables(self) -> memoryview:
        try:
            return self.batch.block_tables
        except TypeError as error:  # of memoryview, which can't cut them into rows
            raise AssertionError(f"the block tables are no rectangle: {error}") from error

    def rows_are_those_of_the_model(self) -> None:
        assert list(self.batch) == [pair.real for pair in self.rows]
        tables = self.tables()
        for row, pair in enumerate(self.rows):
            table = pair.model.table
            assert [tables[row, entry] for entry in range(len(table))] == table
            self.prompts.append(list(pair.model.tokens))

    @rule(slot=SLOTS)
    def leave_batch(self, slot: int) -> None:
        pair = self.slots[slot]
        if pair in self.rows:
            self.leave(pair)
            self.refused(lambda: self.batch.remove(pair.real), "a second removal")

    @rule(which=st.integers(0, 9), row=st.integers(0, 9))
    def misuse_batch(self, which: int, row: int) -> None:
        """What a batch moves is moved by nobody else."""
        if not self.rows:
            return
        manager, batch, seq = self.manager, self.batch, self.rows[row % len(self.rows)].real
        foreign = BlockManager(1, 1).sequence([0])
        calls: tuple[Callable[[], object], ...] = (
            lambda: manager.reserve(seq, 0),
            lambda: manager.commit(seq, 0),
            lambda: manager.fork(seq),
            lambda: manager.truncate(seq, 1),
            lambda: manager.admit(seq),
            lambda: seq.append(0),
            lambda: batch.add(seq),
            lambda: batch.add(foreign),
            lambda: batch.commit([0] * (len(batch) + 1)),
            lambda: batch.commit([-1] * len(batch)),
        )
        for i in (which, which - 1, which - 2):
            self.refused(calls[i], f"misuse {i} of a batch")
