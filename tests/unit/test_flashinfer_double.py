"""Every rule of the double, broken one at a time in calls that are otherwise right.

Of all of these the real package refuses a few: see docs/flashinfer.md.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvproof.fuzz.flashinfer_kernel import ContractViolation
from kvproof.fuzz.flashinfer_stream import RecordedGraph, Stream
from kvproof.fuzz.flashinfer_wrappers import DecodeDouble, PrefillDouble, merge


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


MAKE: dict[str, Any] = {
    "float_workspace_buffer": torch.zeros(2**20, dtype=torch.uint8),
    "kv_layout": "NHD",
    "backend": "fa2",
}
COMMON: dict[str, Any] = {
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "page_size": 4,
    "window_left": -1,
    "logits_soft_cap": 0.0,
    "sm_scale": 0.125,
    "q_data_type": torch.float16,
    "kv_data_type": torch.float16,
    "o_data_type": torch.float16,
    "non_blocking": True,
}
# Two rows of 2 and 1 pages with 6 and 3 tokens, and an empty one.
DECODE = COMMON | {"indptr": ints(0, 2, 3), "indices": ints(5, 1, 3), "last_page_len": ints(2, 3), "head_dim": 64}
PREFILL = COMMON | {
    "qo_indptr": ints(0, 3, 4, 4),
    "paged_kv_indptr": ints(0, 2, 3, 3),
    "paged_kv_indices": ints(5, 1, 3),
    "paged_kv_last_page_len": ints(2, 3, 0),
    "head_dim_qk": 64,
    "causal": True,
}


def cache() -> Tensor:
    return torch.randn(8, 2, 4, 2, 64).half()


def call(rows: int) -> dict[str, Any]:
    q = torch.randn(rows, 4, 64).half()
    return {"q": q, "paged_kv_cache": cache(), "out": torch.empty_like(q)}


def prefill(stream: Stream, **changes: Any) -> PrefillDouble:
    return PrefillDouble(stream, **(MAKE | changes))


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("index-dtype", {"qo_indptr": torch.tensor([0, 3, 4, 4])}),
        ("index-dtype", {"paged_kv_indices": torch.tensor([5, 1, 3])}),
        ("index-contiguous", {"paged_kv_indices": ints(5, 5, 1, 1, 3, 3)[::2]}),
        ("index-device", {"paged_kv_indices": ints(5, 1, 3).to("meta")}),
        ("batch-size", {"paged_kv_last_page_len": ints(2, 3)}),
        ("batch-size", {"qo_indptr": ints(0, 3, 4)}),
        (
            "empty-batch",
            {"qo_indptr": ints(0), "paged_kv_indptr": ints(0), "paged_kv_last_page_len": ints()},
        ),
        ("indptr-start", {"qo_indptr": ints(1, 4, 5, 5)}),
        ("indptr-start", {"paged_kv_indptr": ints(1, 3, 4, 4)}),
        ("indptr-decreases", {"qo_indptr": ints(0, 5, 4, 4)}),
        ("indptr-decreases", {"paged_kv_indptr": ints(0, 4, 3, 3)}),
        ("indices-length", {"paged_kv_indices": ints(5, 1)}),
        ("indices-length", {"paged_kv_indices": ints(5, 1, 3, 4)}),
        ("last-page-len", {"paged_kv_last_page_len": ints(0, 3, 0)}),
        ("last-page-len", {"paged_kv_last_page_len": ints(5, 3, 0)}),
        ("last-page-len", {"paged_kv_last_page_len": ints(2, 3, 1)}),
        ("query-len", {"qo_indptr": ints(0, 7, 8, 8)}),
        ("query-len", {"qo_indptr": ints(0, 3, 4, 5)}),
        ("token-index", {"page_size": 2**31}),
        ("group-size", {"num_qo_heads": 5}),
        ("dtype", {"kv_data_type": torch.bfloat16}),
        ("dtype", {"o_data_type": torch.float32}),
        ("window", {"window_left": -2}),
        ("soft-cap", {"logits_soft_cap": -1.0}),
        ("scale", {"sm_scale": 0.0}),
        ("blocking-plan", {"non_blocking": False}),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused(rule: str, changes: dict[str, Any]) -> None:
    wrapper = prefill(Stream())
    with pytest.raises(ContractViolation) as refusal:
        wrapper.plan(**(PREFILL | changes))
    assert refusal.value.rule == rule
    with pytest.raises(ContractViolation, match="not-planned"):
        wrapper.run(**call(4))
    wrapper.plan(**PREFILL)


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("workspace-dtype", {"float_workspace_buffer": torch.zeros(2**20)}),
        ("workspace-zeroed", {"float_workspace_buffer": torch.ones(2**20, dtype=torch.uint8)}),
        ("workspace-alignment", {"float_workspace_buffer": torch.zeros(2**20, dtype=torch.uint8)[1:]}),
        ("layout", {"kv_layout": "NDH"}),
        ("backend", {"backend": "auto"}),
    ],
)
def test_a_wrapper_made_wrong_is_refused(rule: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ContractViolation) as refusal:
        prefill(Stream(), **changes)
    assert refusal.value.rule == rule


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("cache-type", {"paged_kv_cache": list(cache().unbind(1))}),
        ("cache-shape", {"paged_kv_cache": cache().transpose(2, 3)}),
        ("cache-shape", {"paged_kv_cache": torch.zeros(8, 2, 8, 2, 64).half()}),
        ("cache-shape", {"paged_kv_cache": torch.zeros(8, 2, 4, 4, 64).half()}),
        ("dtype", {"paged_kv_cache": cache().bfloat16()}),
        ("page-range", {"paged_kv_cache": cache()[:5]}),
        ("q-shape", {"q": torch.zeros(3, 4, 64).half()}),
        ("q-shape", {"q": torch.zeros(5, 4, 64).half()}),
        ("q-shape", {"q": torch.zeros(4, 8, 64).half()}),
        ("q-shape", {"q": torch.zeros(4, 4, 128).half()}),
        ("q-contiguous", {"q": torch.zeros(4, 64, 4).half().transpose(1, 2)}),
        ("dtype", {"q": torch.zeros(4, 4, 64)}),
        ("alignment", {"q": torch.zeros(4 * 4 * 64 + 1).half()[1:].view(4, 4, 64)}),
        ("out-shape", {"out": torch.zeros(5, 4, 64).half()}),
        ("out-contiguous", {"out": torch.zeros(4, 64, 4).half().transpose(1, 2)}),
        ("dtype", {"out": torch.zeros(4, 4, 64)}),
        ("lse", {"lse": torch.zeros(4, 4)}),
        ("lse", {"return_lse": True}),
        ("lse-shape", {"lse": torch.zeros(4, 4).half(), "return_lse": True}),
        ("lse-shape", {"lse": torch.zeros(4, 2), "return_lse": True}),
        ("lse-contiguous", {"lse": torch.zeros(4, 4).T, "return_lse": True}),
    ],
)
def test_a_run_that_breaks_a_rule_is_refused(rule: str, changes: dict[str, Any]) -> None:
    wrapper = prefill(Stream())
    wrapper.plan(**PREFILL)
    with pytest.raises(ContractViolation) as refusal:
        wrapper.run(**(call(4) | changes))
    assert refusal.value.rule == rule


@pytest.mark.parametrize("unknown", [{"sinks": torch.zeros(4)}, {"q_scale": 2.0}])
def test_what_the_wrappers_would_ignore_is_not_taken(unknown: dict[str, Any]) -> None:
    wrapper = prefill(Stream())
    wrapper.plan(**PREFILL)
    with pytest.raises(TypeError, match="unexpected keyword"):
        wrapper.run(**call(4), **unknown)


@pytest.mark.parametrize("name", ["q_data_type", "kv_data_type", "o_data_type", "causal", "sm_scale", "window_left"])
def test_nothing_is_assumed(name: str) -> None:
    with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{name}'"):
        prefill(Stream()).plan(**{key: value for key, value in PREFILL.items() if key != name})


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16])
def test_the_decode_kernel_without_tensor_cores_takes_some_group_sizes(group: int) -> None:
    DecodeDouble(Stream(), **MAKE, use_tensor_cores=True).plan(**(DECODE | {"num_qo_heads": 2 * group}))
    wrapper = DecodeDouble(Stream(), **MAKE, use_tensor_cores=False)
    if group in (5, 7, 9):
        with pytest.raises(ContractViolation, match=f"^group-size: {group} without tensor cores$"):
            wrapper.plan(**(DECODE | {"num_qo_heads": 2 * group}))
    else:
        wrapper.plan(**(DECODE | {"num_qo_heads": 2 * group}))


def test_a_launch_without_queries_is_refused() -> None:
    wrapper = prefill(Stream())
    wrapper.plan(**(PREFILL | {"qo_indptr": ints(0, 0, 0, 0)}))
    with pytest.raises(ContractViolation, match=r"^empty-launch: "):
        wrapper.run(**call(0))


def test_a_workspace_that_is_too_small_is_reported_in_the_package_s_words() -> None:
    wrapper = prefill(Stream(), float_workspace_buffer=torch.zeros(4159, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match=r"^Buffer overflow .* with size 4160 and .* only 4159 bytes available"):
        wrapper.plan(**PREFILL)


def test_arrays_are_read_when_the_stream_gets_there() -> None:
    stream = Stream(lazy=True)
    wrapper, indices = prefill(stream), ints(5, 1, 3)
    wrapper.plan(**(PREFILL | {"paged_kv_indices": indices}))
    with pytest.raises(ContractViolation, match=r"^replanned-too-soon: "):
        wrapper.plan(**PREFILL)
    indices[1] = 2
    with pytest.raises(ContractViolation, match=r"^overwritten: kv_indices "):
        stream.wait()


def test_outputs_are_nan_until_the_kernel_ran_and_slots_past_the_end_from_then_on() -> None:
    stream = Stream(lazy=True)
    wrapper, arguments = prefill(stream), call(4)
    wrapper.plan(**PREFILL)
    wrapper.run(**arguments)
    assert arguments["out"].isnan().all()
    stream.wait()
    assert arguments["out"].isfinite().all()
    used = torch.full((8, 4), fill_value=True)
    used[1, 2:] = used[3, 3:] = False
    assert torch.equal(arguments["paged_kv_cache"].isfinite().all(-1).all(-1), used[:, None].expand(8, 2, 4))


# ---- CUDA graphs, and states merged


def buffers(rows: int = 2, room: int = 6) -> dict[str, Any]:
    return {
        "use_cuda_graph": True,
        "paged_kv_indptr_buffer": torch.zeros(rows + 1, dtype=torch.int32),
        "paged_kv_indices_buffer": torch.zeros(room, dtype=torch.int32),
        "paged_kv_last_page_len_buffer": torch.zeros(rows, dtype=torch.int32),
    }


def planned_in(memory: dict[str, Any], pages: Tensor, **changes: Any) -> dict[str, Any]:
    place = memory["paged_kv_indices_buffer"][: len(pages)]
    place.copy_(pages)
    return DECODE | {"indices": place} | changes


@pytest.mark.parametrize(
    ("rule", "made", "plan"),
    [
        ("graph-buffers", {"use_cuda_graph": False}, {}),
        ("graph-buffers", {"paged_kv_indptr_buffer": ints(0, 0, 0, 0)}, {}),
        ("graph-buffers", {"paged_kv_indices_buffer": torch.zeros(6)}, {}),
        ("graph-rows", {}, {"last_page_len": ints(2), "indptr": ints(0, 3)}),
        ("graph-indices", {}, {"indices": torch.zeros(7, dtype=torch.int32), "indptr": ints(0, 2, 7)}),
        ("blocking-plan", {}, {"indices": ints(5, 1, 3)}),
    ],
)
def test_a_graph_s_wrapper_is_made_and_planned_for_its_buffers(
    rule: str, made: dict[str, Any], plan: dict[str, Any]
) -> None:
    memory = buffers()
    with pytest.raises(ContractViolation) as refusal:
        DecodeDouble(Stream(), **(MAKE | memory | made)).plan(**planned_in(memory, ints(5, 1, 3), **plan))
    assert refusal.value.rule == rule


def test_a_graph_repeats_work_on_what_memory_holds_by_then() -> None:
    stream, memory = Stream(), buffers()
    wrapper = DecodeDouble(stream, **MAKE, **memory)
    arguments = call(2)
    wrapper.plan(**planned_in(memory, ints(5, 1, 3)))
    wrapper.run(**arguments)
    first = arguments["out"].clone()
    graph = RecordedGraph(stream)

    def work() -> Tensor:
        wrapper.run(**arguments)
        return arguments["out"] * 2

    doubled = graph.capture(work)
    assert not torch.equal(doubled, 2 * first)  # capturing runs no kernel
    graph.replay()
    assert torch.equal(doubled, 2 * first)
    wrapper.plan(**planned_in(memory, ints(7, 2, 0), indptr=ints(0, 1, 3)))
    arguments["q"].mul_(0.5)
    graph.replay()
    eager = {**arguments, "out": torch.empty_like(first)}
    wrapper.run(**eager)
    assert torch.equal(doubled, 2 * eager["out"])
    assert not torch.equal(eager["out"], first)
    memory["paged_kv_last_page_len_buffer"][0] = 1  # as another size's wrapper would, with the same buffers
    with pytest.raises(ContractViolation, match=r"^stale-schedule: "):
        graph.replay()


def test_8_bits_need_fa2_and_their_scales() -> None:
    small = {"kv_data_type": torch.float8_e4m3fn}
    with pytest.raises(ContractViolation, match=r"^dtype: fa3"):
        prefill(Stream(), backend="fa3").plan(**(PREFILL | small))
    wrapper = prefill(Stream())
    wrapper.plan(**(PREFILL | small))
    arguments = call(4) | {"paged_kv_cache": cache().to(torch.float8_e4m3fn)}
    for scales in ({}, {"k_scale": 0.5}, {"v_scale": 0.5}):
        with pytest.raises(ContractViolation, match=r"^scales: "):
            wrapper.run(**arguments, **scales)
    wrapper.run(**arguments, k_scale=0.5, v_scale=1.0)
    half = arguments["out"].clone()
    wrapper.run(**arguments, k_scale=0.5, v_scale=0.5)
    assert torch.equal(arguments["out"], half * 0.5)
    wrapper.plan(**PREFILL)
    with pytest.raises(ContractViolation, match=r"^scales: "):
        wrapper.run(**call(4), k_scale=1.0, v_scale=1.0)


def test_merged_states_are_those_of_the_whole() -> None:
    scores, values = torch.randn(2, 3, 4, 8).double(), torch.randn(2, 3, 4, 8, 16).double()
    states = [(s.softmax(-1)[..., None] * v).sum(-2) for s, v in zip(scores, values, strict=True)]
    lse = [(s.logsumexp(-1) * math.log2(math.e)).float() for s in scores]
    whole = torch.cat(list(scores), dim=-1)
    right = (whole.softmax(-1)[..., None] * torch.cat(list(values), dim=-2)).sum(-2)
    v, s = states[0].float(), lse[0].clone()
    merge(Stream(), v=v, s=s, v_other=states[1].float(), s_other=lse[1])
    torch.testing.assert_close(v.double(), right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(s.double(), whole.logsumexp(-1) * math.log2(math.e), rtol=1e-5, atol=1e-5)
    for broken in (
        {"s": s.half()},
        {"v_other": v[:2]},
        {"s_other": s.T},
        {"v": v.transpose(0, 1).contiguous().transpose(0, 1)},
    ):
        with pytest.raises(ContractViolation, match=r"^merge: "):
            merge(Stream(), **({"v": v, "s": s, "v_other": v, "s_other": s} | broken))
