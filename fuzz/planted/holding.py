"""Faults in what else holds blocks, and when it lets go: pins, steps in flight, windows; and looking on."""

from __future__ import annotations

from kvproof.allocator import BlockManager
from kvproof.allocator.flight import Flights
from kvproof.allocator.guard import Guard
from kvproof.fuzz.planted.fault import Fault

HOLDING_FAULTS = (
    Fault(
        "pin holds nothing",
        BlockManager,
        "pin",
        "self.pool.share_all(pin.blocks)",
        "pass",
        "a pinned block is evicted, and unpinned below zero (LMCache#1130)",
    ),
    Fault(
        "unpinned twice",
        BlockManager,
        "unpin",
        "self._pins.remove(pin)",
        "pass",
        "a second unpin frees what another owner holds (LMCache#2954)",
    ),
    Fault(
        "released in flight",
        Flights,
        "drop",
        "if parked is None:",
        "if True:",
        "blocks of a running step are handed out (vllm#47728)",
    ),
    Fault(
        "parked for good",
        Flights,
        "retire",
        "self._pool.release(block)",
        "pass",
        "what a step held is never given back",
    ),
    Fault(
        "retired out of order",
        Flights,
        "retire",
        "step != oldest",
        "step not in self._parked",
        "a later step says that an earlier one is done",
    ),
    Fault(
        "window keeps everything",
        BlockManager,
        "_first_visible",
        "max(0, num_computed - window + 1)",
        "0 * window",
        "blocks that no token sees are never given back",
    ),
    Fault(
        "window off by one",
        BlockManager,
        "_first_visible",
        "num_computed - window + 1",
        "num_computed - window + 2",
        "the oldest visible token loses its block",
    ),
    Fault(
        "window keeps the reference",
        BlockManager,
        "_leave_window",
        "self._flights.drop(seq, left)",
        "pass",
        "the table forgets a block that still counts a reference",
    ),
    Fault(
        "reset while in use",
        BlockManager,
        "reset_prefix_cache",
        "if self.num_used:",
        "if False:",
        "old content is found again when the running sequences end",
    ),
    Fault(
        "a second thread is let in",
        Guard,
        "check_thread",
        "if thread is not owner:",
        "if False:",
        "a server thread aborts a request while the engine thread runs it",
    ),
    Fault(
        "snapshot takes the copies",
        BlockManager,
        "snapshot",
        "return snapshot(self)",
        "told = snapshot(self)\n    self._copies.clear()\n    return told",
        "looking at a manager changes it",
    ),
)
