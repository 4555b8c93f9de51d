"""Random batches for attention backends, and what each row of them must come to.

A batch is written down as sequences that know nothing of blocks, next to the blocks they lie in, so that the right
output of a row follows from its own tokens alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, get_args

import torch
from hypothesis import strategies as st
from torch import Tensor

from kvproof.attention import AttentionBackend, BatchPlan, CacheSpec, Capabilities, DType, Layout

DTYPES: tuple[DType, ...] = get_args(DType)
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

# What stands for "anything a spec may hold": small, odd, and the neighbours of powers of two.
HEAD_SIZES = (1, 3, 8, 16)
GROUP_SIZES = (1, 2, 3, 5, 7)
BLOCK_SIZES = (1, 2, 3, 4, 7, 8, 16, 17)

FEATURES: dict[str, tuple[str, float]] = {
    "custom_scale": ("scale", 0.7),
    "window": ("window", 3),
    "soft_cap": ("soft_cap", 1.5),
}
"""The field of a spec that asks for each optional ability, and a value."""

NAN = float("nan")


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
    """Rows of one step. Some may begin with the same `shared` blocks, which none of them writes."""

    spec: CacheSpec
    rows: tuple[Row, ...]
    shared: tuple[int, ...]

    def with_blocks(self, num_blocks: int) -> CacheSpec:
        """The spec of a cache of another size."""
        return self.spec.model_copy(update={"num_blocks": num_blocks})


@st.composite
def shapes(draw: st.DrawFn, capabilities: Capabilities, device: str) -> dict[str, Any]:
    """The fields of a spec that `capabilities` declares, but for num_blocks."""

    def one(declared: Iterable[Any] | None, anything: Sequence[Any]) -> Any:
        return draw(st.sampled_from(anything if declared is None else sorted(declared)))

    num_kv_heads = draw(st.integers(1, 2))
    optional = [feature for feature in FEATURES if feature in capabilities.features]
    wanted = [feature for feature in optional if draw(st.booleans())]
    return {
        "num_layers": 2,
        "num_heads": num_kv_heads * one(capabilities.group_sizes, GROUP_SIZES),
        "num_kv_heads": num_kv_heads,
        "head_size": one(capabilities.head_sizes, HEAD_SIZES),
        "dtype": one(capabilities.dtypes, DTYPES),
        "device": device,
        "block_size": one(capabilities.block_sizes, BLOCK_SIZES),
        "layout": one(capabilities.layouts, LAYOUTS),
        **dict(FEATURES[feature] for feature in wanted),
    }


@st.composite
def batches(draw: st.DrawFn, shape: st.SearchStrategy[dict[str, Any]]) -> Batch:
    """Decodes, chunks and prompts, rows with nothing to do, scattered blocks, a prefix that some rows share."""
    fields = draw(shape)
    size: int = fields["block_size"]
    contexts = st.integers(0, 20) | st.sampled_from((size - 1, size, size + 1, 2 * size))
    queries = st.just(1) | st.integers(0, 6) | st.sampled_from((size, size + 1))
    lengths = draw(st.lists(st.tuples(contexts, queries, st.booleans()), min_size=1, max_size=5), label="rows")
    num_shared = draw(st.integers(0, 2))
    seed = draw(st.integers(0, 2**32 - 1))
    # Blunt queries look at all keys alike and show one too many or too few; sharp ones show which key they look at.
    sharpness = draw(st.sampled_from((0.1, 1.0, 4.0)))

    needed = num_shared + sum(-(-(context + query) // size) + 1 for context, query, _ in lengths)
    blocks = Random(seed).sample(range(needed), needed)
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
        if query == 0:
            context = 0
        begin = shared if shares and context >= num_shared * size else ()
        tokens = context + query
        table = *begin, *(blocks.pop() for _ in range(-(-tokens // size) - len(begin)))
        own = [values(tokens - len(begin) * size, spec.num_kv_heads) for _ in "kv"]
        k, v = own if not begin else (torch.cat(both, dim=1) for both in zip(prefix, own, strict=True))
        rows.append(Row(table, values(query, spec.num_heads, sharpness), k, v))
    return Batch(spec, tuple(rows), shared)


# ---- what is right


def dense(spec: CacheSpec, row: Row) -> tuple[Tensor, Tensor]:
    """The exact output of a row, float64 [layers, query_len, num_heads, head_size], and how far off one may be.

    The bound is the first-order rounding error of softmax attention, element by element, for any order of summation.
    With u the unit roundoff of the cache's dtype and e that of the sums (float32's, or float64's for a float64 cache),
    s the largest score that the query sees, m the largest sum of |q| |k| scale, d the head size, n the keys, and
    a = sum(weight * |v|), all in the row's own numbers:

        scores   q, k and the score may each be rounded to the dtype: 3 u s; summing d products: e d m; a hyperbolic
                 tangent good to four units: 4 e s. An error of x in every score changes the output by 2 x a at most.
        weights  rounded to the dtype before they meet the values, as flash kernels do: u a
        output   rounded to the dtype: u a
        sums     n weighted values, n weights, and an exponential good to a few units: e (2 n + 8) a

    Nothing is added for luck. A backend that sums in less than float32 does not pass, and should not.
    """
    q, k, v = row.q.double(), row.k.double(), row.v.double()
    if not row.query_len:
        return q, q
    k, v = (x.repeat_interleave(spec.group_size, dim=2) for x in (k, v))
    at = torch.arange(row.seq_len, device=q.device)
    behind = at[row.context :, None] - at
    hidden = ((behind < 0) | (behind >= (spec.window or row.seq_len)))[:, None]
    scores = torch.einsum("lqhd,lkhd->lqhk", q, k) * spec.softmax_scale
    capped = scores if spec.soft_cap is None else spec.soft_cap * (scores / spec.soft_cap).tanh()
    weights = capped.masked_fill(hidden, float("-inf")).softmax(-1)
    out = torch.einsum("lqhk,lkhd->lqhd", weights, v)

    products = torch.einsum("lqhd,lkhd->lqhk", q.abs(), k.abs()) * spec.softmax_scale
    s, m = (x.masked_fill(hidden, 0).amax(-1, keepdim=True) for x in (scores.abs(), products))
    a = torch.einsum("lqhk,lkhd->lqhd", weights, v.abs())
    u = torch.finfo(spec.torch_dtype).eps / 2
    e = min(u, torch.finfo(torch.float32).eps / 2)
    score = 3 * u * s + e * (spec.head_size * m + 4 * s)
    return out, a * (2 * score + 2 * u + e * (2 * row.seq_len + 8))


def pages(spec: CacheSpec, cache: Tensor) -> Tensor:
    """A view of a cache as [layers, blocks, 2, block_size, num_kv_heads, head_size], whatever its layout."""
    return cache if spec.layout == "NHD" else cache.transpose(3, 4)


def write(spec: CacheSpec, cache: Tensor, row: Row, start: int, stop: int) -> None:
    """Write tokens `start` to `stop` of a row into the slots that its table gives them, in all layers."""
    places = [divmod(i, spec.block_size) for i in range(start, stop)]
    blocks = torch.tensor([row.table[entry] for entry, _ in places], dtype=torch.int64, device=cache.device)
    offsets = torch.tensor([offset for _, offset in places], dtype=torch.int64, device=cache.device)
    kv = torch.stack((row.k[:, start:stop], row.v[:, start:stop]), dim=2)
    pages(spec, cache)[:, blocks, :, offsets] = kv.transpose(0, 1)


def bits(tensor: Tensor) -> Tensor:
    """A tensor as integers, so that NaN equals itself."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


# ---- how a backend is driven


def primed(
    backend: type[AttentionBackend], spec: CacheSpec, rows: Iterable[Row], filler: float = NAN
) -> AttentionBackend:
    """A backend whose cache holds the context of the rows, and `filler` in every other slot."""
    made = backend(spec)
    made.cache.fill_(filler)
    for row in rows:
        write(spec, made.cache, row, 0, row.context)
    return made


def planned(spec: CacheSpec, rows: Sequence[Row]) -> BatchPlan:
    """The plan of a step over rows whose decodes come first."""
    return BatchPlan.build(
        [array("i", row.table) for row in rows],
        [row.seq_len for row in rows],
        [row.query_len for row in rows],
        spec.block_size,
    )


def inputs(rows: Sequence[Row], layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a step's tokens."""
    q = torch.cat([row.q[layer] for row in rows])
    k = torch.cat([row.k[layer, row.context :] for row in rows])
    return q, k, torch.cat([row.v[layer, row.context :] for row in rows])


def decodes_first(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.query_len != 1)


def step(backend: AttentionBackend, rows: Sequence[Row]) -> list[Tensor]:
    """One step over rows in any order, in all layers: each row's output [layers, query_len, num_heads, head_size]."""
    order = sorted(range(len(rows)), key=lambda i: rows[i].query_len != 1)
    ordered = [rows[i] for i in order]
    backend.plan(planned(backend.spec, ordered))
    out = torch.stack([backend.run(layer, *inputs(ordered, layer)) for layer in range(backend.spec.num_layers)])
    parts = torch.split(out, [row.query_len for row in ordered], dim=1)
    return [parts[order.index(i)] for i in range(len(rows))]


def assert_right(spec: CacheSpec, rows: Sequence[Row], got: Sequence[Tensor]) -> None:
    """Each row's output is what it must come to."""
    for row, out in zip(rows, got, strict=True):
        right, bound = dense(spec, row)
        assert out.shape == right.shape, f"{row} has an output of shape {list(out.shape)}"
        error = (out.double() - right).abs()
        wrong = ~(error <= bound)  # NaN is wrong
        assert not wrong.any(), (
            f"{row}: {int(wrong.sum())} of {wrong.numel()} numbers are off, the first by "
            f"{error[wrong][0]:.3g} where {bound[wrong][0]:.3g} may be lost to rounding"
        )


def assert_same(spec: CacheSpec, rows: Sequence[Row], one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    """Two outputs of each row differ by no more than rounding."""
    for row, a, b in zip(rows, one, other, strict=True):
        wrong = ~((a.double() - b.double()).abs() <= 2 * dense(spec, row)[1])
        assert not wrong.any(), f"{row}: {int(wrong.sum())} of {wrong.numel()} numbers have changed"
