"""Planted faults: the double and random batches notice what the real package lets pass.

Most of these would be silent on a GPU. A driver with one of them must fail within 200 examples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvproof.attention import BatchPlan, CacheSpec
from kvproof.attention.flashinfer import FlashInferAttention
from kvproof.attention.flashinfer_lane import Lane, StepLane
from kvproof.fuzz.flashinfer_double import FlashInferOverDouble, LazyOverDouble
from kvproof.fuzz.flashinfer_plants import Plant, argument, assert_noticed, nothing_waits, wrapper_argument
from kvproof.fuzz.flashinfer_stream import StreamEvent

pytestmark = pytest.mark.usefixtures("one_thread")


def staged(*indices: int, change: Callable[[Tensor, CacheSpec], Tensor]) -> Plant:
    """Change arrays on their way to the wrappers.

    0 to 3 are the prefills' qo_indptr, kv_indptr, kv_indices and kv_last_page_len, 4 to 6 the decodes' last three.
    """

    def plant(patch: pytest.MonkeyPatch) -> None:
        stage = Lane._stage

        def faulty(self: Lane, *arrays: Tensor) -> list[Tensor]:
            made = list(stage(self, *arrays))
            for index in indices if len(made) > 1 else ():  # not in the tokens' places
                made[index] = change(made[index], self._spec)
            return made

        patch.setattr(Lane, "_stage", faulty)

    return plant


def split_one_late(patch: pytest.MonkeyPatch) -> None:
    submit = StepLane._submit

    def faulty(self: StepLane, batch: BatchPlan, shared: int) -> None:
        submit(self, batch, shared)
        self._num_decodes += self._num_decodes > 0

    patch.setattr(StepLane, "_submit", faulty)


def recorded_before_the_copies(patch: pytest.MonkeyPatch) -> None:
    record = StreamEvent.record

    def faulty(self: StreamEvent) -> None:
        if self._stream.submitted:
            record(self)
            self._at -= 1

    patch.setattr(StreamEvent, "record", faulty)


def lanes_never_change(patch: pytest.MonkeyPatch) -> None:
    def faulty(self: FlashInferAttention, batch: BatchPlan) -> None:
        self._lanes[0].plan(batch)
        self._lane = self._lanes[1]

    patch.setattr(FlashInferAttention, "_plan", faulty)


def staged_in_one_place(patch: pytest.MonkeyPatch) -> None:
    """Both lanes stage in the same memory: the second plan overwrites what the first is still to copy."""
    memory = torch.empty(10_000, dtype=torch.int32)
    init = Lane.__init__

    def faulty(self: Lane, *args: Any) -> None:
        init(self, *args)
        self._host = {torch.int32: memory}

    patch.setattr(Lane, "__init__", faulty)


def strided_queries(patch: pytest.MonkeyPatch) -> None:
    def faulty(self: FlashInferAttention, layer: int, q: Tensor) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        self._lane.run(q, self.cache[layer], out)
        return out

    patch.setattr(FlashInferAttention, "_attend", faulty)


FAULTS: list[tuple[str, Plant, str]] = [  # and by what each is noticed: a rule of the double, or wrong numbers
    (
        "full last page is 0",
        staged(3, 6, change=lambda last, spec: last.where(last < spec.block_size, 0)),
        "last-page-len",
    ),
    (
        "last_page_len too long",
        staged(3, 6, change=lambda last, spec: last + ((last > 0) & (last < spec.block_size)).int()),
        "",
    ),
    ("last_page_len too short", staged(3, 6, change=lambda last, _: last - (last > 1).int()), ""),
    ("prefill kv_indptr not rebased", staged(1, change=lambda indptr, _: indptr + 1), "indptr-start"),
    ("decode kv_indptr off by one", staged(4, change=lambda indptr, _: indptr + 1), "indptr-start"),
    ("qo_indptr not rebased", staged(0, change=lambda indptr, _: indptr + 1), "indptr-start"),
    ("int64 indices", staged(2, 5, change=lambda indices, _: indices.long()), "index-dtype"),
    ("pages in reverse order", staged(2, 5, change=lambda indices, _: indices.flip(0)), ""),
    ("page numbers off by one", staged(2, 5, change=lambda indices, spec: (indices + 1) % spec.num_blocks), ""),
    ("decode indices one short", staged(5, change=lambda indices, _: indices[:-1]), "indices-length"),
    ("a decode too many is run", split_one_late, "q-shape"),
    ("window off by one", argument(window_left=lambda left, spec: -1 if spec.window is None else spec.window), ""),
    ("window forgotten", argument(window_left=lambda *_: -1), ""),
    ("soft cap forgotten", argument(logits_soft_cap=lambda *_: 0.0), ""),
    ("custom scale forgotten", argument(sm_scale=lambda _, spec: spec.head_size**-0.5), ""),
    ("query dtype missing", argument(q_data_type=lambda *_: None), "missing 1 required keyword-only argument"),
    ("output dtype wrong", argument(o_data_type=lambda *_: torch.float32), "dtype"),
    ("heads not grouped", argument(num_kv_heads=lambda _, spec: spec.num_heads), "cache-shape"),
    ("page size wrong", argument(page_size=lambda size, _: size + 1), "cache-shape"),
    ("not causal", wrapper_argument("causal", lambda _: False), ""),
    ("layout ignored", wrapper_argument("kv_layout", lambda _: "NHD"), "cache-shape"),
    ("CUDA-core decode", wrapper_argument("use_tensor_cores", lambda _: False), "group-size"),
    ("backend left open", wrapper_argument("backend", lambda _: "auto"), "backend"),
    ("an old lane runs", lanes_never_change, "not-planned"),
    ("strided queries", strided_queries, "q-contiguous"),
]

LATE_FAULTS: list[tuple[str, Plant, str]] = [  # which show where work runs later than it is submitted
    ("nothing waits for copies", nothing_waits, "replanned-too-soon"),
    ("event recorded a copy early", recorded_before_the_copies, "overwritten"),
    ("lanes share their memory", staged_in_one_place, "overwritten"),
]
CASES = [*((FlashInferOverDouble, *fault) for fault in FAULTS), *((LazyOverDouble, *fault) for fault in LATE_FAULTS)]


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
