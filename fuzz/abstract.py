"""The state a machine is in without all that is accidental, so that distinct states can be counted.

Accidental is which block has which number, and which tokens are in it: blocks and contents are numbered in the order in
which sequences, free lists and the rest name them. How far a search got shows in how many states it has seen, and in
whether it still sees new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import xxhash

from kvproof.allocator import BlockManager


def digest(state: object) -> int:
    """64 bits of a state, the same in every process."""
    return xxhash.xxh3_64_intdigest(repr(state).encode())


class _Numbers(dict[object, int]):
    """Numbers things in the order in which they are asked for."""

    def __missing__(self, key: object) -> int:
        self[key] = len(self)
        return self[key]


def manager_state(manager: BlockManager) -> object:
    told: Any = manager.snapshot()
    blocks, contents, steps = _Numbers(), _Numbers(), [step["step"] for step in told["steps"]]

    def place(step: object) -> int | None:
        return steps.index(step) if step in steps else None

    lists = [[seq["table"] for seq in told["sequences"]], told["pins"], [step["parked"] for step in told["steps"]]]
    lists.append([told["free"], told["cached"]])
    tables = [[[blocks[block] for block in table] for table in group] for group in lists]
    by_name = sorted(told["blocks"], key=lambda entry: blocks[entry["block"]])
    return (
        told["block_size"],
        [(seq["tokens"], seq["computed"], seq["reserved"], place(seq["step"])) for seq in told["sequences"]],
        tables,
        [(entry["refs"], contents[entry["content"]], contents[entry["parent"]]) for entry in by_name],
        [(blocks[copy["source"]], blocks[copy["destination"]]) for copy in told["copies"]],
    )


def _pool(machine: Any) -> object:
    pool = machine.pool
    states = [str(pool.state(block)) for block in range(pool.num_blocks)]
    return machine.policy, states, list(machine.refs.values()), pool.free_lists()


def _index(machine: Any) -> object:
    return sorted((repr(path), blocks) for path, blocks in machine.carriers.items())


ABSTRACTIONS: dict[str, Callable[[Any], object]] = {
    "pool": _pool,
    "index": _index,
    "manager": lambda machine: manager_state(machine.manager),
    "compat": lambda machine: manager_state(machine.manager.manager),
    "batch": lambda machine: sorted((row.context, row.query, len(row.table)) for row in machine.rows),
    "attention": lambda machine: manager_state(machine.manager),
    "engine": lambda machine: manager_state(machine.engine.manager),
}
"""By the name of the machine; a machine that is not here has a method `abstract_state`, or its states go uncounted."""


def abstraction(name: str, machine: type) -> Callable[[Any], object] | None:
    return ABSTRACTIONS.get(name) or getattr(machine, "abstract_state", None)
