"""Mutants that behave as the original does, by the reason: whoever doubts one can check it there and then."""

from __future__ import annotations

_GROWS = "more = array('i', bytes(self._next.itemsize * (place + place // 2 + 1 - len(self._next))))"
_REBUILDS = "if len(self._heap) > 2 * len(self._entries) + 16:"

_BY_REASON = {
    "how much room for growth is added: any amount that makes place `place` exist will do": (
        f"policy.LRU.insert: {_GROWS} -> {_GROWS.replace('1 - len', '1 + len')}",
        f"policy.LRU.insert: {_GROWS} -> {_GROWS.replace('// 2', '* 2')}",
        f"policy.LRU.insert: {_GROWS} -> {_GROWS.replace('// 2', '// 3')}",
        f"policy.LRU.insert: {_GROWS} -> {_GROWS.replace('+ 1 -', '+ 2 -')}",
    ),
    "numbers that are compared with each other only: where they start and how far apart they are is all one": (
        "policy.FIFO.__init__: self._num_inserted = 0 -> self._num_inserted = 1",
        "policy.FIFO.insert: self._num_inserted += 1 -> self._num_inserted += 2",
    ),
    "when the heap is rebuilt from the entries: before and after, the same entries come out in the same order": (
        f"policy.FIFO.insert: {_REBUILDS} -> {_REBUILDS.replace('>', '>=')}",
        f"policy.FIFO.insert: {_REBUILDS} -> {_REBUILDS.replace('+', '-')}",
        f"policy.FIFO.insert: {_REBUILDS} -> {_REBUILDS.replace('2 *', '3 *')}",
        f"policy.FIFO.insert: {_REBUILDS} -> {_REBUILDS.replace('16', '17')}",
    ),
}

EQUIVALENT = {name: reason for reason, names in _BY_REASON.items() for name in names}
"""The reason by the mutant's name."""
