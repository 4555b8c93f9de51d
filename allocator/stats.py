"""Figures about a manager: how full it is, and what its prefix cache has been good for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What has happened since a manager was made. Counters only grow; see `Stats` for each one's meaning."""

    admissions: int = 0
    readmissions: int = 0
    tokens_queried: int = 0
    tokens_hit: int = 0
    published: int = 0
    merged: int = 0
    evictions: int = 0
    residency: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """A manager's figures at one moment. For a rate over a while, subtract the counters of two of these.

    At present:

    num_blocks      blocks that can be handed out
    num_used        of them, those that a sequence, a pin or a step in flight references
    num_free        the rest
    num_cached      of the free ones, those whose content is findable
    num_sequences   admitted

    Since the manager was made:

    admissions      sequences admitted for the first time
    readmissions    sequences admitted again after a release, such as a preemption
    tokens_queried  tokens of the first admissions, when there is prefix caching
    tokens_hit      of them, those found in the cache. A readmission counts in neither: it finds what it had computed
                    itself. Neither does a question (`match`, `can_admit`, a refused `admit`)
    published       blocks that became findable
    merged          blocks given back at commit, because their content was findable already
    evictions       blocks that lost their content to make room, those among them that could no longer be found without
                    their parent; a reset and a write into a block evict nothing
    residency       the sum over all evictions of how long the content was there, in blocks taken from the pool since
                    it was published; the allocator knows no other time
    """

    num_blocks: int
    num_used: int
    num_free: int
    num_cached: int
    num_sequences: int
    admissions: int
    readmissions: int
    tokens_queried: int
    tokens_hit: int
    published: int
    merged: int
    evictions: int
    residency: int

    @property
    def usage(self) -> float:
        """Share of the blocks that is in use, exactly 0.0 when idle."""
        return self.num_used / self.num_blocks

    @property
    def hit_rate(self) -> float:
        """Share of the queried tokens that was found; 0.0 when none was queried."""
        return self.tokens_hit / self.tokens_queried if self.tokens_queried else 0.0

    @property
    def mean_residency(self) -> float:
        """How many blocks were taken while evicted content was there, on average; 0.0 when nothing was evicted."""
        return self.residency / self.evictions if self.evictions else 0.0
