"""Faults in decoding in a batch."""

from __future__ import annotations

from kvproof.allocator.batch import DecodeBatch
from kvproof.fuzz.planted.fault import Fault

BATCH_FAULTS = (
    Fault(
        "another row's tokens",
        DecodeBatch,
        "_settle",
        "seq._row ::",
        "0 ::",
        "sampled tokens go to the wrong sequence",
    ),
    Fault(
        "a row moves with its log behind it",
        DecodeBatch,
        "_remove",
        "self._settle(last)",
        "pass",
        "the last row takes another's place, and reads that one's tokens",
    ),
    Fault(
        "log written over what is owed",
        DecodeBatch,
        "commit",
        "self._num_steps % self._log_steps * self._capacity",
        "0",
        "tokens that nobody has looked at yet are lost",
    ),
    Fault(
        "a row falls behind the log",
        DecodeBatch,
        "_schedule",
        ", self._log_steps)",
        ")",
        "a sequence with large blocks gets tokens of later steps",
    ),
    Fault(
        "a row steps without a slot",
        DecodeBatch,
        "commit",
        "if self._starved:",
        "if False:",
        "KV is written past the table's end, into somebody else's block",
    ),
    Fault(
        "window forgotten in a batch",
        DecodeBatch,
        "_schedule",
        "if window is not None:",
        "if False:",
        "blocks leave the window late",
    ),
    Fault(
        "block tables of a batch miss a merge",
        DecodeBatch,
        "_publish_row",
        "self._tables[seq._row * self._num_columns + merge.entry] = merge.new",
        "pass",
        "attention reads a block that was given back (mini-sglang#142)",
    ),
    Fault(
        "block end missed in a batch",
        DecodeBatch,
        "_schedule",
        "size - seq._num_computed % size, ",
        "size, ",
        "slots that were reserved ahead hide that a block is full",
    ),
    Fault(
        "slots ahead end inside a block",
        DecodeBatch,
        "add",
        "max(seq._num_computed + 1, seq._num_reserved)",
        "seq._num_computed + 1",
        "a whole block is added behind a half-filled one; found in review, not by us",
    ),
)
