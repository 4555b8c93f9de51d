"""Faults of what an attention backend writes, copies, keeps and refuses: see `kvproof.fuzz.conformance.faults`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvproof.attention import AttentionBackend, BatchPlan, Capabilities
from kvproof.attention.torch_paged import TorchAttention
from kvproof.fuzz.conformance import attention as checks
from kvproof.fuzz.conformance import refusals
from kvproof.fuzz.conformance.planting import Method, MethodFault


def _one_copy_after_the_other(copy_blocks: Method) -> Method:
    def copy(self: AttentionBackend, orders: list[tuple[int, int]]) -> None:
        copy_blocks(self, orders)  # for its refusals
        for order in orders:
            copy_blocks(self, [order])

    return copy


def _moved(copy_blocks: Method) -> Method:
    def move(self: AttentionBackend, orders: list[tuple[int, int]]) -> None:
        copy_blocks(self, orders)
        for source, destination in orders:
            if source == destination:
                self.cache[:, source] = 0

    return move


def _first_layer_only(copy_blocks: Method) -> Method:
    def copy(self: AttentionBackend, orders: list[tuple[int, int]]) -> None:
        others = self.cache[1:].clone()
        copy_blocks(self, orders)
        self.cache[1:] = others

    return copy


def _written_before_checked(run: Method) -> Method:
    def run_wrongly(self: AttentionBackend, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer == 0 and k.shape == v.shape and k.dtype is v.dtype is self.spec.torch_dtype and len(q) > len(k) > 0:
            self._write(layer, k + 1, v)
        out: Tensor = run(self, layer, q, k, v)
        return out

    return run_wrongly


def _result_reused(run: Method) -> Method:
    def run_wrongly(self: Any, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = run(self, layer, q, k, v)
        if getattr(self, "kept", None) is None or self.kept.shape != out.shape:
            self.kept = out.clone()
        kept: Tensor = self.kept.copy_(out)
        return kept

    return run_wrongly


def _refused_plan_stays(plan_step: Method) -> Method:
    def plan(self: AttentionBackend, batch: BatchPlan) -> None:
        self._batch = batch
        plan_step(self, batch)

    return plan


def _plan_is_scratch(plan_step: Method) -> Method:
    def plan(self: AttentionBackend, batch: BatchPlan) -> None:
        plan_step(self, batch)
        batch.kv_indptr[1:] += 1

    return plan


def _old_plan_stays(plan_step: Method) -> Method:
    """A step of as many rows and tokens as the last one is taken for it."""

    def plan(self: AttentionBackend, batch: BatchPlan) -> None:
        last = self._batch
        if last is None or (last.num_rows, last.num_tokens) != (batch.num_rows, batch.num_tokens):
            plan_step(self, batch)

    return plan


def _no_empty_rows(plan_step: Method) -> Method:
    def plan(self: AttentionBackend, batch: BatchPlan) -> None:
        if (batch.seq_lens == 0).any():
            raise RuntimeError("an empty row")
        plan_step(self, batch)

    return plan


def _no_page_of_one(plan_step: Method) -> Method:
    def plan(self: AttentionBackend, batch: BatchPlan) -> None:
        if self.spec.block_size == 1:
            raise RuntimeError("a page of one slot")
        plan_step(self, batch)

    return plan


def _doubled_in_place(attend: Method) -> Method:
    def attend_wrongly(self: AttentionBackend, layer: int, q: Tensor) -> Tensor:
        out: Tensor = attend(self, layer, q)
        q *= 2
        return out

    return attend_wrongly


def _fault(
    name: str, method: str, around: Callable[[Method], Method], noticed_by: Callable[..., None], why: str
) -> MethodFault:
    return MethodFault(name, TorchAttention, method, around, noticed_by, why)


STATE_FAULTS = (
    _fault(
        "one layer for all",
        "_write",
        lambda write: lambda self, layer, k, v: write(self, 0, k, v),
        checks.writes_touch_the_planned_slots_only,
        "the layers share a cache",
    ),
    _fault(
        "keys and values exchanged",
        "_write",
        lambda write: lambda self, layer, k, v: write(self, layer, v, k),
        checks.writes_touch_the_planned_slots_only,
        "written and read the wrong way round, it would look right until another writes",
    ),
    _fault(
        "the step's own tokens are not written",
        "_write",
        lambda _: lambda self, layer, k, v: None,
        checks.a_step_is_right,
        "attention over the context alone",
    ),
    _fault("results share a buffer", "run", _result_reused, checks.a_run_can_be_repeated, "overwritten by the next"),
    _fault(
        "copies one after the other",
        "copy_blocks",
        _one_copy_after_the_other,
        checks.copies_are_exact,
        "a block that is both source and destination",
    ),
    _fault("a copy is a move", "copy_blocks", _moved, checks.copies_are_exact, "a block copied onto itself is lost"),
    _fault("only layer 0 is copied", "copy_blocks", _first_layer_only, checks.copies_are_exact, "no copy on write"),
    _fault(
        "written before it is checked", "run", _written_before_checked, refusals.refusals_change_nothing, "not atomic"
    ),
    _fault("a refused plan stays", "plan", _refused_plan_stays, refusals.refusals_change_nothing, "not atomic"),
    _fault(
        "the plan is scratch space", "plan", _plan_is_scratch, checks.plan_and_inputs_are_left_alone, "used by others"
    ),
    _fault(
        "queries are scaled in place",
        "_attend",
        _doubled_in_place,
        checks.plan_and_inputs_are_left_alone,
        "the model still needs them",
    ),
    _fault("the old plan stays", "plan", _old_plan_stays, checks.steps_follow_each_other, "vllm: a stale graph"),
    _fault(
        "empty rows are refused",
        "plan",
        _no_empty_rows,
        checks.rows_with_nothing_to_do_change_nothing,
        "padding rows of a graph's batch",
    ),
    _fault("page size 1 is not there", "plan", _no_page_of_one, refusals.declared_is_supported, "declared and untrue"),
    MethodFault(
        "anything goes",
        Capabilities,
        "check",
        lambda _: lambda self, spec, backend="": None,
        refusals.undeclared_is_refused,
        "computes something else instead of refusing",
    ),
)
"""A backend that does more, less or other than it is asked."""
