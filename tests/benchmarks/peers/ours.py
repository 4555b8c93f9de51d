"""Our allocator as the benchmarks drive it, sequence by sequence and in a batch."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows

from kvproof.allocator import Admission, BlockManager
from kvproof.allocator.hashing import HashBlock, xxh3_chained
from kvproof.allocator.sequence import Sequence


class PerSequence:
    def __init__(self, num_blocks: int, block_size: int, hash_block: HashBlock = xxh3_chained) -> None:
        self.manager = BlockManager(num_blocks, block_size, hash_block=hash_block)

    def fill(self) -> None:
        """Give every block cached content, so that from now on each new block evicts another's."""
        manager = self.manager
        for start in range(0, manager.num_blocks, 4096):
            num_tokens = min(4096, manager.num_blocks - start) * manager.block_size
            seq = manager.sequence(range(start * manager.block_size, start * manager.block_size + num_tokens))
            assert manager.admit(seq) is Admission.NOW
            manager.commit(seq, num_tokens)
            manager.release(seq)
        assert manager.stats().num_cached == manager.num_blocks

    def admit(self, prompt: list[int], sampled: int) -> Sequence:
        manager = self.manager
        seq = manager.sequence(prompt)
        assert manager.admit(seq) is Admission.NOW
        manager.commit(seq, len(prompt) - seq.num_computed)
        seq.append(sampled)
        return seq

    def rows(self, running: Iterable[Sequence]) -> Rows[Sequence]:
        return list(running)

    def step(self, rows: Rows[Sequence], sampled: list[int]) -> None:
        manager = self.manager
        for seq, token in zip(rows, sampled, strict=True):
            assert manager.reserve(seq)
            manager.commit(seq)
            seq.append(token)

    def release(self, seq: Sequence) -> None:
        self.manager.release(seq)

    def table(self, seq: Sequence) -> Rows[int]:
        return seq.block_table

    def hit_tokens(self, seq: Sequence) -> int:
        return seq.num_cached


class Batched(PerSequence):
    """Joining the batch counts as admission, and leaving it as release."""

    def __init__(self, num_blocks: int, block_size: int, capacity: int) -> None:
        super().__init__(num_blocks, block_size)
        self.batch = self.manager.decode_batch(capacity)

    def admit(self, prompt: list[int], sampled: int) -> Sequence:
        seq = super().admit(prompt, sampled)
        assert self.batch.add(seq)
        return seq

    def rows(self, running: Iterable[Sequence]) -> Rows[Sequence]:
        return list(self.batch)

    def step(self, rows: Rows[Sequence], sampled: list[int]) -> None:
        assert not self.batch.reserve()
        self.batch.commit(sampled)
