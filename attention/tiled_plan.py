"""How a step's attention is cut into items for the matrix unit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

SPAN = 256
"""Tokens that a query's scores are kept of at once."""

ITEMS_PER_THREAD = 4
"""So many are enough for the threads to end at about the same time."""


class Items(NamedTuple):
    """What `tiled.c` calls by these names. Tokens that have no parts are whole in their only item."""

    items: Ints  # [num_items, 5]: first, count, first_span, end_span, part
    members: Ints
    first_parts: Ints  # [T]
    num_parts: Ints  # [T]


def cut(
    qo_indptr: Ints,
    kv_indptr: Ints,
    kv_indices: Ints,
    starts: Ints,
    ends: Ints,
    *,
    decodes: int,
    block_size: int,
    threads: int,
    least: int,
    most: int,
) -> Items:
    """Cut a step into items of at most `most` tokens. Token t sees the positions starts[t] to ends[t] of its row.

    A prefill's tokens are whole in items of neighbours. A decode is whole in an item of its own, unless that would keep
    a thread busy for too long: then each of its spans is an item, and a part. Rows that name the same blocks from their
    first span on go through those spans in one item, which is their first part, or in several of at least `least` rows.
    """
    first_spans, end_spans = starts // SPAN, -(-ends // SPAN)
    spans = end_spans[:decodes] - first_spans[:decodes]
    together = np.zeros(decodes, dtype=np.int32)  # spans from the first on that a row goes through with others
    members, several = [np.arange(len(ends), dtype=np.int32)], []
    num_members = len(ends)
    for end, rows in shared_runs(kv_indptr, kv_indices, starts[:decodes], ends[:decodes], block_size):
        together[rows] = end - first_spans[rows]
        size = min(max(-(-len(rows) // threads), least), most)
        for part in np.split(rows, range(size, len(rows), size)):
            several.append((num_members, len(part), first_spans[rows[0]], end, 0))
            members.append(part)
            num_members += len(part)
    for start, end in zip(qo_indptr[decodes:-1].tolist(), qo_indptr[decodes + 1 :].tolist(), strict=True):
        for first in range(start, end, most):
            last = min(first + most, end) - 1
            several.append((first, last + 1 - first, first_spans[first], end_spans[last], -1))

    shares = together > 0
    whole = ~shares & (spans <= max(1, int(spans.sum()) // (ITEMS_PER_THREAD * threads)))
    num_items = np.where(whole, 1, spans - together)
    row = np.repeat(np.arange(decodes, dtype=np.int32), num_items)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(num_items) - num_items, num_items)
    first_span = first_spans[row] + together[row] + nth
    end_span = np.where(whole[row], end_spans[row], first_span + 1)
    part = np.where(whole[row], -1, nth + shares[row])
    alone = np.stack((row, np.ones_like(row), first_span, end_span, part), axis=1)

    num_parts = np.zeros(len(ends), dtype=np.int32)
    num_parts[:decodes] = np.where(whole, 0, num_items + shares)
    first_parts = np.cumsum(num_parts, dtype=np.int32) - num_parts
    items = np.concatenate((np.array(several, dtype=np.int32).reshape(-1, 5), alone), dtype=np.int32)
    return Items(items, np.concatenate(members), first_parts, num_parts)


def shared_runs(
    kv_indptr: Ints, kv_indices: Ints, starts: Ints, ends: Ints, block_size: int
) -> Iterator[tuple[int, Ints]]:
    """Decodes that see the same blocks in their first spans, and the span before which that ends.

    Rows that share more with each other than with the rest are a run of their own.
    """
    if len(starts) < 2:
        return
    first = -(-starts // SPAN)
    span = beginning = int(first.min())
    groups = [np.flatnonzero((first == beginning) & (starts // SPAN == beginning)).astype(np.int32)]
    while groups:
        columns = np.arange(span * SPAN // block_size, -(-(span + 1) * SPAN // block_size))
        going_on: list[Ints] = []
        for group in groups:
            rows = group[ends[group] >= (span + 1) * SPAN]
            same: list[Ints] = []
            if len(np.unique(kv_indices[kv_indptr[rows] + columns[0]])) < len(rows):
                same = _equal(rows, kv_indices[kv_indptr[rows, None] + columns])
            going_on += same
            if span > beginning and sum(map(len, same)) < len(group):
                yield span, np.setdiff1d(group, np.concatenate((*same, group[:0])))
        groups = going_on
        span += 1


def _equal(rows: Ints, blocks: Ints) -> list[Ints]:
    """Those of `rows` whose `blocks` [rows, count] are equal, in groups of several."""
    if (blocks == blocks[0]).all():
        return [rows]
    same: dict[bytes, list[int]] = {}
    for row, named in zip(rows.tolist(), blocks, strict=True):
        same.setdefault(named.tobytes(), []).append(row)
    return [np.array(group, dtype=np.int32) for group in same.values() if len(group) > 1]
