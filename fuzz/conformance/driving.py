"""How a backend is driven through batches, and how what it does is judged."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from kvproof.attention import AttentionBackend, BatchPlan, CacheSpec
from kvproof.fuzz.conformance.batches import Row
from kvproof.fuzz.dense import dense, to_cache

Backend = TypeVar("Backend", bound=AttentionBackend)

NAN = float("nan")


def pages(spec: CacheSpec, cache: Tensor) -> Tensor:
    """A view of a cache as [layers, blocks, 2, block_size, num_kv_heads, head_size], whatever its layout."""
    return cache if spec.layout == "NHD" else cache.transpose(3, 4)


def places(spec: CacheSpec, row: Row, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Blocks and offsets in them of a row's tokens `start` to `stop`."""
    entries, offsets = torch.arange(start, stop), torch.arange(start, stop) % spec.block_size
    return torch.tensor(row.table, dtype=torch.int64)[entries // spec.block_size], offsets


def write(spec: CacheSpec, cache: Tensor, row: Row, start: int, stop: int) -> None:
    """Write tokens `start` to `stop` of a row into the slots that its table gives them, in all layers."""
    blocks, offsets = (index.to(cache.device) for index in places(spec, row, start, stop))
    kv = torch.stack(
        [to_cache(spec, x[:, start:stop], scale) for x, scale in ((row.k, spec.k_scale), (row.v, spec.v_scale))], 2
    )
    bits(pages(spec, cache))[:, blocks, :, offsets] = bits(kv).transpose(0, 1)


def bits(tensor: Tensor) -> Tensor:
    """A view of a tensor as integers, so that NaN equals itself, and 8-bit floats can be indexed."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def primed(backend: type[Backend], spec: CacheSpec, rows: Iterable[Row], filler: float = NAN) -> Backend:
    """A backend whose cache holds the context of the rows, and `filler` in every other slot.

    Where tokens were that a window has left, there is something finite, as others may have written there since.
    """
    made = backend(spec)
    made.cache.fill_(filler)
    rows = list(rows)
    for row in rows:
        for block, offset in zip(*(index.tolist() for index in places(spec, row, 0, row.left(spec))), strict=True):
            pages(spec, made.cache)[:, block, :, offset].fill_(OTHERS)
    for row in rows:  # some of whose own tokens may be those that a window has left of another, in a block they share
        write(spec, made.cache, row, row.left(spec), row.context)
    return made


OTHERS = 64.0
"""Of other sequences' keys and values: larger than any of a row's own."""


def decodes_first(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.query_len != 1)


def planned(spec: CacheSpec, rows: Sequence[Row]) -> BatchPlan:
    """The plan of a step over rows whose decodes come first."""
    return BatchPlan.build(
        [array("i", row.table) for row in rows],
        [row.seq_len for row in rows],
        [row.query_len for row in rows],
        spec.block_size,
    )


def inputs(rows: Sequence[Row], layer: int, padding: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a step's tokens, and of `padding` more: in odd layers as slices of a fused projection."""
    parts = (
        torch.cat([row.q[layer] for row in rows]),
        torch.cat([row.k[layer, row.context :] for row in rows]),
        torch.cat([row.v[layer, row.context :] for row in rows]),
    )
    q, k, v = (torch.cat((x, x.new_ones(padding, *x.shape[1:]))) for x in parts)
    if layer % 2:
        q, k, v = torch.split(torch.cat((q, k, v), dim=1), [q.shape[1], k.shape[1], v.shape[1]], dim=1)
    return q, k, v


@dataclass(frozen=True)
class Ran:
    """A step over `rows`, decodes first, and what the run of each layer returned, for a look at it then or later."""

    rows: Sequence[Row]
    results: Sequence[Tensor]

    def outputs(self) -> list[Tensor]:
        """Of each row, [layers, query_len, num_heads, head_size]."""
        lengths = [row.query_len for row in self.rows]
        live = torch.stack([result[: sum(lengths)] for result in self.results])
        return list(torch.split(live, lengths, dim=1))


def run(backend: AttentionBackend, rows: Sequence[Row]) -> Ran:
    """One step over rows whose decodes come first, in all layers; padded where the backend has a graph for it."""
    plan = planned(backend.spec, rows)
    size = backend.graph_rows(plan)
    if size is not None:
        assert size in backend.graph_sizes, f"a step of {len(rows)} decodes is to be padded to {size}"
        plan = plan.pad(size)
    backend.plan(plan)
    layers = range(backend.spec.num_layers)
    return Ran(rows, [backend.run(layer, *inputs(rows, layer, plan.num_padding)) for layer in layers])


def step(backend: AttentionBackend, rows: Sequence[Row]) -> list[Tensor]:
    """One step over rows in any order: each row's output [layers, query_len, num_heads, head_size]."""
    order = sorted(range(len(rows)), key=lambda i: rows[i].query_len != 1)
    outputs = run(backend, [rows[i] for i in order]).outputs()
    return [outputs[order.index(i)] for i in range(len(rows))]


def run_in_steps(backend: AttentionBackend, rows: Sequence[Row], data: st.DataObject) -> list[Ran]:
    """All query tokens of the rows, in steps of some rows and some of their next tokens each."""
    done = [0] * len(rows)
    steps = []
    while todo := [i for i, row in enumerate(rows) if done[i] < row.query_len]:
        chosen = data.draw(st.lists(st.sampled_from(todo), min_size=1, unique=True), label="rows in this step")
        decodes_only = data.draw(st.booleans(), label="decodes only")
        parts = []
        for i in chosen:
            left = rows[i].query_len - done[i]
            n = 1 if decodes_only else data.draw(st.sampled_from((left, 1, min(2, left))), label=f"tokens of row {i}")
            parts.append(rows[i].part(done[i], done[i] + n))
            done[i] += n
        steps.append(run(backend, decodes_first(parts)))
    return steps


def assert_right(spec: CacheSpec, rows: Sequence[Row], got: Sequence[Tensor]) -> None:
    """Each row's output is what it must come to."""
    for row, out in zip(rows, got, strict=True):
        right = dense(spec, row.q, row.k, row.v)
        assert_near(str(row), out, right.out, right.out_error)


def assert_same(spec: CacheSpec, rows: Sequence[Row], one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    """Two outputs of each row differ by no more than rounding."""
    for row, a, b in zip(rows, one, other, strict=True):
        assert_near(str(row), a, b.double(), 2 * dense(spec, row.q, row.k, row.v).out_error)


def assert_near(what: str, got: Tensor, right: Tensor, bound: Tensor) -> None:
    assert got.shape == right.shape, f"{what} has a result of shape {list(got.shape)}"
    error = (got.double() - right).abs()
    wrong = ~(error <= bound)  # NaN is wrong
    assert not wrong.any(), (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} numbers are off, the first by "
        f"{error[wrong][0]:.3g} where {bound[wrong][0]:.3g} may be lost to rounding"
    )
