"""The simulated cache of the policy benchmarks: LRU is the allocator's, the optimum is that of brute force."""

from __future__ import annotations

import importlib.util
from array import array
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvproof.allocator.replay import replay
from kvproof.allocator.traces import Request, Trace


def load() -> ModuleType:
    file = Path(__file__).parents[1] / "benchmarks" / "simulated_cache.py"
    spec = importlib.util.spec_from_file_location("simulated_cache", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


simulated = load()


def prompts_of(max_prompts: int, depth: int) -> st.SearchStrategy[list[list[int]]]:
    """Walks from the root of a binary tree, each with a last block of its own, as a partial one is."""

    def numbered(walks: list[list[bool]]) -> list[list[int]]:
        numbers: dict[object, int] = {}
        steps = [[*(tuple(walk[: i + 1]) for i in range(len(walk))), i] for i, walk in enumerate(walks)]
        return [[numbers.setdefault(step, len(numbers)) for step in walk] for walk in steps]

    return st.lists(st.lists(st.booleans(), max_size=depth), min_size=1, max_size=max_prompts).map(numbered)


def hits(prompts: list[list[int]], capacity: int, make: Callable[..., Any]) -> int:
    arrays = [np.array(prompt, dtype=np.int32) for prompt in prompts]
    policy = make(arrays, capacity) if make is simulated.Optimum else make()
    return int(simulated.Cache(arrays, capacity, policy).run().sum())


def best(prompts: list[list[int]], capacity: int) -> int:
    """The most hits of all ways to evict no more than must be, any blocks that the prompt does not use."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for prompt in prompts:
        if len(prompt) > capacity:
            continue
        after: dict[frozenset[int], int] = {}
        for cached, before in states.items():
            found = next(i for i, block in enumerate(prompt) if block not in cached)
            others = cached.difference(prompt)
            excess = max(0, len(others) + len(prompt) - capacity)
            for gone in combinations(others, excess):
                state = others.difference(gone).union(prompt)
                after[state] = max(after.get(state, 0), before + found)
        states = after
    return max(states.values())


@given(prompts_of(8, 4), st.integers(1, 9))
def test_belady_is_the_best_of_all_ways(prompts: list[list[int]], capacity: int) -> None:
    assert hits(prompts, capacity, simulated.Optimum) == best(prompts, capacity)


@given(prompts_of(40, 6), st.integers(1, 30))
def test_lru_is_the_allocators(prompts: list[list[int]], capacity: int) -> None:
    trace = Trace(1, [Request(float(i), len(prompt), array("i", prompt)) for i, prompt in enumerate(prompts)])
    assert hits(prompts, capacity, simulated.LRU) == replay(trace, capacity).hit_blocks


class NewestFirst(simulated.LRU):  # type: ignore[name-defined, misc]
    def victim(self, cache: Any) -> tuple[int, int]:
        return int(cache.owners.max()), 2


def test_what_has_lost_its_prefix_takes_no_room() -> None:
    prompts = [[0, 1, 2], [0, 1, 3], [4, 5], [0, 1, 2], [4, 5, 6]]  # the third evicts 3 and 1, and so 2
    arrays = [np.array(prompt, dtype=np.int32) for prompt in prompts]
    assert simulated.Cache(arrays, 4, NewestFirst()).run().tolist() == [0, 2, 0, 1, 1]
