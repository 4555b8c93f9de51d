"""What eviction policies find in a prefix cache on real traces, against LRU and the offline optimum.

    KVPROOF_TRACES=folder python tests/benchmarks/policies.py [--whole] [--capacities 4000,16000] [conversation]

prints a table of docs/policies.md: hit rates and, in brackets, the share closed of the gap between LRU and the optimum;
then the mean of the shares, and the least gain over LRU in points. What is learned is learned on the first half of the
requests, and the figures are of the second half, before which every policy has run through the first. With `--whole`
they are of all requests, from an empty cache, and only of the policies that learn nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from simulated_cache import LRU, NEVER, UNLIMITED, Cache, Ints, Optimum, Prompts, Stretches, next_uses

from kvproof.allocator.traces import read_trace

TRACES = Path(os.environ.get("KVPROOF_TRACES") or Path(__file__).resolve().parents[3] / "shared" / "traces")
FILES = {
    "conversation": (TRACES / "mooncake" / "conversation_trace.jsonl", [1_000, 4_000, 16_000, 32_000, 64_000]),
    "agentic": (TRACES / "claude_code" / "sessions.jsonl.gz", [5_000, 10_000, 20_000, 35_000, 50_000]),
}

LAST, NEW, FOUND = range(3)  # the parts of a prompt
AGES = np.concatenate(([0], 2.0 ** np.arange(3, 24, 0.5)))
Class = tuple[int, ...]
Rates = dict[Class, NDArray[np.float64]]


class LastBlockFirst(LRU):
    """LRU, but the last block of each prompt goes first: mostly a partial one, which a real cache would not hold."""

    def victim(self, cache: Cache) -> tuple[int, int]:
        owners = cache.owners
        whole = owners[cache.stop[owners] == cache.lengths[owners]]
        return (int(whole.min()), 1) if len(whole) else super().victim(cache)


class Classes(LRU):
    """Sorts each prompt's parts into classes, by what the cache can see of it.

    last   the last block
    new    computed by this request: whether it is a later turn (more than a block was found), how much is new, and,
           with `by_gap`, how long the turn before has waited for this one
    found  how often its last block was found, and how much is new behind it
    """

    def __init__(self, by_gap: bool) -> None:
        self.by_gap = by_gap
        self.of: dict[int, tuple[Class, Class, Class]] = {}  # of each request's parts
        self.found: dict[int, int] = {}  # blocks of each request
        self._times = defaultdict[int, int](int)  # a block was found

    def admit(self, cache: Cache, request: int, found: Stretches) -> None:
        prompt = cache.prompts[request]
        num_found = min(found[-1][2], len(prompt) - 1) if found else 0
        for block in prompt[:num_found].tolist():
            self._times[block] += 1
        for block in prompt[num_found:].tolist():
            self._times[block] = 0
        later_turn = num_found > 1
        much = (len(prompt) - num_found).bit_length()
        kind: Class = (NEW, later_turn, min(much, 8))
        if later_turn and self.by_gap:
            gap = int(cache.clock[request] - cache.clock[found[-1][0]])
            kind = (NEW, True, min(much, 4), min(max(gap.bit_length(), 10), 17))
        times = self._times[int(prompt[num_found - 1])] if num_found else 0
        self.of[request] = ((LAST,), kind, (FOUND, min(times, 6), min(much, 5)))
        self.found[request] = num_found


def expected_rates(prompts: Prompts, by_gap: bool) -> Rates:
    """Of each class at each of `AGES`: the most hits a block can be expected to bring for the time it is kept.

    The most over all times for which it might be kept, which is Gittins' index. Learned where nothing is evicted.
    """
    classes = remembered(prompts, by_gap)
    clock = np.cumsum([len(prompt) for prompt in prompts])
    waits = defaultdict[Class, list[float]](list)
    for request, uses in enumerate(next_uses(prompts, UNLIMITED)):
        last, found = len(uses) - 1, classes.found[request]
        at = {LAST: last, NEW: last - 1 if last - 1 >= found else -1, FOUND: found - 1}
        for part, place in at.items():
            if place >= 0:
                use = int(uses[place])
                hit = use != NEVER and (part != LAST or len(prompts[use]) > place + 1)
                wait = float(clock[use] - clock[request]) if hit else np.inf
                waits[classes.of[request][part]].append(wait)
    return {name: _index(np.sort(values)) for name, values in waits.items()}


def _index(waits: NDArray[np.float64]) -> NDArray[np.float64]:
    rates = np.zeros(len(AGES))
    for i, age in enumerate(AGES):
        left = waits[waits > age] - age
        if len(left) < 10:  # too few to tell
            rates[i] = rates[i - 1] / 2 if i else 0
            continue
        sums = np.concatenate(([0.0], np.cumsum(left[np.isfinite(left)])))
        limits = AGES[i + 1 :] - age
        hits = np.searchsorted(left, limits, side="right")
        rates[i] = max(hits / (sums[hits] + (len(left) - hits) * limits), default=0.0)
    return rates


class ExpectedRate(LRU):
    """Evicts the tail of which the fewest hits are to be expected; among equals the oldest.

    classes  of what this cache finds, or, filled already, of what one found that evicts nothing
    """

    def __init__(self, num_requests: int, rates: Rates, classes: Classes) -> None:
        self._classes, self._remembers = classes, bool(classes.of)
        self._table = np.stack([np.zeros(len(AGES)), *rates.values()])  # row 0: a class that was not seen
        self._row = {name: row for row, name in enumerate(rates, 1)}
        self._rows = np.zeros((num_requests, 3), dtype=np.int64)
        self._found: Ints = np.zeros(num_requests, dtype=np.int64)

    def admit(self, cache: Cache, request: int, found: Stretches) -> None:
        if not self._remembers:
            self._classes.admit(cache, request, found)
        self._rows[request] = [self._row.get(name, 0) for name in self._classes.of[request]]
        self._found[request] = self._classes.found[request]
        self._now = int(cache.clock[request])

    def victim(self, cache: Cache) -> tuple[int, int]:
        owners = cache.owners
        stop, found, age = cache.stop[owners], self._found[owners], self._now - cache.clock[owners]
        part = np.where(stop == cache.lengths[owners], LAST, np.where(stop > found, NEW, FOUND))
        rate = self._table[self._rows[owners, part], np.minimum(np.searchsorted(AGES, age), len(AGES) - 1)]
        i = int((rate - 1e-12 * age).argmin())
        return int(owners[i]), (1, int(stop[i] - found[i]), UNLIMITED)[part[i]]


def remembered(prompts: Prompts, by_gap: bool) -> Classes:
    classes = Classes(by_gap)
    Cache(prompts, UNLIMITED, classes).run()
    return classes


def policies(prompts: Prompts, learn: bool) -> dict[str, Callable[[int], LRU]]:
    """By name, each policy for a capacity."""
    made: dict[str, Callable[[int], LRU]] = {
        "LRU": lambda _: LRU(),
        "optimum": lambda capacity: Optimum(prompts, capacity),
        "last block first": lambda _: LastBlockFirst(),
    }
    for by_gap, name in ((False, "expected rate"), (True, "expected rate, gaps")) if learn else ():
        rates = expected_rates(prompts[: len(prompts) // 2], by_gap)
        made[name] = partial(_with_classes, prompts, rates, partial(Classes, by_gap))
        made[f"{name}, memory"] = partial(_with_classes, prompts, rates, partial(remembered, prompts, by_gap))
    return made


def _with_classes(prompts: Prompts, rates: Rates, classes: Callable[[], Classes], _: int) -> LRU:
    return ExpectedRate(len(prompts), rates, classes())


def write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="*", choices=[*FILES, []], help="both by default")
    parser.add_argument("--whole", action="store_true", help="count all requests, not the second half")
    parser.add_argument("--capacities", help="blocks, separated by commas")
    options = parser.parse_args()
    for trace in options.trace or FILES:
        file, capacities = FILES[trace]
        if options.capacities:
            capacities = [int(capacity) for capacity in options.capacities.split(",")]
        prompts = [np.array(request.blocks, dtype=np.int32) for request in read_trace(file).requests]
        first = 0 if options.whole else len(prompts) // 2
        blocks = sum(map(len, prompts[first:]))
        write(f"\n| {trace} | {' | '.join(f'{capacity:,}' for capacity in capacities)} | share | worst |")
        write(f"| --- |{' ---: |' * (len(capacities) + 2)}")
        rates: dict[str, NDArray[np.float64]] = {}
        for name, policy in policies(prompts, learn=not options.whole).items():
            hits = [Cache(prompts, capacity, policy(capacity)).run()[first:].sum() for capacity in capacities]
            rates[name] = np.array(hits) / blocks
            row = " | ".join(f"{rate:.4f}" for rate in rates[name])
            if name in ("LRU", "optimum"):
                write(f"| {name} | {row} | | |")
                continue
            gain = rates[name] - rates["LRU"]
            share = gain / (rates["optimum"] - rates["LRU"])
            row = " | ".join(f"{rate:.4f} ({part:+.2f})" for rate, part in zip(rates[name], share, strict=True))
            write(f"| {name} | {row} | {share.mean():+.2f} | {100 * gain.min():+.1f} |")


if __name__ == "__main__":
    main()
