"""How a step's attention is cut into items for the matrix unit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

SPAN = 256
"""Tokens that a query's scores are kept of at once."""


class Items(NamedTuple):
    """What `tiled.c` calls by these names. Tokens that have no parts are whole in their only item."""

    items: Ints  # [num_items, 5]: first, count, first_span, end_span, whole
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
    most: int,
) -> Items:
    """Cut a step into items of at most `most` tokens. Token t sees the positions starts[t] to ends[t] of its row.

    A decode is an item of its own for each of its spans, but rows that name the same blocks in a span are one item
    there. A prefill's tokens go through all their spans in items of neighbours.
    """
    first_spans, end_spans = starts // SPAN, -(-ends // SPAN)
    spans = end_spans[:decodes] - first_spans[:decodes]
    num_parts = np.zeros(len(ends), dtype=np.int32)
    num_parts[:decodes] = np.where(spans > 1, spans, 0)
    first_parts = np.cumsum(num_parts, dtype=np.int32) - num_parts

    row = np.repeat(np.arange(decodes, dtype=np.int32), spans)
    span = (
        first_spans[row]
        + np.arange(len(row), dtype=np.int32)
        - np.repeat(np.cumsum(spans, dtype=np.int32) - spans, spans)
    )
    alone = np.ones(len(row), dtype=np.bool_)
    members, shared = [np.arange(len(ends), dtype=np.int32)], []
    num_members = len(ends)
    for at, rows in shared_spans(kv_indptr, kv_indices, starts[:decodes], ends[:decodes], block_size):
        for part in np.split(rows, range(most, len(rows), most)):
            shared.append((num_members, len(part), at, at + 1, 0))
            members.append(part)
            num_members += len(part)
        alone[np.searchsorted(row, rows) + at - first_spans[rows]] = False
    row, span = row[alone], span[alone]
    lone = np.stack((row, np.ones_like(row), span, span + 1, spans[row] == 1), axis=1)

    prefills = []
    for start, end in zip(qo_indptr[decodes:-1].tolist(), qo_indptr[decodes + 1 :].tolist(), strict=True):
        for first in range(start, end, most):
            last = min(first + most, end) - 1
            prefills.append((first, last + 1 - first, first_spans[first], end_spans[last], 1))
    several = np.array(shared + prefills[::-1], dtype=np.int32).reshape(-1, 5)
    return Items(np.concatenate((several, lone), dtype=np.int32), np.concatenate(members), first_parts, num_parts)


def shared_spans(
    kv_indptr: Ints, kv_indices: Ints, starts: Ints, ends: Ints, block_size: int
) -> Iterator[tuple[int, Ints]]:
    """Spans in which several decodes see the same blocks from first to last, and their rows.

    As a prefix cache shares blocks: rows that share a span share all before it. Others that they may share are missed.
    """
    if len(starts) < 2:
        return
    first = -(-starts // SPAN)
    span = int(first.min())
    groups = [np.flatnonzero(first == span).astype(np.int32)]
    while groups:
        at, to = span * SPAN // block_size, -(-(span + 1) * SPAN // block_size)
        same: dict[bytes, list[int]] = {}
        for group in groups:
            rows = group[ends[group] >= (span + 1) * SPAN]
            if len(np.unique(kv_indices[kv_indptr[rows] + at])) < len(rows):
                for row in rows.tolist():
                    blocks = kv_indices[kv_indptr[row] + at : kv_indptr[row] + to]
                    same.setdefault(blocks.tobytes(), []).append(row)
        groups = [np.array(rows, dtype=np.int32) for rows in same.values() if len(rows) > 1]
        yield from ((span, rows) for rows in groups)
        span += 1
