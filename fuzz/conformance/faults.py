"""Faults to plant in an attention backend, each with the check of the kit that notices it.

They are put round a backend's methods, so that they outlive changes to its source. Those of the metadata come after
`BatchPlan.validate`, which would refuse them: they stand for a backend that reads a right plan wrongly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvproof.attention import AttentionBackend, BatchPlan, Capabilities
from kvproof.attention.reference import ReferenceAttention
from kvproof.attention.torch_paged import TorchAttention
from kvproof.fuzz.conformance import attention as checks

Method = Callable[..., Any]


@dataclass(frozen=True)
class MethodFault:
    """`around(original)` takes the place of `owner.method`.

    noticed_by  the function in `kvproof.fuzz.conformance.attention` that fails, on `backend`
    """

    name: str
    owner: type
    method: str
    around: Callable[[Method], Method]
    noticed_by: Callable[..., None]
    why: str

    def __str__(self) -> str:
        return self.name

    @property
    def backend(self) -> type[AttentionBackend]:
        """The backend that has the fault; a fault of what all of them stand on shows in any."""
        return self.owner if issubclass(self.owner, AttentionBackend) else TorchAttention

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The fault is in force inside the `with` block. Not for use beside other threads."""
        inherited = self.method not in vars(self.owner)
        kept = inspect.getattr_static(self.owner, self.method)
        setattr(self.owner, self.method, self.around(getattr(self.owner, self.method)))
        try:
            yield
        finally:
            if inherited:
                delattr(self.owner, self.method)
            else:
                setattr(self.owner, self.method, kept)


@contextmanager
def unvalidated() -> Iterator[None]:
    """Inside, any plan is valid."""
    kept = BatchPlan.validate
    setattr(BatchPlan, "validate", lambda *_: None)  # noqa: B010 - a method is not assignable, says mypy
    try:
        yield
    finally:
        setattr(BatchPlan, "validate", kept)  # noqa: B010


def misread(
    name: str,
    change: Callable[[BatchPlan, int], BatchPlan],
    why: str,
    noticed_by: Callable[..., None] = checks.a_step_is_right,
    owner: type[AttentionBackend] = TorchAttention,
) -> MethodFault:
    """A fault of metadata: a valid plan is prepared as if it were `change(plan, block_size)`."""

    def around(plan_step: Method) -> Method:
        def plan(self: AttentionBackend, batch: BatchPlan) -> None:
            batch.validate(self.spec)
            with unvalidated():
                plan_step(self, change(batch, self.spec.block_size))

        return plan

    return MethodFault(name, owner, "plan", around, noticed_by, why)


# ---- metadata


def _query_lens(plan: BatchPlan) -> Tensor:
    return plan.qo_indptr.diff()


def _shorter(plan: BatchPlan, block_size: int) -> BatchPlan:
    """One token less in every row's last page, where that leaves one and its queries fit."""
    less = ((plan.kv_last_page_len > 1) & (plan.seq_lens > _query_lens(plan))).int()
    return replace(plan, seq_lens=plan.seq_lens - less, kv_last_page_len=plan.kv_last_page_len - less)


def _longer(plan: BatchPlan, block_size: int) -> BatchPlan:
    """One token more in every row's last page, where there is room."""
    more = ((plan.kv_last_page_len > 0) & (plan.kv_last_page_len < block_size)).int()
    return replace(plan, seq_lens=plan.seq_lens + more, kv_last_page_len=plan.kv_last_page_len + more)


def _full_pages(plan: BatchPlan, block_size: int) -> BatchPlan:
    blocks = plan.kv_indptr.diff()
    return replace(plan, seq_lens=blocks * block_size, kv_last_page_len=(blocks > 0).int() * block_size)


def _one_slot_on(plan: BatchPlan, block_size: int) -> BatchPlan:
    return replace(
        plan, slot_mapping=plan.slot_mapping // block_size * block_size + (plan.slot_mapping + 1) % block_size
    )


def _first_block_written(plan: BatchPlan, block_size: int) -> BatchPlan:
    """Right offsets, and the block of the batch's first token for all."""
    first = plan.slot_mapping[:1] // block_size * block_size
    return replace(plan, slot_mapping=first + plan.slot_mapping % block_size)


def _tables_sorted(plan: BatchPlan, block_size: int) -> BatchPlan:
    """Every row's blocks in physical order."""
    parts = plan.kv_indices.tensor_split(plan.kv_indptr[1:-1].long())
    return replace(plan, kv_indices=torch.cat([part.sort().values for part in parts]).int())


def _second_block_twice(plan: BatchPlan, block_size: int) -> BatchPlan:
    """Every row of two blocks or more begins with its second one."""
    begin = plan.kv_indptr[:-1][plan.kv_indptr.diff() > 1].long()
    indices = plan.kv_indices.clone()
    indices[begin] = indices[begin + 1]
    return replace(plan, kv_indices=indices)


METADATA_FAULTS = (
    misread("one token of the last page is missed", _shorter, "last_page_len, off by one below"),
    misread("one token too many of the last page", _longer, "last_page_len, off by one above (flashinfer#320)"),
    misread("the last page is read whole", _full_pages, "its free slots hold anything"),
    misread(
        "slots are those of the token before",
        lambda plan, _: replace(plan, slot_mapping=plan.slot_mapping.roll(1)),
        "slot_mapping, off by one token",
        checks.writes_touch_the_planned_slots_only,
    ),
    misread(
        "one slot on",
        _one_slot_on,
        "slot_mapping, off by one in its block",
        checks.writes_touch_the_planned_slots_only,
    ),
    misread(
        "all slots in one block",
        _first_block_written,
        "a chunk that crosses a block's boundary",
        checks.writes_touch_the_planned_slots_only,
    ),
    misread(
        "tables begin one block early",
        lambda plan, _: replace(plan, kv_indices=plan.kv_indices.roll(1)),
        "kv_indices against kv_indptr",
    ),
    misread("tables in physical order", _tables_sorted, "a test with ascending block numbers would not notice"),
    misread("the second block twice", _second_block_twice, "a wrong block in kv_indices"),
    misread(
        "one block for all",
        lambda plan, _: replace(plan, kv_indices=plan.kv_indices[:1].repeat(plan.kv_indices.numel())),
        "the first row's first",
    ),
    # The torch backend takes its mask from the lengths and never looks at positions.
    misread(
        "a token sees the next one",
        lambda plan, _: replace(plan, positions=plan.positions + 1),
        "positions, off by one above",
        owner=ReferenceAttention,
    ),
    misread(
        "a token does not see itself",
        lambda plan, _: replace(plan, positions=plan.positions - 1),
        "positions, off by one below",
        owner=ReferenceAttention,
    ),
)
"""A backend that reads a right plan wrongly."""


# ---- arithmetic, writing, copying, state


def _on_queries(change: Callable[[AttentionBackend, Tensor], Tensor]) -> Callable[[Method], Method]:
    """Attention of changed queries."""

    def around(attend: Method) -> Method:
        return lambda self, layer, q: attend(self, layer, change(self, q))

    return around


def _heads_interleaved(attend: Method) -> Method:
    """Query head h on key head h % num_kv_heads, instead of h // group_size."""

    def attend_wrongly(self: AttentionBackend, layer: int, q: Tensor) -> Tensor:
        spec = self.spec
        to = torch.arange(spec.num_heads).view(spec.group_size, spec.num_kv_heads).T.reshape(-1)
        out: Tensor = attend(self, layer, q[:, to])
        return out[:, to.argsort()]

    return attend_wrongly


def _mask_upside_down(attend: Method) -> Method:
    """The first query token of a row sees all of it, and the last one only the context and the first."""

    def attend_wrongly(self: AttentionBackend, layer: int, q: Tensor) -> Tensor:
        parts = q.tensor_split(self.batch.qo_indptr[1:-1].long())
        out: Tensor = attend(self, layer, torch.cat([part.flip(0) for part in parts]))
        return torch.cat([part.flip(0) for part in out.tensor_split(self.batch.qo_indptr[1:-1].long())])

    return attend_wrongly


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
        if layer == 0 and k.shape == v.shape and k.dtype is v.dtype is self.cache.dtype and len(q) > len(k) > 0:
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


def _restless(attend: Method) -> Method:
    calls = iter(range(2**62))
    return lambda self, layer, q: attend(self, layer, q) * (1 + 2 * torch.finfo(q.dtype).eps * (next(calls) % 2))


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


def _multiplied_by_zero(attend: Method) -> Method:
    return lambda self, layer, q: attend(self, layer, q) + 0 * self.cache[layer].sum()


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


def _in_bfloat16(_: AttentionBackend, q: Tensor) -> Tensor:
    return q.bfloat16().to(q.dtype)


def _fault(
    name: str, method: str, around: Callable[[Method], Method], noticed_by: Callable[..., None], why: str
) -> MethodFault:
    return MethodFault(name, TorchAttention, method, around, noticed_by, why)


KERNEL_FAULTS = (
    _fault(
        "the scale is applied twice",
        "_attend",
        _on_queries(lambda self, q: q * self.spec.softmax_scale),
        checks.a_step_is_right,
        "once by the model, once by the kernel",
    ),
    _fault("queries in bfloat16", "_attend", _on_queries(_in_bfloat16), checks.a_step_is_right, "half the digits"),
    _fault("heads interleaved", "_attend", _heads_interleaved, checks.a_step_is_right, "h % n instead of h // group"),
    _fault("the mask upside down", "_attend", _mask_upside_down, checks.a_step_is_right, "not causal"),
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
    _fault(
        "unused slots multiplied by zero",
        "_attend",
        _multiplied_by_zero,
        checks.unused_slots_are_not_read,
        "0 * NaN is NaN (flashinfer#941)",
    ),
    _fault("results share a buffer", "run", _result_reused, checks.a_run_can_be_repeated, "overwritten by the next"),
    _fault("other bits the second time", "_attend", _restless, checks.a_run_can_be_repeated, "not deterministic"),
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
        "written before it is checked", "run", _written_before_checked, checks.refusals_change_nothing, "not atomic"
    ),
    _fault("a refused plan stays", "plan", _refused_plan_stays, checks.refusals_change_nothing, "not atomic"),
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
    _fault("page size 1 is not there", "plan", _no_page_of_one, checks.declared_is_supported, "declared and untrue"),
    MethodFault(
        "anything goes",
        Capabilities,
        "check",
        lambda _: lambda self, spec, backend="": None,
        checks.undeclared_is_refused,
        "computes something else instead of refusing",
    ),
)
"""Faults of a backend's own arithmetic and state."""

ATTENTION_FAULTS = (*METADATA_FAULTS, *KERNEL_FAULTS)
