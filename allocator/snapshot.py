"""A manager's whole state as plain data, for those who look for what went wrong."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvproof.allocator.index import Node
    from kvproof.allocator.manager import BlockManager


def snapshot(manager: BlockManager) -> dict[str, object]:
    """Everything that decides what `manager` will do next, in terms that JSON has. Changes nothing. O(pool).

    Content is named by its exported identity, in hexadecimal, when there are events; else by its node's number, which
    means nothing outside this manager.
    """
    pool = manager.pool
    free, cached = pool.free_lists()
    return {
        "num_blocks": pool.num_blocks,
        "num_reserved_blocks": pool.num_reserved,
        "block_size": manager.block_size,
        "blocks": [
            {
                "block": block,
                "state": pool.state(block).value,
                "refs": pool.refs(block),
                "content": _name(manager, manager._prefixes.content(block)),
                "parent": _name(manager, _parent(manager._prefixes.content(block))),
            }
            for block in range(pool.num_reserved, pool.num_blocks)
        ],
        "free": free,
        "cached": cached,
        "sequences": [
            {
                "tokens": len(seq),
                "computed": seq.num_computed,
                "reserved": seq.num_reserved,
                "max_length": seq.max_length,
                "namespace": asdict(seq.namespace),
                "table": list(seq.block_table),
                "step": seq._flight,
            }
            for seq in manager.sequences
        ],
        "pins": sorted(list(pin.blocks) for pin in manager._pins),
        "steps": [{"step": step, "parked": blocks} for step, blocks in manager._flights.steps.items()],
        "copies": [{"source": source, "destination": to} for to, source in manager._copies.items()],
    }


def _parent(node: Node | None) -> Node | None:
    """None for a first block's: a root is not content."""
    parent = None if node is None else node.parent
    return None if parent is None or parent.parent is None else parent


def _name(manager: BlockManager, node: Node | None) -> str | int | None:
    if node is None:
        return None
    events = manager._prefixes.events
    return node.uid if events is None else events.identity(node).hex()
