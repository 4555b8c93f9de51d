"""Events: their exact form, identities that never change, and nothing without being asked for.

That they balance, and that replaying them gives what is findable, is the state machine's part.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvproof.allocator import (
    Admission,
    AllBlocksCleared,
    BlockManager,
    BlockRemoved,
    BlockStored,
    MediaItem,
    MediaPart,
    Namespace,
    Sequence,
)

# Computed once, and the same for ever: other programs keep them.
EXPECTED = [
    "35da769a22f1d22a1fe372ac92e47ca4 1d3e1e26cfe3671201e7f2626ae9d199",
    "6da86dd9f543d60a1bab75b7a9558815 ccd26c8d536fb24395ca281b421d8967",
    "ec5da1e0db46d964055ba7122e64c882 bce53cb62770df0f762596a4cdb220df",
    "f986673f7d356f1b5e4ca39df8d5e686 de6c78ebc44fb70fb50f25f94914961d",
]
GOLDEN = """
import sys
from kvproof.allocator import BlockManager, MediaItem, Namespace

manager = BlockManager(16, 2, events=True)
for namespace, media in [
    (Namespace(), ()),
    (Namespace(salt="x"), ()),
    (Namespace(adapter="x"), ()),
    (Namespace(), (MediaItem("cat", 1, 2),)),
]:
    seq = manager.sequence([1, 2**31 - 1, 3, 4, 5], namespace=namespace, media=media)
    manager.admit(seq)
    manager.commit(seq, 5)
    manager.release(seq)
for event in manager.take_events():
    print(*(block.hex() for block in event.blocks))
"""


def computed(manager: BlockManager, tokens: list[int], **options: object) -> Sequence:
    seq = manager.sequence(tokens, **options)  # type: ignore[arg-type]
    assert manager.admit(seq) is Admission.NOW
    manager.commit(seq, len(tokens) - seq.num_computed)
    return seq


def test_a_prompt_is_one_event_and_what_follows_names_its_parent() -> None:
    manager = BlockManager(8, 2, events=True)
    seq = computed(manager, [1, 2, 3, 4, 5])
    (stored,) = manager.take_events()
    assert isinstance(stored, BlockStored)
    assert stored == BlockStored(stored.blocks, None, (1, 2, 3, 4), 2, Namespace(), ((), ()))
    assert [len(block) for block in stored.blocks] == [16, 16]
    assert manager.take_events() == []
    seq.append(6)
    manager.reserve(seq)
    manager.commit(seq)
    (more,) = manager.take_events()
    assert isinstance(more, BlockStored)
    assert (more.parent, more.token_ids) == (stored.blocks[1], (5, 6))


def test_what_is_findable_already_is_not_stored_again() -> None:
    manager = BlockManager(8, 2, events=True, merge_duplicates=False)
    seqs = [manager.sequence([1, 2, 3]) for _ in range(2)]
    for seq in seqs:
        manager.admit(seq)
    for seq in seqs:
        manager.commit(seq, 3)
    assert len(manager.take_events()) == 1
    manager.release(seqs[0])
    computed(manager, [9] * 11)
    manager.release(seqs[1])
    assert all(isinstance(event, BlockStored) for event in manager.take_events())  # one copy was evicted, one is left


def test_the_last_copy_and_what_hung_on_it_are_removed() -> None:
    manager = BlockManager(4, 1, events=True)
    seq = computed(manager, [1, 2, 3])
    manager.release(seq)
    (stored,) = manager.take_events()
    computed(manager, [8, 9])  # one empty block, and one evicted: the tail
    removed, other = manager.take_events()
    assert isinstance(stored, BlockStored)
    assert removed == BlockRemoved((stored.blocks[2],))
    assert isinstance(other, BlockStored)
    assert other.token_ids == (8, 9)


def test_a_write_into_a_findable_block_removes_its_content() -> None:
    manager = BlockManager(4, 2, events=True)
    seq = computed(manager, [1, 2, 3, 4])
    (stored,) = manager.take_events()
    manager.truncate(seq, 1)
    assert manager.take_events() == []  # it still holds that content
    manager.reserve(seq)
    assert isinstance(stored, BlockStored)
    assert manager.take_events() == [BlockRemoved(stored.blocks)]  # and nobody reaches the second without the first


def test_a_reset_is_one_event() -> None:
    manager = BlockManager(4, 1, events=True)
    manager.release(computed(manager, [1, 2, 3]))
    (stored,) = manager.take_events()
    manager.reset_prefix_cache()
    assert manager.take_events() == [AllBlocksCleared()]
    computed(manager, [1, 2, 3])
    assert manager.take_events() == [stored]


def test_media_are_told_by_block() -> None:
    manager = BlockManager(8, 2, events=True)
    computed(manager, [0] * 6, media=[MediaItem("cat", 1, 2), MediaItem("\ud800", 4, 1)])
    (stored,) = manager.take_events()
    assert isinstance(stored, BlockStored)
    assert stored.media == (
        (MediaPart(1, 0, 1, "cat"),), (MediaPart(0, 1, 1, "cat"),), (MediaPart(0, 0, 1, "\ud800"),)
    )  # fmt: skip


def test_nothing_is_logged_unless_asked_for() -> None:
    manager = BlockManager(4, 1)
    manager.release(computed(manager, [1, 2, 3]))
    manager.reset_prefix_cache()
    assert manager.take_events() == []


@pytest.mark.parametrize("seed", ["0", "1", "12345"])
def test_identities_are_the_same_in_every_process(seed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    told = subprocess.run([sys.executable, "-c", GOLDEN], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.splitlines() == EXPECTED


def test_block_size_is_part_of_identity() -> None:
    stored = []
    for size in (1, 2):
        manager = BlockManager(8, size, events=True)
        computed(manager, [7] * 2)
        stored += [block for event in manager.take_events() if isinstance(event, BlockStored) for block in event.blocks]
    assert len(stored) == len(set(stored)) == 3
