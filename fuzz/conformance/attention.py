"""What an attention backend must do, each as a named check. Numbers are held to `dense` and its bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from hypothesis import strategies as st

from kvproof.attention import AttentionBackend
from kvproof.attention.plan import ARRAYS
from kvproof.fuzz.conformance.batches import Batch, Row, batches, shapes
from kvproof.fuzz.conformance.driving import (
    NAN,
    assert_near,
    assert_right,
    assert_same,
    bits,
    decodes_first,
    inputs,
    pages,
    planned,
    primed,
    run_in_steps,
    step,
    write,
)
from kvproof.fuzz.conformance.refusals import declared_is_supported, refusals_change_nothing, undeclared_is_refused
from kvproof.fuzz.conformance.report import Check, on_data, once
from kvproof.fuzz.dense import dense

Backend = type[AttentionBackend]


def checks(backend: Backend, device: str | None = None) -> tuple[Check, ...]:
    """All checks of `backend`, on `device` or else on a device that it declares, the CPU if it can."""
    declared = backend.capabilities().devices
    device = device or ("cpu" if "cpu" in declared else min(declared))
    random = (*RANDOM, *LSE) if "lse" in backend.capabilities().features else RANDOM
    return (
        *(on_data(_name(check), _bound(check, backend, device)) for check in random),
        once(_name(declared_is_supported), lambda: declared_is_supported(backend, device)),
        once(_name(undeclared_is_refused), lambda: undeclared_is_refused(backend, device)),
    )


def _name(check: Callable[..., None]) -> str:
    return check.__name__.replace("_", " ")


def _bound(
    check: Callable[[Backend, Batch, st.DataObject], None], backend: Backend, device: str
) -> Callable[[st.DataObject], None]:
    batch = batches(shapes(backend.capabilities(), device), padded=bool(backend.graph_sizes))
    return lambda data: check(backend, data.draw(batch, label="batch"), data)


# ---- results


def a_step_is_right(backend: Backend, batch: Batch, data: st.DataObject) -> None:
    """Every row attends to its own tokens, causally, whatever else is in the batch."""
    it = primed(backend, batch.spec, batch.rows)
    out = step(it, batch.rows)
    assert_right(batch.spec, batch.rows, out)
    for part in out:
        assert (part.dtype, part.device) == (batch.spec.torch_dtype, it.cache.device)


def unused_slots_are_not_read(backend: Backend, batch: Batch, data: st.DataObject) -> None:
    """Nor multiplied by zero: infinity and NaN in a slot that belongs to no row change nothing."""
    fillers = (NAN, float("inf"), float("-inf")) if batch.spec.cache_dtype is None else (NAN,)  # all it has
    filler = data.draw(st.sampled_from(fillers), label="filler")
    out = step(primed(backend, batch.spec, batch.rows, filler), batch.rows)
    assert_same(batch.spec, batch.rows, out, step(primed(backend, batch.spec, batch.rows, 0.0), batch.rows))


def steps_follow_each_other(backend: Backend, batch: Batch, data: st.DataObject) -> None:
    """A prompt may be computed in chunks, beside whatever else a step holds: every plan replaces the last.

    Results are looked at when all steps are done, so that preparing one must leave the one before alone.
    """
    for ran in run_in_steps(primed(backend, batch.spec, batch.rows), batch.rows, data):
        assert_right(batch.spec, ran.rows, ran.outputs())


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
    wrong[:, : batch.blocks.start] = False  # what padding writes
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
    before, expected = bits(it.cache).clone(), bits(it.cache).clone()
    block = st.integers(0, batch.spec.num_blocks - 1)
    orders = data.draw(st.lists(st.tuples(block, block), max_size=4, unique_by=lambda order: order[1]), label="orders")
    it.copy_blocks(orders)
    for source, destination in orders:
        expected[:, destination] = before[:, source]
    wrong = (bits(it.cache) != expected).flatten(2).any(-1).nonzero()[:3].tolist()
    assert not wrong, f"wrong content at [layer, block] {wrong}"


# ---- what makes no difference


def physical_blocks_may_be_permuted(backend: Backend, batch: Batch, data: st.DataObject) -> None:
    to = dict(zip(batch.blocks, data.draw(st.permutations(batch.blocks), label="block numbers"), strict=True))
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


# ---- log-sum-exp, where it is declared


def log_sum_exps_are_right(backend: Backend, batch: Batch, data: st.DataObject) -> None:
    """Beside outputs that are right as well; nothing is written."""
    spec, rows = batch.spec, decodes_first(batch.rows)
    it = primed(backend, spec, rows)
    step(it, rows)
    it.plan(planned(spec, rows))
    cache = bits(it.cache).clone()
    out, lse = (
        torch.stack(x) for x in zip(*(it.attend_lse(layer, inputs(rows, layer)[0]) for layer in (0, 1)), strict=True)
    )
    assert lse.dtype is torch.float32, f"the log-sum-exps are {lse.dtype}"
    lengths = [row.query_len for row in rows]
    for row, row_out, row_lse in zip(
        rows, torch.split(out, lengths, dim=1), torch.split(lse, lengths, dim=1), strict=True
    ):
        right = dense(spec, row.q, row.k, row.v)
        assert_near(f"log-sum-exp of {row}", row_lse, right.lse, right.lse_error)
        assert_near(f"output beside it of {row}", row_out, right.out, right.out_error)
    assert torch.equal(bits(it.cache), cache), "the cache has changed"


def parts_of_a_sequence_merge_by_log_sum_exp(backend: Backend, batch: Batch, data: st.DataObject) -> None:
    """Attention to the first blocks of a sequence and to the rest, merged, is attention to all of it.

    Without a window, which would end elsewhere in each of the parts.
    """
    spec, size = batch.spec.model_copy(update={"window": None}), batch.spec.block_size
    for row in batch.rows:
        if row.seq_len <= size or not row.query_len:
            continue
        # One token of the row, as a decode over blocks that hold all that it sees.
        token = data.draw(st.integers(max(0, size - row.context), row.query_len - 1), label=f"token of {row}")
        row = replace(row.part(token, token + 1), table=tuple(batch.blocks[: -(-row.seq_len // size)]))
        cut = data.draw(st.integers(1, (row.seq_len - 1) // size), label="blocks of the first part")
        it = primed(backend, spec, ())
        write(spec, it.cache, row, 0, row.seq_len)
        first = Row(row.table[:cut], row.q, row.k[:, : cut * size], row.v[:, : cut * size])
        rest = Row(row.table[cut:], row.q, row.k[:, cut * size :], row.v[:, cut * size :])
        states = []
        for part in (first, rest):
            it.plan(planned(spec, [part]))
            states.append([it.attend_lse(layer, part.q[layer]) for layer in range(spec.num_layers)])
        outs, lses = (
            torch.stack([torch.stack([layer[i] for layer in state]) for state in states]).double() for i in (0, 1)
        )
        merged = (lses.softmax(0).unsqueeze(-1) * outs).sum(0)
        right = dense(spec, row.q, row.k, row.v)
        bound = 2 * right.out_error + 2 * right.lse_error.unsqueeze(-1) * (outs[0] - outs[1]).abs()
        assert_near(f"{row}, cut after block {cut}", merged, right.out, bound)


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
LSE = (log_sum_exps_are_right, parts_of_a_sequence_merge_by_log_sum_exp)
