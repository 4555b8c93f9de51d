"""nano-vllm's interface beside its model: what must hold of both, and the steps that bring both forward.

Each sequence exists twice, once for the manager and once for the model, because both write into it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import event
from hypothesis.stateful import RuleBasedStateMachine, invariant

from kvproof.allocator import KvproofError, SequenceStateError
from kvproof.allocator.compat import BlockManager, OutOfBlocks
from kvproof.fuzz.machines.harness import NUM_SLOTS, fingerprint
from kvproof.fuzz.nano import NanoModel, NanoSequence


@dataclass
class Pair:
    """One sequence twice, and how many of its tokens' KV is written."""

    real: NanoSequence
    model: NanoSequence
    num_written: int = 0


class NanoHarness(RuleBasedStateMachine):
    """The attributes are there once the machine has started; `capacity` is in tokens."""

    manager: BlockManager
    model: NanoModel
    capacity: int
    slots: list[Pair | None]
    prompts: list[list[int]]
    memory: dict[tuple[int, int], tuple[int, ...]]

    # ---- invariants

    @invariant()
    def agrees_with_model(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager, model = self.manager, self.model
        findable = model.contents
        assert [block.ref_count for block in manager.blocks] == model.refs
        assert list(manager.free_block_ids) == model.empty[::-1] + model.cached
        assert manager.used_block_ids == {block for block, refs in enumerate(model.refs) if refs}
        assert {block.block_id for block in manager.blocks if block.hash != -1} == set(findable)
        for block_id, content in findable.items():
            block = manager.blocks[block_id]
            assert block.token_ids == list(content[-manager.block_size :])
            assert block.hash == self.chained_hash(content)
        assert set(manager.hash_to_block_id) == {self.chained_hash(content) for content in findable.values()}
        for pair in filter(None, self.slots):
            for field in ("block_table", "num_cached_tokens", "token_ids", "num_tokens"):
                assert getattr(pair.real, field) == getattr(pair.model, field), field

    @invariant()
    def audit_passes(self) -> None:
        if hasattr(self, "manager"):
            self.manager.manager.check()

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        """The content oracle: whatever was written for a sequence, or found for it, is what it reads."""
        for pair in filter(None, getattr(self, "slots", ())):
            for i in range(max(pair.num_written, pair.real.num_cached_tokens)):
                read = self.memory.get(self.place(pair, i))
                assert read == tuple(pair.real.token_ids[: i + 1]), f"token {i} reads {read}"

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for slot in range(NUM_SLOTS):
                self.vacate(slot)
            self.agrees_with_model()
            assert len(self.manager.free_block_ids) == len(self.manager.blocks)
            assert not self.manager.used_block_ids

    # ---- making a slot ready

    def pair(self, prompt: list[int]) -> Pair:
        size = self.manager.block_size
        return Pair(NanoSequence(prompt, size), NanoSequence(prompt, size))

    def occupied(self, slot: int) -> Pair:
        pair = self.slots[slot]
        if pair is None:
            pair = self.slots[slot] = self.pair(self.prompts[-1][: self.capacity])
        return pair

    def running(self, slot: int) -> Pair:
        """An allocated sequence in `slot`; the others make room for it if they must."""
        pair = self.occupied(slot)
        if not pair.real.block_table and not self.try_allocate(pair):
            for other in filter(None, self.slots):
                if other.real.block_table:
                    self.deallocate(other)
            if not self.try_allocate(pair):  # it has outgrown the pool
                self.slots[slot] = None
                pair = self.occupied(slot)
                assert self.try_allocate(pair)
        return pair

    def vacate(self, slot: int) -> None:
        pair = self.slots[slot]
        if pair is not None and pair.real.block_table:
            self.deallocate(pair)
        self.slots[slot] = None

    # ---- the operations

    def try_allocate(self, pair: Pair) -> bool:
        allowed = self.model.can_allocate(pair.model)
        assert self.manager.can_allocate(pair.real) == allowed
        if not allowed:
            event("allocate refused")
            self.refused(lambda: self.manager.allocate(pair.real), OutOfBlocks)
            return False
        self.manager.allocate(pair.real)
        self.model.allocate(pair.model)
        pair.num_written = pair.real.num_cached_tokens
        if pair.num_written:
            event("allocated with a hit")
        self.prompts.append(pair.real.token_ids[:])
        return True

    def try_append(self, pair: Pair) -> None:
        allowed = self.model.can_append(pair.model)
        assert self.manager.can_append(pair.real) == allowed
        num_new = pair.model.num_tokens - len(self.model.scheduled[pair.model])
        if num_new < 0 or (num_new and not self.model.is_unchanged(pair.model)):
            event("changed or dropped tokens refused")
            self.refused(lambda: self.manager.may_append(pair.real), SequenceStateError)
        elif not allowed:
            event("append refused")
            self.refused(lambda: self.manager.may_append(pair.real), OutOfBlocks)
        else:
            self.manager.may_append(pair.real)
            self.model.may_append(pair.model)

    def deallocate(self, pair: Pair) -> None:
        self.manager.deallocate(pair.real)
        self.model.deallocate(pair.model)
        pair.num_written = 0

    def sample(self, pair: Pair, tokens: list[int]) -> None:
        """A step has run, so the tokens that have slots are written, and `tokens` are what it sampled."""
        self.write(pair)
        self.grow(pair, tokens)
        self.prompts.append(pair.real.token_ids[:])  # the next turn of a conversation begins like this

    def grow(self, pair: Pair, tokens: list[int]) -> None:
        for token in tokens[: self.capacity + 1 - pair.real.num_tokens]:
            pair.real.append_token(token)
            pair.model.append_token(token)

    def write(self, pair: Pair) -> None:
        num_scheduled = len(self.model.scheduled[pair.model])
        for i in range(pair.num_written, num_scheduled):
            block = self.manager.blocks[self.place(pair, i)[0]]
            assert block.ref_count == 1, f"block {block.block_id} is written and has {block.ref_count} owners"
            assert block.hash == -1, f"block {block.block_id} is written and findable"
            self.memory[self.place(pair, i)] = tuple(pair.real.token_ids[: i + 1])
        pair.num_written = num_scheduled

    def place(self, pair: Pair, i: int) -> tuple[int, int]:
        return pair.real.block_table[i // self.manager.block_size], i % self.manager.block_size

    def chained_hash(self, content: tuple[int, ...]) -> int:
        hash, size = -1, self.manager.block_size
        for start in range(0, len(content), size):
            hash = self.manager.compute_hash(content[start : start + size], hash)
        return hash

    def refused(self, call: Callable[[], object], error: type[KvproofError]) -> None:
        before = self.everything()
        try:
            call()
        except error as refusal:
            event(f"refused: {type(refusal).__name__}")
        else:
            raise AssertionError("the call was accepted")
        assert self.everything() == before, "a refused call changed something"

    def everything(self) -> object:
        seqs = [pair.real for pair in self.slots if pair is not None]
        tables = [(seq.num_tokens, seq.num_cached_tokens, seq.block_table[:]) for seq in seqs]
        return fingerprint(self.manager.manager), tables
