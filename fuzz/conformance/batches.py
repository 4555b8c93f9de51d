"""Random batches for attention backends.

A batch is written down as sequences that know nothing of blocks, next to the blocks they lie in, so that the right
output of a row follows from its own tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, get_args

import torch
from hypothesis import strategies as st
from torch import Tensor

from kvproof.allocator import NULL_BLOCK
from kvproof.attention import CacheSpec, Capabilities, DType, Feature, Layout

DTYPES: tuple[DType, ...] = get_args(DType)
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

# What stands for "anything a spec may hold": small, odd, and the neighbours of powers of two.
HEAD_SIZES = (1, 3, 8, 16)
GROUP_SIZES = (1, 2, 3, 5, 7, 9)
BLOCK_SIZES = (1, 2, 3, 4, 7, 8, 16, 17)

# An 8-bit cache's scales are powers of two: with others, where a number falls between two of its own, it depends on
# how one divides which of them is stored.
FEATURES: dict[Feature, tuple[dict[str, Any], ...]] = {
    "custom_scale": ({"scale": 0.7},),
    "window": ({"window": 3}, {"window": 1}, {"window": 2}, {"window": 5}, {"window": 17}),
    "soft_cap": ({"soft_cap": 1.5}, {"soft_cap": 20.0}),
    "fp8_cache": (
        {"cache_dtype": "float8_e4m3fn", "k_scale": 0.5, "v_scale": 0.125},
        {"cache_dtype": "float8_e4m3fn", "k_scale": 0.25, "v_scale": 1.0},
    ),
}
"""Fields of a spec that ask for each optional ability."""


@dataclass(frozen=True)
class Row:
    """A sequence of which a step computes the last tokens, and where it lies.

    table  blocks, in sequence order; as many as it needs, or more
    q      [layers, query_len, num_heads, head_size]
    k, v   [layers, seq_len, num_kv_heads, head_size]
    """

    table: tuple[int, ...]
    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def seq_len(self) -> int:
        return self.k.shape[1]

    @property
    def query_len(self) -> int:
        return self.q.shape[1]

    @property
    def context(self) -> int:
        """Tokens that were computed before the step."""
        return self.seq_len - self.query_len

    def left(self, spec: CacheSpec) -> int:
        """Tokens that a window has left: none of its queries sees them."""
        return 0 if spec.window is None else max(0, self.context + 1 - spec.window)

    def __repr__(self) -> str:
        return f"Row(table={list(self.table)}, context={self.context}, query_len={self.query_len})"

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """How Hypothesis shows a row of a failing case: without its tensors."""
        printer.text(repr(self))

    def part(self, start: int, stop: int) -> Row:
        """The same sequence in a step that computes only query tokens `start` to `stop`."""
        end = self.context + stop
        return Row(self.table, self.q[:, start:stop], self.k[:, :end], self.v[:, :end])

    def moved(self, to: Mapping[int, int]) -> Row:
        """The same sequence in other blocks."""
        return Row(tuple(to.get(block, block) for block in self.table), self.q, self.k, self.v)


@dataclass(frozen=True)
class Batch:
    """Rows of one step. Some may begin with the same `shared` blocks, which none of them writes.

    `blocks` are those that rows may lie in: all, or all but the null block.
    """

    spec: CacheSpec
    rows: tuple[Row, ...]
    shared: tuple[int, ...]
    blocks: range

    def with_blocks(self, num_blocks: int) -> CacheSpec:
        """The spec of a cache of another size."""
        return self.spec.model_copy(update={"num_blocks": num_blocks})


@st.composite
def shapes(draw: st.DrawFn, capabilities: Capabilities, device: str) -> dict[str, Any]:
    """The fields of a spec that `capabilities` declares, but for num_blocks."""

    def one(declared: Iterable[Any] | None, anything: Sequence[Any]) -> Any:
        return draw(st.sampled_from(anything if declared is None else sorted(declared)))

    num_kv_heads = draw(st.integers(1, 2))
    fields = {
        "num_layers": 2,
        "num_heads": num_kv_heads * one(capabilities.group_sizes, GROUP_SIZES),
        "num_kv_heads": num_kv_heads,
        "head_size": one(capabilities.head_sizes, HEAD_SIZES),
        "dtype": one(capabilities.dtypes, DTYPES),
        "device": device,
        "block_size": one(capabilities.block_sizes, BLOCK_SIZES),
        "layout": one(capabilities.layouts, LAYOUTS),
    }
    for feature, choices in FEATURES.items():
        if feature in capabilities.features and draw(st.booleans(), label=feature):
            fields |= draw(st.sampled_from(choices))
    return fields


@st.composite
def batches(draw: st.DrawFn, shape: st.SearchStrategy[dict[str, Any]], *, padded: bool = False) -> Batch:
    """Decodes, chunks and prompts, rows with nothing to do, scattered blocks, a prefix that some rows share.

    `padded` if steps will be: the null block is then nobody's. Where it is, by chance or for that, entries of blocks
    that a window has left may name it.
    """
    fields = draw(shape)
    size: int = fields["block_size"]
    contexts = st.integers(0, 20) | st.sampled_from((size - 1, size, size + 1, 2 * size))
    queries = st.just(1) | st.integers(0, 6) | st.sampled_from((size, size + 1))
    if draw(st.booleans(), label="decodes only"):
        queries = st.just(1)
    lengths = draw(st.lists(st.tuples(contexts, queries, st.booleans()), min_size=1, max_size=5), label="rows")
    num_shared = draw(st.integers(0, 2))
    seed = draw(st.integers(0, 2**32 - 1))
    first = int(padded or draw(st.booleans(), label="the null block is reserved"))
    # Blunt queries look at all keys alike and show one too many or too few; sharp ones show which key they look at.
    sharpness = draw(st.sampled_from((0.1, 1.0, 4.0)))

    needed = first + num_shared + sum(-(-(context + query) // size) + 2 for context, query, _ in lengths)
    blocks = Random(seed).sample(range(first, needed), needed - first)
    spec = CacheSpec(**fields, num_blocks=needed)
    generator = torch.Generator().manual_seed(seed)

    def values(length: int, heads: int, factor: float = 1.0) -> Tensor:
        shape = (spec.num_layers, length, heads, spec.head_size)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * factor
        return drawn.to(spec.device, spec.torch_dtype)

    shared = tuple(blocks.pop() for _ in range(num_shared))
    prefix = [values(num_shared * size, spec.num_kv_heads) for _ in "kv"]
    rows = []
    for context, query, shares in lengths:
        begin = shared if shares and query else ()
        context = max(context, len(begin) * size) if query else 0
        tokens = context + query
        table = [*begin, *(blocks.pop() for _ in range(-(-tokens // size) - len(begin)))]
        own = [values(tokens - len(begin) * size, spec.num_kv_heads) for _ in "kv"]
        k, v = own if not begin else (torch.cat(both, dim=1) for both in zip(prefix, own, strict=True))
        row = Row((), values(query, spec.num_heads, sharpness), k, v)
        if first:
            gone = row.left(spec) // size
            table[:gone] = [NULL_BLOCK] * gone
        table += [blocks.pop()] * draw(st.booleans(), label="a block in reserve")
        rows.append(replace(row, table=tuple(table)))
    return Batch(spec, tuple(rows), shared, range(first, needed))
