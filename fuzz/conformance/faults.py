"""Faults to plant in an attention backend, each with the check of the kit that notices it.

Those of the metadata come after `BatchPlan.validate`, which would refuse them: they stand for a backend that reads a
right plan wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvproof.attention import AttentionBackend, BatchPlan
from kvproof.attention.reference import ReferenceAttention
from kvproof.attention.torch_paged import TorchAttention
from kvproof.fuzz.conformance import attention as checks
from kvproof.fuzz.conformance.arithmetic_faults import ARITHMETIC_FAULTS
from kvproof.fuzz.conformance.planting import Method, MethodFault, unvalidated
from kvproof.fuzz.conformance.state_faults import STATE_FAULTS

__all__ = ["ATTENTION_FAULTS", "METADATA_FAULTS", "MethodFault"]


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

ATTENTION_FAULTS = (*METADATA_FAULTS, *ARITHMETIC_FAULTS, *STATE_FAULTS)
