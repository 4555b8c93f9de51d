"""A state machine for `kvproof.allocator.compat`: nano-vllm's interface against its model and a shadow memory.

Rules are total: a rule whose sequence is in the wrong state brings it to the right one first, so no draw is wasted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from kvproof.allocator import KvproofError, SequenceStateError
from kvproof.allocator.compat import BlockManager
from kvproof.fuzz.machines.harness import NUM_SLOTS, SLOTS, TOKENS
from kvproof.fuzz.machines.nano_harness import NanoHarness
from kvproof.fuzz.nano import NanoModel
from kvproof.fuzz.planted import Fault


def weakened(bits: int) -> type[BlockManager]:
    """The manager with all but the lowest `bits` of its hash cut off; none left makes every block collide."""

    class Weakened(BlockManager):
        @classmethod
        def compute_hash(cls, token_ids: Sequence[int], prefix: int = -1) -> int:
            return BlockManager.compute_hash(token_ids, prefix) & ((1 << bits) - 1)

    return Weakened


class CompatMachine(NanoHarness):
    @initialize(
        num_blocks=st.integers(1, 8),
        block_size=st.sampled_from((1, 1, 2, 3, 4, 4, 64)),
        hash_bits=st.sampled_from((0, 1, 4, 8, 64)),
    )
    def start(self, num_blocks: int, block_size: int, hash_bits: int) -> None:
        self.manager = weakened(hash_bits)(num_blocks, block_size)
        self.model = NanoModel(num_blocks, block_size)
        self.capacity = num_blocks * block_size
        self.slots = [None] * NUM_SLOTS
        self.prompts = [[0]]
        self.memory = {}

    # ---- rules

    @rule(
        slot=SLOTS,
        base=st.integers(0, 7),
        keep=st.none() | st.integers(0, 12),
        suffix=st.lists(st.integers(0, 1), max_size=6),
        repeat=st.sampled_from((1, 1, 1, 40)),
    )
    def allocate(self, slot: int, base: int, keep: int | None, suffix: list[int], repeat: int) -> None:
        """A new sequence, whose prompt usually begins like one that was seen before, and may be too long."""
        self.vacate(slot)
        prompt = (self.prompts[-1 - base % len(self.prompts)][:keep] + suffix * repeat)[: self.capacity + 1] or [0]
        pair = self.slots[slot] = self.pair(prompt)
        self.try_allocate(pair)

    @rule(slot=SLOTS)
    def preempt(self, slot: int) -> None:
        """Given up and allocated again, with what has been generated as part of the prompt."""
        pair = self.running(slot)
        self.deallocate(pair)
        self.try_allocate(pair)

    @rule(slots=st.sets(SLOTS, min_size=1))
    def run_step(self, slots: set[int]) -> None:
        """The KV of all tokens that have slots is written, and nothing is sampled from it yet."""
        for slot in sorted(slots):
            self.write(self.running(slot))

    @rule(slot=SLOTS, tokens=TOKENS)
    def append(self, slot: int, tokens: list[int]) -> None:
        """Tokens are sampled from a finished step, one or several, and get no slot yet."""
        self.sample(self.running(slot), tokens)

    @rule(slot=SLOTS, times=st.integers(1, 2))
    def may_append(self, slot: int, times: int) -> None:
        """Asking twice is asking once."""
        for _ in range(times):
            self.try_append(self.running(slot))

    @rule(slot=SLOTS, tokens=TOKENS)
    def decode(self, slot: int, tokens: list[int]) -> None:
        """nano-vllm's step over everything that runs. All sample alike, so that equal sequences stay equal."""
        self.running(slot)
        batch = [pair for pair in self.slots if pair is not None and pair.real.block_table]
        for pair in batch:
            self.sample(pair, tokens)
        for pair in batch:
            self.try_append(pair)

    @rule(slot=SLOTS, other=SLOTS)
    def stale_answer(self, slot: int, other: int) -> None:
        """`can_allocate` is asked, something else happens, and only then `allocate` follows."""
        pair = self.occupied(slot)
        if pair.real.block_table:
            self.deallocate(pair)
        self.manager.can_allocate(pair.real)
        self.model.can_allocate(pair.model)
        if other != slot:
            self.running(other)
        pair = self.occupied(slot)
        if not pair.real.block_table:
            self.grow(pair, [1])
            self.try_allocate(pair)

    @rule(slot=SLOTS, back=st.integers(1, 6), sampled=st.booleans(), drop=st.booleans())
    def rewrite(self, slot: int, back: int, sampled: bool, drop: bool) -> None:
        """Tokens that have slots are changed or dropped, which the interface does not know."""
        pair = self.running(slot)
        if sampled:
            self.sample(pair, [0])
        i = len(self.model.scheduled[pair.model]) - back
        if i >= 0:
            for seq in (pair.real, pair.model):
                if drop:
                    del seq.token_ids[i:]
                    seq.num_tokens = i
                else:
                    seq.token_ids[i] ^= 1
            pair.num_written = min(pair.num_written, i)  # what lies behind is not what was written
            self.try_append(pair)
            self.vacate(slot)

    @rule(slot=SLOTS)
    def deallocate_twice(self, slot: int) -> None:
        pair = self.running(slot)
        self.vacate(slot)
        self.refused(lambda: self.manager.deallocate(pair.real), SequenceStateError)

    @rule(slot=SLOTS, which=st.integers(0, 11))
    def misuse(self, slot: int, which: int) -> None:
        manager, seq = self.manager, self.running(slot).real
        foreign = self.pair([0]).real
        alias = self.pair(seq.token_ids).real
        alias.block_table = seq.block_table
        shorter = self.pair([0, 0]).real
        shorter.token_ids.pop()
        calls: tuple[tuple[Callable[[], object], type[KvproofError]], ...] = (
            (lambda: manager.allocate(seq), SequenceStateError),
            (lambda: manager.can_allocate(seq), SequenceStateError),
            (lambda: manager.allocate(alias), SequenceStateError),
            (lambda: manager.deallocate(alias), SequenceStateError),
            (lambda: manager.may_append(alias), SequenceStateError),
            (lambda: manager.deallocate(foreign), SequenceStateError),
            (lambda: manager.may_append(foreign), SequenceStateError),
            (lambda: manager.can_append(foreign), SequenceStateError),
            (lambda: manager.allocate(self.pair([]).real), KvproofError),
            (lambda: manager.allocate(self.pair([-1]).real), KvproofError),
            (lambda: manager.can_allocate(self.pair([2**31]).real), KvproofError),
            (lambda: manager.allocate(shorter), KvproofError),
        )
        self.refused(*calls[which])


COMPAT_FAULTS = (
    Fault(
        "slots counted by the remainder",
        BlockManager,
        "_num_missing",
        "-(-seq.num_tokens // self.block_size) - len(entry.allocation.block_table)",
        "int(seq.num_tokens % self.block_size == 1)",
        "block size 1 never has remainder 1, several tokens jump over it (nano-vllm)",
    ),
    Fault(
        "published when allocated",
        BlockManager,
        "allocate",
        "self._unpublished[seq] = entry",
        "self._unpublished[seq] = entry; self._publish(seq, seq.num_tokens)",
        "a request hits a block that another one of its step has not written yet (nano-vllm#208)",
    ),
    Fault(
        "published before the step has run",
        BlockManager,
        "_publish_written",
        "seq.num_tokens <= len(entry.tokens) or ",
        "",
        "whoever asks for a sequence makes the others' unwritten blocks findable",
    ),
    Fault(
        "published by being asked again",
        BlockManager,
        "may_append",
        "if num_tokens == num_written:",
        "if False:",
        "an append that is repeated is taken for the next step (nano-vllm)",
    ),
    Fault(
        "published when aborted",
        BlockManager,
        "deallocate",
        "seq.num_tokens > len(entry.tokens) and ",
        "",
        "blocks of a step that never ran become findable (TensorRT-LLM#12673)",
    ),
    Fault(
        "changed tokens published",
        BlockManager,
        "_is_unchanged",
        "seq.token_ids[first:stop] == entry.tokens[first:]",
        "True",
        "a block is found by tokens that its KV was not computed from (vllm#49377)",
    ),
    Fault(
        "stale answer",
        BlockManager,
        "_candidate",
        " or self._asked[1].tokens != tokens",
        "",
        "allocated as it was when it was asked for (vllm#37076)",
    ),
    Fault(
        "append is not atomic",
        BlockManager,
        "may_append",
        "if num_missing and num_missing > self.manager.num_free:",
        "if False:",
        "the pool is empty, and the sequence goes on without a slot (nano-vllm)",
    ),
    Fault(
        "free is not final",
        BlockManager,
        "deallocate",
        "self._unpublished.pop(seq, None)",
        "pass",
        "what an aborted sequence never wrote waits to be published",
    ),
    Fault(
        "duplicate given back under its table",
        BlockManager,
        "__init__",
        "merge_duplicates=False",
        "merge_duplicates=True",
        "the second of two equal blocks is free, and a table still names it (mini-sglang#142)",
    ),
    Fault(
        "full block forgotten",
        BlockManager,
        "allocate",
        ">= self.block_size",
        "> self.block_size",
        "a prompt of exactly one block is never found again",
    ),
    Fault(
        "hash is not chained",
        BlockManager,
        "_hash_block",
        "(_token_ids(tokens), prefix)",
        "(_token_ids(tokens))",
        "what a block's hash says of its prefix",
    ),
)
