"""Planted faults of CUDA graphs, cascade, 8-bit caches and the other kernels, see test_flashinfer_faults.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from kvproof.attention import BatchPlan
from kvproof.attention import flashinfer as driver
from kvproof.attention import flashinfer_lane as lane
from kvproof.attention.flashinfer import FlashInferAttention
from kvproof.attention.flashinfer_cascade import common_prefix
from kvproof.attention.flashinfer_graph import GraphLane
from kvproof.attention.flashinfer_lane import Lane
from kvproof.fuzz.flashinfer_double import (
    CascadeOverDouble,
    FA3OverDouble,
    FlashInferOverDouble,
    GraphsOverDouble,
    LazyGraphsOverDouble,
    PersistentOverDouble,
)
from kvproof.fuzz.flashinfer_plants import Plant, argument, assert_noticed, nothing_waits, wrapper_argument

pytestmark = pytest.mark.usefixtures("one_thread")

# ---- CUDA graphs


def tokens_stay_where_the_last_step_put_them(patch: pytest.MonkeyPatch) -> None:
    def faulty(self: GraphLane, batch: BatchPlan, tokens: Tensor) -> None:
        self.tokens = tokens

    patch.setattr(GraphLane, "_place_tokens", faulty)


def indices_from_the_host(patch: pytest.MonkeyPatch) -> None:
    def faulty(self: GraphLane, indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> None:
        size = self._spec.head_size
        self._plan_wrapper(self._decode, indptr=indptr, indices=indices, last_page_len=last_page_len, head_dim=size)

    patch.setattr(GraphLane, "_plan_decodes", faulty)


def a_size_too_large(patch: pytest.MonkeyPatch) -> None:
    """Padded, but planned on the lane of the largest size."""

    def faulty(self: FlashInferAttention, batch: BatchPlan) -> None:
        fits = self.graph_rows(batch) == batch.num_rows
        self._lane = self._graph_lanes[max(self.graph_sizes)] if fits else self._lanes[0]
        self._lane.plan(batch)
        self._lanes.rotate(-1)

    patch.setattr(FlashInferAttention, "_plan", faulty)


def sizes_without_schedules_of_their_own(patch: pytest.MonkeyPatch) -> None:
    """A step runs on what the last step of its size was scheduled for."""
    plan_wrapper = Lane._plan_wrapper

    def faulty(self: Lane, wrapper: Any, **step: Any) -> None:
        kept = wrapper._scheduled
        plan_wrapper(self, wrapper, **step)
        if kept is not None:
            self._kernels.copy.__self__.submit(lambda: setattr(wrapper, "_scheduled", kept))  # type: ignore[attr-defined]

    patch.setattr(Lane, "_plan_wrapper", faulty)


GRAPH_FAULTS: list[tuple[str, Plant, str]] = [
    ("tokens not copied", tokens_stay_where_the_last_step_put_them, ""),
    ("indices from the host", indices_from_the_host, "blocking-plan"),
    ("the wrapper of another size", a_size_too_large, "graph-rows"),
    ("an old schedule", sizes_without_schedules_of_their_own, "stale-schedule"),
]


# ---- cascade


def prefix(change: Callable[[int], int]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(driver, "common_prefix", lambda *a, **k: (n := common_prefix(*a, **k)) and change(n))

    return plant


def first_and_last_row_decide(patch: pytest.MonkeyPatch) -> None:
    def faulty(batch: BatchPlan, at_least: int) -> int:
        if batch.num_decodes < 2:
            return 0
        ends = [batch.kv_indptr[row : row + 2].tolist() for row in (0, batch.num_decodes - 1)]
        first, last = (batch.kv_indices[slice(*end)].tolist() for end in ends)
        return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)

    patch.setattr(driver, "common_prefix", faulty)


def prefix_read_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lane, "without_prefix", lambda indptr, indices, blocks: (indptr, indices))


def merging(change: Callable[..., dict[str, Tensor]]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        kernels = FlashInferOverDouble._kernels

        def faulty(self: FlashInferOverDouble) -> Any:
            made = kernels(self)
            return replace(made, merge=lambda **states: made.merge(**(states | change(**states))))

        patch.setattr(FlashInferOverDouble, "_kernels", faulty)

    return plant


def with_a_window(patch: pytest.MonkeyPatch) -> None:
    def faulty(self: FlashInferAttention, batch: BatchPlan) -> int:
        return common_prefix(batch, at_least=1)

    patch.setattr(FlashInferAttention, "_shared_blocks", faulty)


CASCADE_FAULTS: list[tuple[str, Plant, str]] = [
    ("prefix a block too long", prefix(lambda n: n + 1), "last-page-len"),
    ("prefix of two rows only", first_and_last_row_decide, "last-page-len"),
    ("prefix read twice", prefix_read_twice, ""),
    ("one part merged with itself", merging(lambda v, s, **_: {"v_other": v, "s_other": s}), ""),
    ("natural logarithms merged", merging(lambda s_other, **_: {"s_other": s_other * math.log(2)}), ""),
    ("prefix causal", wrapper_argument("causal", lambda _: True), ""),
    ("with a window", with_a_window, ""),
]


# ---- caches of 8 bits, and other kernels


def stored(change: Callable[[Tensor, float], tuple[Tensor, float]]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        right = FlashInferAttention._stored
        patch.setattr(FlashInferAttention, "_stored", lambda self, x, scale: right(self, *change(x, scale)))

    return plant


def scales(change: Callable[[dict[str, float]], dict[str, float]]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        init = Lane.__init__

        def faulty(self: Lane, *args: Any) -> None:
            init(self, *args)
            self._scales = change(self._scales)

        patch.setattr(Lane, "__init__", faulty)

    return plant


FP8_FAULTS: list[tuple[str, Plant, str]] = [
    ("scales forgotten", scales(lambda _: {}), "scales"),
    ("scales exchanged", scales(lambda of: {"k_scale": of["v_scale"], "v_scale": of["k_scale"]} if of else of), ""),
    ("stored the wrong way round", stored(lambda x, scale: (x, 1 / scale)), ""),
    ("stored unscaled", stored(lambda x, _: (x, 1.0)), ""),
    ("cache taken for 16 bits", argument(kv_data_type=lambda _, spec: spec.torch_dtype), "dtype"),
]


def fa3_on_8_bits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FA3OverDouble, "capabilities", FlashInferOverDouble.capabilities)


# ---- all of them

CASES = [
    *((GraphsOverDouble, *fault) for fault in GRAPH_FAULTS),
    (LazyGraphsOverDouble, "graphs wait for no copies", nothing_waits, "replanned-too-soon"),
    *((CascadeOverDouble, *fault) for fault in CASCADE_FAULTS),
    *((FlashInferOverDouble, *fault) for fault in FP8_FAULTS),
    (PersistentOverDouble, "soft cap planned and not run", argument(logits_soft_cap=lambda *_: 0.0), ""),
    (FA3OverDouble, "FA3 on 8 bits", fa3_on_8_bits, "dtype"),
]


@pytest.mark.parametrize(
    ("backend", "plant", "rule"),
    [(backend, plant, rule) for backend, _, plant, rule in CASES],
    ids=[name for _, name, _, _ in CASES],
)
def test_a_planted_fault_is_noticed(
    backend: type[FlashInferOverDouble], plant: Plant, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert_noticed(backend, rule)
