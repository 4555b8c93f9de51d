"""The snapshot of a manager with a bit of everything, in full."""

from __future__ import annotations

import json

from kvproof.allocator import BlockManager, BlockStored, Namespace


def test_of_everything() -> None:
    manager = BlockManager(9, 2, reserve_null_block=True, events=True, debug=True)
    gone = manager.sequence([7, 7], namespace=Namespace(salt="\ud800"))
    manager.admit(gone)
    manager.commit(gone, 2)
    manager.release(gone)
    seq = manager.sequence([1, 2, 3, 4, 5], max_length=8)
    manager.admit(seq)
    manager.commit(seq, 5)
    manager.pin(seq)
    step = manager.launch([seq])
    child = manager.fork(seq)
    child.append(6)
    manager.reserve(child)
    manager.release(seq)
    names = [block.hex() for event in manager.take_events() if isinstance(event, BlockStored) for block in event.blocks]
    told = manager.snapshot()
    assert told == json.loads(json.dumps(told)) == manager.snapshot()
    assert told == {
        "num_blocks": 9,
        "num_reserved_blocks": 1,
        "block_size": 2,
        "blocks": [
            {"block": 1, "state": "cached", "refs": 0, "content": names[0], "parent": None},
            # The child's table, the pin, and the step that is still running on what was released.
            {"block": 2, "state": "published", "refs": 3, "content": names[1], "parent": None},
            {"block": 3, "state": "published", "refs": 3, "content": names[2], "parent": names[1]},
            {"block": 4, "state": "active", "refs": 1, "content": None, "parent": None},
            {"block": 5, "state": "active", "refs": 1, "content": None, "parent": None},
            *({"block": b, "state": "free", "refs": 0, "content": None, "parent": None} for b in range(6, 9)),
        ],
        "free": [6, 7, 8],
        "cached": [1],
        "sequences": [
            {
                "tokens": 6,
                "computed": 5,
                "reserved": 6,
                "max_length": 8,
                "namespace": {"salt": None, "adapter": None},
                "table": [2, 3, 5],
                "step": None,
            }
        ],
        "pins": [[2, 3]],
        "steps": [{"step": step, "parked": [4, 3, 2]}],
        "copies": [{"source": 4, "destination": 5}],
    }


def test_without_events_content_has_a_number() -> None:
    manager = BlockManager(2, 2)
    seq = manager.sequence([1, 2])
    manager.admit(seq)
    manager.commit(seq, 2)
    told = manager.snapshot()["blocks"]
    assert told == [
        {"block": 0, "state": "published", "refs": 1, "content": 2, "parent": None},
        {"block": 1, "state": "free", "refs": 0, "content": None, "parent": None},
    ]
