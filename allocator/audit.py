"""The invariants of the specification, checked on a live manager in one pass over everything."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvproof.allocator.errors import InvariantViolation
from kvproof.allocator.pool import BlockState

if TYPE_CHECKING:
    from kvproof.allocator.index import Node
    from kvproof.allocator.manager import BlockManager


def audit(manager: BlockManager) -> None:
    """Raise `InvariantViolation` for the first invariant of docs/specification.md that does not hold.

    What needs the KV itself (I5, I13), an operation's before and after (I8, I10) or a future (I12) can't be seen in a
    state; the state machines in `kvproof.fuzz` check those.
    """
    _references_are_owners(manager)
    _free_list_is_the_unreferenced(manager)
    _index_names_present_content(manager)
    _tables_match_their_sequences(manager)


def _references_are_owners(manager: BlockManager) -> None:
    owners = Counter(block for seq in manager.sequences for block in seq.block_table)
    owners.update(manager.held_otherwise)
    for block in range(manager.pool.num_reserved, manager.pool.num_blocks):
        refs = manager.pool.refs(block)
        if refs != owners[block]:
            raise InvariantViolation("I1", f"block {block} has {refs} references and {owners[block]} owners")


def _free_list_is_the_unreferenced(manager: BlockManager) -> None:
    pool = manager.pool
    empty, cached = pool.free_lists()
    for blocks, state in ((empty, BlockState.FREE), (cached, BlockState.CACHED)):
        if len(set(blocks)) != len(blocks):
            raise InvariantViolation("I2", f"a block is listed twice as {state}: {blocks}")
        for block in blocks:
            if pool.state(block) is not state:
                raise InvariantViolation("I2", f"block {block} is listed as {state} and is {pool.state(block)}")
    listed = len(empty) + len(cached)
    unreferenced = sum(1 for block in range(pool.num_reserved, pool.num_blocks) if pool.refs(block) == 0)
    if not listed == unreferenced == pool.num_free:
        raise InvariantViolation("I2", f"{listed} blocks listed, {unreferenced} unreferenced, {pool.num_free} free")


def _index_names_present_content(manager: BlockManager) -> None:
    pool, index = manager.pool, manager.index
    carried: dict[int, Node] = {}
    alive = set(index.nodes())
    for node in alive:
        for block in node.blocks:
            if block in carried:
                raise InvariantViolation("I3", f"block {block} carries both {carried[block]} and {node}")
            carried[block] = node
    children = {root: root.children for root in index.roots()}
    children |= {node: node.children for node in alive}
    families = {child: parent for parent, family in children.items() for child in family}
    for node in alive:
        parent = node.parent
        if parent is None or families.get(node) != parent:
            raise InvariantViolation("I4", f"{node} is not among the children of a live parent")
        if index.find(parent.number, node.tokens, node.hash) != node.number:
            raise InvariantViolation("I3", f"{node} can't be found by its content")
    for root in index.roots():
        if not root.children:
            raise InvariantViolation("I4", f"{root}, a root, has outlived its children")
    for block in range(pool.num_reserved, pool.num_blocks):
        content = manager._prefixes.content(block)
        if content != carried.get(block):
            raise InvariantViolation("I3", f"block {block} holds {content}, the index says otherwise")


def _tables_match_their_sequences(manager: BlockManager) -> None:
    size, pool = manager.block_size, manager.pool
    for seq in manager.sequences:
        if len(seq.block_table) != -(-seq.num_reserved // size):
            raise InvariantViolation("I7", f"the table does not cover the reserved tokens of {seq}")
        if seq.num_computed > min(seq.num_reserved, len(seq)):
            raise InvariantViolation("I7", f"more is computed than known or reserved of {seq}")
        # Reserved slots that are not computed will be written: their blocks belong to this sequence alone.
        if seq.num_reserved > seq.num_computed:
            for block in seq.block_table[seq.num_computed // size :]:
                if pool.content(block) is not None:
                    raise InvariantViolation("I6", f"block {block} was published before it was computed by {seq}")
                if pool.refs(block) != 1:
                    raise InvariantViolation("I5", f"block {block}, to be written by {seq}, has other owners")
        root = manager.index.root(seq.namespace)
        parent = manager.index.node(root) if root else None
        if seq._batch is not None and not seq._batch._is_in_order(seq):
            raise InvariantViolation("I7", f"its decode batch has lost {seq}")
        for i, block in enumerate(seq.block_table[: seq.num_computed // size]):
            node = manager._prefixes.content(block) if block >= pool.num_reserved else None
            if node is not None:
                if node.namespace != seq.namespace:
                    raise InvariantViolation("I9", f"{seq} of {seq.namespace} reads block {block} of {node.namespace}")
                if node.tokens != seq.key(i, size) or (parent is not None and node.parent != parent):
                    raise InvariantViolation("I3", f"block {block}, entry {i} of {seq}, is published as other content")
            parent = node
