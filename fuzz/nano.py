"""nano-vllm's `BlockManager` as a model: what `kvproof.allocator.compat` must do, slow and simple.

Nothing here is shared with the implementation. A block's identity is the whole tuple of tokens up to its end, so
nothing can collide, and every question is answered by looking at everything.
"""

from __future__ import annotations


class NanoSequence:
    """nano-vllm's `Sequence`, as far as its block manager and its model runner read and write it."""

    def __init__(self, token_ids: list[int], block_size: int) -> None:
        self.block_size = block_size
        self.token_ids = list(token_ids)
        self.num_tokens = len(token_ids)
        self.num_cached_tokens = 0
        self.block_table: list[int] = []

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.block_size)

    @property
    def last_block_num_tokens(self) -> int:
        return self.num_tokens - (self.num_blocks - 1) * self.block_size

    def block(self, i: int) -> list[int]:
        return self.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.num_tokens += 1


class NanoModel:
    """The interface's behaviour. `can_...` say whether the operation of that name may be called; it trusts its caller.

    Blocks without content are taken first, the last freed first; then cached ones, the first freed first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.refs = [0] * num_blocks
        self.empty = list(range(num_blocks))[::-1]  # taken from the end
        self.cached: list[int] = []  # taken from the front
        self.contents: dict[int, tuple[int, ...]] = {}  # of findable blocks, in the order of their publication
        self.scheduled: dict[NanoSequence, tuple[int, ...]] = {}  # tokens that had slots when last asked for
        self.published: dict[NanoSequence, int] = {}  # blocks
        self.waiting: list[NanoSequence] = []  # to publish, in the order in which their blocks filled

    def can_allocate(self, seq: NanoSequence) -> bool:
        self.publish_written()
        hits = self.hits(seq)
        revived = sum(1 for block in hits if self.refs[block] == 0)
        return seq.num_blocks - len(hits) + revived <= self.num_free

    def allocate(self, seq: NanoSequence) -> None:
        hits = self.hits(seq)
        for block in hits:
            if block in self.cached:
                self.cached.remove(block)
            self.refs[block] += 1
        seq.block_table = hits + [self.take() for _ in range(seq.num_blocks - len(hits))]
        seq.num_cached_tokens = len(hits) * self.block_size
        self.published[seq] = len(hits)
        self.schedule(seq)

    def can_append(self, seq: NanoSequence) -> bool:
        return seq.num_blocks - len(seq.block_table) <= self.num_free

    def may_append(self, seq: NanoSequence) -> None:
        if seq.num_tokens > len(self.scheduled[seq]):
            while len(seq.block_table) < seq.num_blocks:
                seq.block_table.append(self.take())
            self.publish(seq)
            self.schedule(seq)

    def deallocate(self, seq: NanoSequence) -> None:
        if seq.num_tokens > len(self.scheduled[seq]) and self.is_unchanged(seq):
            self.publish(seq)
        for block in reversed(seq.block_table):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                (self.cached if block in self.contents else self.empty).append(block)
        seq.block_table = []
        seq.num_cached_tokens = 0
        del self.scheduled[seq], self.published[seq]
        self.waiting = [other for other in self.waiting if other is not seq]

    # ---- what it is made of

    @property
    def num_free(self) -> int:
        return len(self.empty) + len(self.cached)

    def hits(self, seq: NanoSequence) -> list[int]:
        """One block per findable leading block, a referenced one if there is, never the whole sequence."""
        hits = []
        for end in range(self.block_size, seq.num_tokens, self.block_size):
            carriers = [block for block, content in self.contents.items() if content == tuple(seq.token_ids[:end])]
            if not carriers:
                break
            hits.append(([block for block in carriers if self.refs[block]] or carriers)[0])
        return hits

    def take(self) -> int:
        block = self.empty.pop() if self.empty else self.cached.pop(0)
        self.contents.pop(block, None)
        self.refs[block] = 1
        return block

    def is_unchanged(self, seq: NanoSequence) -> bool:
        """Whether the tokens of the blocks that wait to be published are those that were written."""
        first = self.published[seq] * self.block_size
        written = self.scheduled[seq]
        return seq not in self.waiting or tuple(seq.token_ids[first : len(written)]) == written[first:]

    def schedule(self, seq: NanoSequence) -> None:
        """All tokens have slots, and the next step writes them."""
        self.scheduled[seq] = tuple(seq.token_ids)
        if seq.num_tokens // self.block_size > self.published[seq] and seq not in self.waiting:
            self.waiting.append(seq)

    def publish_written(self) -> None:
        while self.waiting:
            seq = self.waiting[0]
            if seq.num_tokens <= len(self.scheduled[seq]) or not self.is_unchanged(seq):
                break
            self.publish(seq)

    def publish(self, seq: NanoSequence) -> None:
        """The tokens that had slots have been written."""
        self.waiting = [other for other in self.waiting if other is not seq]
        written = self.scheduled[seq]
        for i in range(self.published[seq], len(written) // self.block_size):
            self.contents[seq.block_table[i]] = written[: (i + 1) * self.block_size]
            self.published[seq] = i + 1
