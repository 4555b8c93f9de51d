"""Our `BlockManager` for an engine that looks a prefix up in one call and admits in another."""

from __future__ import annotations

from kvproof.allocator import Admission, BlockManager, Sequence


class EngineBlocks(BlockManager):
    """A `BlockManager` that leaves two decisions to its caller.

    How much of a findable prefix an admission takes: an engine may have told the request's state by then, and some
    requests must not read the cache. And when a window lets go of a block: what is committed may be written by a step
    that is still to read the blocks before its window.
    """

    _limit: int | None = None

    def hits(self, seq: Sequence) -> list[int]:
        """The blocks of the sequence's longest findable prefix, short of its last token. Changes nothing."""
        self._own(seq)
        return self._hits(seq)

    def identity(self, block: int) -> bytes | None:
        """What the events call `block`'s content; None if it is not findable. For a manager that keeps events."""
        node, events = self.content(block), self._prefixes.events
        return None if node is None or events is None else events.identity(node)

    def admit_after(self, seq: Sequence, num_hits: int, num_tokens: int) -> bool:
        """Admit on the first `num_hits` blocks of the findable prefix, with slots for at most `num_tokens` after it."""
        self._limit = num_hits
        try:
            return self.admit(seq, num_tokens) is Admission.NOW
        finally:
            self._limit = None

    def leave_window(self, seq: Sequence, num_processed: int) -> None:
        """Give up the blocks that no step will read once this many tokens have been processed."""
        if self.window is not None:
            super()._leave_window(seq, self.window + seq.num_computed - num_processed)

    def _hits(self, seq: Sequence) -> list[int]:
        return super()._hits(seq)[: self._limit]

    def _leave_window(self, seq: Sequence, window: int) -> None:
        """Not at commit."""

    def _lifetime(self, seq: Sequence) -> int:
        """A window may be passed through a pool that is smaller than the sequence: the caller decides what fits."""
        return 1 if self.window is not None else super()._lifetime(seq)
