"""A state machine for allocator and attention backend together.

Sequences are admitted, computed in steps of any mixture, forked, truncated and preempted. Whatever the allocator does
with their blocks, each attends to its own history, and to all of it: the output of every step is compared with dense
attention over that history, computed per sequence in float64. As in a model, the keys and values of a token depend on
all tokens before it, so a block with the right tokens behind the wrong prefix shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from zlib import crc32

import torch
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from kvproof.allocator import Admission, BlockManager, Sequence
from kvproof.attention import AttentionBackend, CacheSpec, Layout
from kvproof.attention.torch_paged import TorchAttention
from kvproof.fuzz.conformance.batches import LAYOUTS, Row
from kvproof.fuzz.conformance.driving import NAN, assert_right, step
from kvproof.fuzz.machines.harness import NAMESPACES, NUM_SLOTS, SLOTS, TOKENS

LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 2, 2, 1, 4
MAX_LENGTH = 24


@lru_cache(maxsize=100_000)
def qkv(namespace: int, prefix: tuple[int, ...]) -> Tensor:
    """Queries, keys and values of the last token of `prefix`, [layers, heads + 2 * kv_heads, head_size]."""
    generator = torch.Generator().manual_seed(crc32(bytes((namespace, *prefix))))
    return torch.randn(LAYERS, HEADS + 2 * KV_HEADS, HEAD_SIZE, generator=generator)


@dataclass
class Running:
    """A sequence in the manager, with the tokens that the machine knows it has."""

    seq: Sequence
    namespace: int
    tokens: list[int]
    admitted: bool = False

    def row(self, n: int) -> Row:
        """The next `n` tokens as a row of a step."""
        start, stop = self.seq.num_computed, self.seq.num_computed + n
        history = torch.stack([qkv(self.namespace, tuple(self.tokens[: i + 1])) for i in range(stop)], dim=1)
        q, k, v = torch.split(history, [HEADS, KV_HEADS, KV_HEADS], dim=2)
        return Row(tuple(self.seq.block_table), q[:, start:], k, v)


class AttentionMachine(RuleBasedStateMachine):
    """Runs `backend` on the blocks of `make_manager`. Uses the public interface of both and nothing else."""

    backend: type[AttentionBackend] = TorchAttention
    make_manager: Callable[..., BlockManager] = staticmethod(BlockManager)

    @initialize(
        num_blocks=st.integers(1, 10),
        block_size=st.sampled_from((1, 2, 3, 4, 16)),
        layout=st.sampled_from(LAYOUTS),
        caching=st.sampled_from((True, True, True, False)),
        merge=st.booleans(),
    )
    def start(self, num_blocks: int, block_size: int, layout: Layout, caching: bool, merge: bool) -> None:
        spec = CacheSpec(
            num_layers=LAYERS,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_size=HEAD_SIZE,
            dtype="float32",
            num_blocks=num_blocks,
            block_size=block_size,
            layout=layout,
        )
        self.attention = self.backend(spec)
        self.attention.cache.fill_(NAN)
        self.manager = self.make_manager(num_blocks, block_size, prefix_caching=caching, merge_duplicates=merge)
        self.longest = min(MAX_LENGTH, num_blocks * block_size)
        self.slots: list[Running | None] = [None] * NUM_SLOTS
        self.prompts: list[list[int]] = [[0]]

    # ---- rules

    @rule(
        slot=SLOTS,
        base=st.integers(0, 7),
        keep=st.none() | st.integers(0, 12),
        suffix=st.lists(st.integers(0, 1), max_size=6),
        namespace=st.sampled_from((0, 0, 0, 1)),
    )
    def admit(self, slot: int, base: int, keep: int | None, suffix: list[int], namespace: int) -> None:
        """A new sequence, whose prompt usually begins like one that was seen before."""
        self.release(slot)
        prompt = (self.prompts[-1 - base % len(self.prompts)][:keep] + suffix)[: self.longest] or [0]
        self.prompts.append(prompt)
        self.slots[slot] = self.new(prompt, namespace)
        self.running(slot)

    @rule(slot=SLOTS)
    def preempt(self, slot: int) -> None:
        """By recompute: released, and admitted again with what was generated as part of its prompt."""
        it = self.running(slot)
        self.manager.release(it.seq)
        it.admitted = False
        self.running(slot)

    @rule(
        slots=st.sets(SLOTS, min_size=1),
        chunk=st.none() | st.integers(1, 5),
        token=st.integers(0, 1),
        dies=st.sampled_from((False, False, False, True)),
    )
    def step(self, slots: set[int], chunk: int | None, token: int, dies: bool) -> None:
        """A step over several sequences; those that have nothing left to compute have sampled `token`."""
        batch = [it for slot in sorted(slots) if (it := self.slots[slot]) is not None and it.admitted]
        for it in batch:
            if it.seq.num_computed == len(it.tokens) < self.longest:
                self.extend(it, [token])
        self.compute(batch, chunk, dies)

    @rule(slot=SLOTS, tokens=TOKENS)
    def sample(self, slot: int, tokens: list[int]) -> None:
        """Several tokens become known at once, as accepted drafts do."""
        self.extend(self.running(slot), tokens)

    @rule(slot=SLOTS, to=SLOTS)
    def fork(self, slot: int, to: int) -> None:
        it = self.running(slot)
        self.compute([it])
        if slot != to and it.seq.num_reserved == it.seq.num_computed:
            self.release(to)
            self.slots[to] = Running(self.manager.fork(it.seq), it.namespace, list(it.tokens), admitted=True)
            event("forked")

    @rule(slot=SLOTS, back=st.integers(0, 9), tokens=TOKENS | st.just([]))
    def truncate(self, slot: int, back: int, tokens: list[int]) -> None:
        """Drafts are rejected, and it goes on with `tokens`."""
        it = self.running(slot)
        length = max(1, len(it.tokens) - back)
        self.manager.truncate(it.seq, length)
        del it.tokens[length:]
        self.extend(it, tokens)

    @rule(slot=SLOTS)
    def release(self, slot: int) -> None:
        it, self.slots[slot] = self.slots[slot], None
        if it is not None and it.admitted:
            self.manager.release(it.seq)

    # ---- what the rules stand on

    def new(self, prompt: list[int], namespace: int) -> Running:
        seq = self.manager.sequence(prompt, namespace=NAMESPACES[namespace])
        return Running(seq, namespace, list(prompt))

    def extend(self, it: Running, tokens: Iterable[int]) -> None:
        tokens = list(tokens)[: max(0, self.longest - len(it.tokens))]
        it.seq.extend(tokens)
        it.tokens += tokens
        self.prompts.append(list(it.tokens))

    def running(self, slot: int) -> Running:
        """The sequence in `slot`, admitted; the others make room for it if they must."""
        it = self.slots[slot] = self.slots[slot] or self.new(self.prompts[-1], 0)
        if not it.admitted and self.manager.admit(it.seq) is not Admission.NOW:
            for other in range(NUM_SLOTS):
                if other != slot:
                    self.release(other)
            assert self.manager.admit(it.seq) is Admission.NOW, "a sequence that has the pool to itself is refused"
        if not it.admitted and it.seq.num_computed:
            event("prefix hit")
        it.admitted = True
        return it

    def compute(self, batch: list[Running], chunk: int | None = None, dies: bool = False) -> None:
        """Compute the next `chunk` tokens of each, or all; those that get no blocks wait."""
        work = []
        for it in batch:
            n = len(it.tokens) - it.seq.num_computed
            n = n if chunk is None else min(n, chunk)
            if n and self.manager.reserve(it.seq, n):
                work.append((it, n))
        copies = self.manager.take_copies()
        if copies:
            event("copied on write")
        self.attention.copy_blocks(copies)
        if work:
            rows = [it.row(n) for it, n in work]
            assert_right(self.attention.spec, rows, step(self.attention, rows))
        if not dies:
            for it, n in work:
                self.manager.commit(it.seq, n)

    @invariant()
    def allocator_is_sound(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check()

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for slot in range(NUM_SLOTS):
                self.release(slot)
            assert self.manager.num_used == 0
