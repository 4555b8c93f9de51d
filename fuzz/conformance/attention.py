"""What an attention backend must do, each as a named check. Numbers are held to `batches.dense` and its bound."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st

from kvproof.allocator import InvalidArgument, KvproofError
from kvproof.attention import AttentionBackend, BatchPlan, CacheSpec, NotPlanned, UnsupportedSpec
from kvproof.attention.plan import ARRAYS
from kvproof.fuzz.conformance.batches import (
    BLOCK_SIZES,
    DTYPES,
    FEATURES,
    GROUP_SIZES,
    HEAD_SIZES,
    LAYOUTS,
    NAN,
    Batch,
    Row,
    assert_right,
    assert_same,
    batches,
    bits,
    decodes_first,
    inputs,
    pages,
    planned,
    primed,
    shapes,
    step,
    write,
)
from kvproof.fuzz.conformance.report import Check, on_data, once

Backend = type[AttentionBackend]
Refusal = TypeVar("Refusal", bound=KvproofError)


def checks(backend: Backend, device: str | None = None) -> tuple[Check, ...]:
    """All checks of `backend`, on `device` or else on a device that it declares, the CPU if it can."""
    declared = backend.capabilities().devices
    device = device or ("cpu" if "cpu" in declared else min(declared))
    return (
        *(on_data(_name(check), _bound(check, backend, device)) for check in RANDOM),
        once(_name(declared_is_supported), lambda: declared_is_supported(backend, device)),
        once(_name(undeclared_is_refused), lambda: undeclared_is_refused(backend, device)),
    )


def _name(check: Callable[..., None]) -> str:
    return check.__name__.replace("_", " ")


def _bound(
    check: Callable[[Backend, Batch, st.DataObject], None], backend: Backend, device: str
) -> Callable[[st.DataObject], None]:
    batch = batches(shapes(backend.capabilities(), device))
    return lambda data: check(backend, data.draw(batch, label="batch"), data)


# ---- results


def a_step_is_right(backend: Backend, batch: Batch, data: st.DataObject) -> None:
    """Every row attends to its own tokens, causally, whatever else is in the batch."""
    it = primed(backend, batch.spec, batch.rows)
    out = step(it, batch.rows)
    assert_right(batch.spec, batch.rows, out)
    for part in out:
        assert (part.dtype, part.device) == (it.cache.dtype, it.cache.device)


def unused_slots_are_not_read(backend: Backend, batch: Batch, data: st.DataObject) -> None:
    """Nor multiplied by zero: infinity and NaN in a slot that belongs to no row change nothing."""
    filler = data.draw(st.sampled_from((NAN, float("inf"), float("-inf"))), label="filler")
    out = step(primed(backend, batch.spec, batch.rows, filler), batch.rows)
    assert_same(batch.spec, batch.rows, out, step(primed(backend, batch.spec, batch.rows, 0.0), batch.rows))


def steps_follow_each_other(backend: Backend, batch: Batch, data: st.DataObject) -> None:
    """A prompt may be computed in chunks, beside whatever else a step holds: every plan replaces the last.

    Results are looked at when all steps are done, so that preparing one must leave the one before alone.
    """
    it = primed(backend, batch.spec, batch.rows)
    done = [0] * len(batch.rows)
    steps = []
    while todo := [i for i, row in enumerate(batch.rows) if done[i] < row.query_len]:
        chosen = data.draw(st.lists(st.sampled_from(todo), min_size=1, unique=True), label="rows in this step")
        parts = []
        for i in chosen:
            left = batch.rows[i].query_len - done[i]
            n = data.draw(st.sampled_from((left, 1, min(2, left))), label=f"tokens of row {i}")
            parts.append(batch.rows[i].part(done[i], done[i] + n))
            done[i] += n
        steps.append((parts, step(it, parts)))
    for parts, out in steps:
        assert_right(batch.spec, parts, out)


def a_run_can_be_repeated(backend: Backend, batch: Batch, data: st.DataObject) -> None:
    """The same bits again, from the same plan and from an equal one, and results stay as they were given."""
    it = primed(backend, batch.spec, batch.rows)
    first = step(it, batch.rows)
    kept, cache = [bits(out).clone() for out in first], bits(it.cache).clone()
    rows = decodes_first(batch.rows)
    one = it.run(0, *inputs(rows, 0))
    given = bits(one).clone()
    it.run(1, *inputs(rows, 1))
    assert torch.equal(bits(one), given), "the result of one layer is overwritten by the next"
    assert torch.equal(bits(it.run(0, *inputs(rows, 0))), given), "the same run gives other bits"
    for out, before in zip(step(it, batch.rows), kept, strict=True):
        assert torch.equal(bits(out), before), "the same step gives other bits"
    assert torch.equal(bits(it.cache), cache), "the same step writes other bits"


# ---- what changes, and what does not


def writes_touch_the_planned_slots_only(backend: Backend, batch: Batch, data: st.DataObject) -> None:
    """The whole cache is compared, bit by bit: the step's keys and values are in it, and the rest is as before."""
    it = primed(backend, batch.spec, batch.rows)
    expected = it.cache.clone()
    for row in batch.rows:
        write(batch.spec, expected, row, row.context, row.seq_len)
    step(it, batch.rows)
    wrong = bits(pages(batch.spec, it.cache)) != bits(pages(batch.spec, expected))
    places = wrong.flatten(-2).any(-1).nonzero()[:3].tolist()
    assert not places, f"wrong content at [layer, block, key or value, offset] {places}"


def plan_and_inputs_are_left_alone(backend: Backend, batch: Batch, data: st.DataObject) -> None:
    it = primed(backend, batch.spec, batch.rows)
    rows = decodes_first(batch.rows)
    plan, tensors = planned(batch.spec, rows), inputs(rows, 0)
    before = [getattr(plan, name).clone() for name in ARRAYS], [bits(tensor).clone() for tensor in tensors]
    it.plan(plan)
    it.run(0, *tensors)
    for name, array_before in zip(ARRAYS, before[0], strict=True):
        assert torch.equal(getattr(plan, name), array_before), f"{name} of the plan was changed"
    for tensor, tensor_before in zip(tensors, before[1], strict=True):
        assert torch.equal(bits(tensor), tensor_before), "an input was changed"


def copies_are_exact(backend: Backend, batch: Batch, data: st.DataObject) -> None:
    """In all layers; every source is read before any destination is written; a block may be copied onto itself."""
    it = primed(backend, batch.spec, batch.rows)
    generator = torch.Generator().manual_seed(0)
    it.cache.copy_(torch.randn(it.cache.shape, generator=generator, dtype=torch.float64))
    before, expected = it.cache.clone(), it.cache.clone()
    block = st.integers(0, batch.spec.num_blocks - 1)
    orders = data.draw(st.lists(st.tuples(block, block), max_size=4, unique_by=lambda order: order[1]), label="orders")
    it.copy_blocks(orders)
    for source, destination in orders:
        expected[:, destination] = before[:, source]
    wrong = (pages(batch.spec, it.cache) != pages(batch.spec, expected)).flatten(2).any(-1).nonzero()[:3].tolist()
    assert not wrong, f"wrong content at [layer, block] {wrong}"


# ---- what makes no difference


def physical_blocks_may_be_permuted(backend: Backend, batch: Batch, data: st.DataObject) -> None:
    blocks = list(range(batch.spec.num_blocks))
    to = dict(zip(blocks, data.draw(st.permutations(blocks), label="block numbers"), strict=True))
    moved = [row.moved(to) for row in batch.rows]
    out = step(primed(backend, batch.spec, batch.rows), batch.rows)
    assert_same(batch.spec, batch.rows, out, step(primed(backend, batch.spec, moved), moved))


def rows_do_not_depend_on_each_other(backend: Backend, batch: Batch, data: st.DataObject) -> None:
    """A batch is computed at once, and again split in two with its rows in another order."""
    it = primed(backend, batch.spec, batch.rows)
    together = step(it, batch.rows)
    order = data.draw(st.permutations(range(len(batch.rows))), label="order")
    cut = data.draw(st.integers(0, len(order)), label="cut")
    for part in filter(None, (order[:cut], order[cut:])):
        rows = [batch.rows[i] for i in part]
        assert_same(batch.spec, rows, step(it, rows), [together[i] for i in part])


def rows_with_nothing_to_do_change_nothing(backend: Backend, batch: Batch, data: st.DataObject) -> None:
    """Padding up to a fixed batch size."""
    it = primed(backend, batch.spec, batch.rows)
    alone = step(it, batch.rows)
    cache = bits(it.cache).clone()
    padding = Row((), *(tensor[:, :0] for tensor in (batch.rows[0].q, batch.rows[0].k, batch.rows[0].v)))
    padded = list(batch.rows)
    for at in data.draw(st.lists(st.integers(0, len(padded)), min_size=1, max_size=3), label="padding before row"):
        padded.insert(at, padding)
    out = [part for row, part in zip(padded, step(it, padded), strict=True) if row is not padding]
    assert_same(batch.spec, batch.rows, out, alone)
    assert torch.equal(bits(it.cache), cache)


def a_prefix_may_be_shared_or_copied(backend: Backend, batch: Batch, data: st.DataObject) -> None:
    """Rows that share the blocks of their common beginning, against rows that each have a copy of it."""
    copies = iter(range(batch.spec.num_blocks, batch.spec.num_blocks + len(batch.rows) * len(batch.shared)))
    maps = [{block: next(copies) for block in batch.shared} for _ in batch.rows]
    spec = batch.with_blocks(batch.spec.num_blocks + len(batch.rows) * len(batch.shared))
    it = primed(backend, spec, batch.rows)
    shared = step(it, batch.rows)
    it.copy_blocks([order for copied in maps for order in copied.items()])
    own = [row.moved(copied) for row, copied in zip(batch.rows, maps, strict=True)]
    assert_same(spec, batch.rows, shared, step(it, own))


# ---- refusals


def refusals_change_nothing(backend: Backend, batch: Batch, data: st.DataObject) -> None:
    """Bad calls raise an error of ours, and the planned step then runs as if they had not been made."""
    spec, rows = batch.spec, decodes_first(batch.rows)
    it = primed(backend, spec, rows)
    with_error(NotPlanned, lambda: it.run(0, *inputs(rows, 0)), "run before plan")
    it.plan(planned(spec, rows))
    before = bits(it.cache).clone()
    for name, error, call in _bad_calls(it, rows):
        with_error(error, call, name)
        assert torch.equal(bits(it.cache), before), f"{name}: refused, and the cache has changed"
    out = torch.stack([it.run(layer, *inputs(rows, layer)) for layer in range(spec.num_layers)])
    assert_right(spec, rows, torch.split(out, [row.query_len for row in rows], dim=1))


def _bad_calls(it: AttentionBackend, rows: list[Row]) -> Iterator[tuple[str, type[KvproofError], Callable[[], object]]]:
    spec, plan = it.spec, planned(it.spec, rows)
    q, k, v = inputs(rows, 0)
    other = torch.float32 if it.cache.dtype is not torch.float32 else torch.float16
    longer = [torch.cat((x, x.new_ones(1, *x.shape[1:]))) for x in (q, k, v)]
    calls: tuple[tuple[str, Callable[[], object]], ...] = (
        ("a layer too high", lambda: it.run(spec.num_layers, q, k, v)),
        ("a negative layer", lambda: it.run(-1, q, k, v)),
        ("q too long", lambda: it.run(0, longer[0], k, v)),
        ("k too long", lambda: it.run(0, q, longer[1], v)),
        ("v too long", lambda: it.run(0, q, k, longer[2])),
        ("a head too many", lambda: it.run(0, torch.cat((q, q[:, :1]), dim=1), k, v)),
        ("q of another dtype", lambda: it.run(0, q.to(other), k, v)),
        ("v of another dtype", lambda: it.run(0, q, k, v.to(other))),
        ("v on another device", lambda: it.run(0, q, k, v.to("meta"))),
        ("an invalid plan", lambda: it.plan(replace(plan, num_decodes=plan.num_decodes + 1))),
        (
            "a plan with a block that is not there",
            lambda: it.plan(BatchPlan.build([array("i", [spec.num_blocks])], [1], [1], spec.block_size)),
        ),
        ("a copy from a block that is not there", lambda: it.copy_blocks([(0, 0), (spec.num_blocks, 0)])),
        ("a copy to a negative block", lambda: it.copy_blocks([(0, 0), (0, -1)])),
        ("two copies to one block", lambda: it.copy_blocks([(spec.num_blocks - 1, 0), (0, 0)])),
    )
    for name, call in calls:
        yield name, InvalidArgument, call


def with_error(expected: type[Refusal], call: Callable[[], object], name: str) -> Refusal:
    """What `call` raises, which must be an `expected` whose message is one line."""
    try:
        call()
    except Exception as raised:
        error = raised
    else:
        raise AssertionError(f"{name}: accepted")
    if not isinstance(error, expected):
        raise AssertionError(f"{name}: {type(error).__name__} instead of {expected.__name__}: {error}") from error
    assert "\n" not in str(error), f"{name}: the message has more than one line"
    return error


# ---- capabilities


def declared_is_supported(backend: Backend, device: str) -> None:
    """Every dtype, layout, head size, group size and block size that is declared works, each beside the others' first.

    Where anything is declared, the corners of what a spec may hold.
    """
    declared = backend.capabilities()
    values: dict[str, list[Any]] = {
        "dtype": sorted(declared.dtypes or DTYPES),
        "layout": sorted(declared.layouts or LAYOUTS),
        "head_size": sorted(declared.head_sizes or (*HEAD_SIZES, 512)),
        "group_size": sorted(declared.group_sizes or (*GROUP_SIZES, 9)),
        "block_size": sorted(declared.block_sizes or BLOCK_SIZES),
    }
    for feature, (field, value) in FEATURES.items():
        values[field] = [None, value] if feature in declared.features else [None]
    first = {name: choices[0] for name, choices in values.items()}
    for name, choices in values.items():
        for value in choices:
            spec = _spec(device, **(first | {name: value}))
            rows = _two_rows(spec)
            try:
                assert_right(spec, rows, step(primed(backend, spec, rows), rows))
            except Exception as error:
                raise AssertionError(f"{name} {value} is declared: {type(error).__name__}: {error}") from error


def undeclared_is_refused(backend: Backend, device: str) -> None:
    """With `UnsupportedSpec`, which names what is not supported."""
    declared = backend.capabilities()
    first: dict[str, Any] = {
        "dtype": min(declared.dtypes or DTYPES),
        "layout": min(declared.layouts or LAYOUTS),
        "head_size": min(declared.head_sizes or HEAD_SIZES),
        "group_size": min(declared.group_sizes or GROUP_SIZES),
        "block_size": min(declared.block_sizes or BLOCK_SIZES),
    }
    possible: dict[str, tuple[Any, ...]] = {
        "dtype": DTYPES,
        "layout": LAYOUTS,
        "head_size": tuple(range(1, 513)),
        "group_size": tuple(range(1, 33)),
        "block_size": tuple(range(1, 129)),
    }
    for name, values in possible.items():
        supported = getattr(declared, f"{name}s")
        for value in () if supported is None else sorted(set(values) - supported):
            _refuses(backend, _spec(device, **(first | {name: value})), name)
    for other in sorted({"cpu", "cuda", "meta"} - declared.devices):
        _refuses(backend, _spec(other, **first), "device")
    for feature in FEATURES.keys() - declared.features:
        field, value = FEATURES[feature]
        wanted: dict[str, Any] = {field: value}
        _refuses(backend, _spec(device, **(first | wanted)), field, feature)


def _refuses(backend: Backend, spec: CacheSpec, *names: str) -> None:
    """A feature goes by the name of a spec's field, or by its own."""
    what = f"{names[0]} {getattr(spec, names[0])}, which is not declared"
    error = with_error(UnsupportedSpec, lambda: backend(spec), what)
    assert error.feature in names, f"{what}: the error names {error.feature}"


def _spec(device: str, *, group_size: int, **fields: Any) -> CacheSpec:
    return CacheSpec(num_layers=2, num_heads=2 * group_size, num_kv_heads=2, device=device, num_blocks=6, **fields)


def _two_rows(spec: CacheSpec) -> list[Row]:
    """A decode after one block and a prompt of three tokens or fewer, in scattered blocks."""
    generator, blocks = torch.Generator().manual_seed(0), Random(0).sample(range(6), 6)

    def values(length: int, heads: int) -> torch.Tensor:
        shape = (spec.num_layers, length, heads, spec.head_size)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(spec.device, spec.torch_dtype)

    rows = []
    for seq_len, query_len in ((spec.block_size + 1, 1), (3, 3)):
        table = tuple(blocks.pop() for _ in range(-(-seq_len // spec.block_size)))
        k, v = values(seq_len, spec.num_kv_heads), values(seq_len, spec.num_kv_heads)
        rows.append(Row(table, values(query_len, spec.num_heads), k, v))
    return rows


RANDOM = (
    a_step_is_right,
    unused_slots_are_not_read,
    steps_follow_each_other,
    a_run_can_be_repeated,
    writes_touch_the_planned_slots_only,
    plan_and_inputs_are_left_alone,
    copies_are_exact,
    physical_blocks_may_be_permuted,
    rows_do_not_depend_on_each_other,
    rows_with_nothing_to_do_change_nothing,
    a_prefix_may_be_shared_or_copied,
    refusals_change_nothing,
)
