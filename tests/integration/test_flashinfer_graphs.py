"""Steps replayed from recorded graphs: the tokens of a busy engine, and the faults that they give away."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from kvproof.attention import AttentionBackend, BatchPlan
from kvproof.attention.base import token_index
from kvproof.attention.flashinfer import FlashInferAttention
from kvproof.attention.flashinfer_graph import GraphLane
from kvproof.attention.reference import ReferenceAttention
from kvproof.backend import Chunk, Engine, EngineBackend, SamplingParams, Step
from kvproof.backend.graphs import GraphRunner
from kvproof.fuzz.flashinfer_double import GraphsOverDouble
from kvproof.fuzz.flashinfer_kernel import ContractViolation
from kvproof.fuzz.flashinfer_stream import RecordedGraph
from kvproof.fuzz.planted import Fault
from kvproof.fuzz.toy import ToyRunner

RUNNER = ToyRunner(max_length=48)


pytestmark = pytest.mark.usefixtures("one_thread")


def generate(runner: GraphRunner | ToyRunner, attention: AttentionBackend) -> list[list[int]]:
    """Requests that come and go at different times, so that sizes and padding change; one is computed in chunks."""
    engine = Engine(runner, num_blocks=40, block_size=4, attention=attention, max_num_seqs=6, max_num_batched_tokens=8)
    requests = []
    for length, tokens in ((3, 12), (9, 4), (1, 16), (12, 3), (2, 6), (5, 20)):
        requests.append(engine.add([(7 * length + i) % 13 for i in range(length)], SamplingParams(max_tokens=tokens)))
        engine.step()
    for _ in engine.run():
        engine.manager.check()
    return [request.output_token_ids for request in requests]


SPEC = RUNNER.spec.cache_spec(num_blocks=40, block_size=4)


@cache
def right() -> list[list[int]]:
    return generate(RUNNER, ReferenceAttention(SPEC))


def replayed() -> tuple[list[list[int]], int]:
    """What is generated from graphs, and how many were captured."""
    attention = GraphsOverDouble(SPEC)
    captured = []

    def graph() -> RecordedGraph:
        captured.append(RecordedGraph(attention.stream))
        return captured[-1]

    return generate(GraphRunner(RUNNER, graph), attention), len(captured)


def test_what_is_replayed_generates_what_is_computed() -> None:
    """One graph for each size in use, whatever the number of steps."""
    assert replayed() == (right(), 4)


def test_padded_steps_generate_the_same_without_graphs() -> None:
    assert generate(RUNNER, GraphsOverDouble(SPEC)) == right()


def test_logits_are_those_of_the_live_rows_that_sample() -> None:
    """Three decodes are padded to four, and the second has more tokens to come."""
    attention = GraphsOverDouble(SPEC)
    backend = EngineBackend(SPEC, attention=attention)
    runner = GraphRunner(RUNNER, partial(RecordedGraph, attention.stream))
    sequences = [backend.manager.sequence(tokens) for tokens in ([1], [2, 3], [4])]
    for seq in sequences:
        backend.manager.admit(seq)
    step = backend.begin([Chunk(seq, 1) for seq in sequences])
    assert (step.token_ids.numel(), step.logits_rows.tolist()) == (4, [0, 2])
    # Each is the first of its sequence, so it attends to itself alone.
    alone = Step(
        step.token_ids[:3], step.positions[:3], step.logits_rows, lambda _, q, k, v: v.repeat_interleave(2, dim=1)
    )
    torch.testing.assert_close(runner.forward(step), RUNNER.forward(alone))


def tokens_in_new_memory(patch: pytest.MonkeyPatch) -> None:
    def faulty(self: GraphLane, batch: BatchPlan, tokens: Tensor) -> None:
        self.tokens = token_index(batch, self._spec.block_size)

    patch.setattr(GraphLane, "_place_tokens", faulty)


def planned_outside_the_buffers(patch: pytest.MonkeyPatch) -> None:
    def faulty(self: FlashInferAttention, batch: BatchPlan) -> None:
        self._lane = self._lanes[0]
        self._lane.plan(batch)
        self._lanes.rotate(-1)

    patch.setattr(FlashInferAttention, "_plan", faulty)


def in_source(owner: type, function: str, old: str, new: str) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        fault = Fault(function, owner, function, old, new, "")
        patch.setattr(owner, function, fault._broken(getattr(owner, function)))

    return plant


@pytest.mark.parametrize(
    "plant",
    [
        tokens_in_new_memory,
        planned_outside_the_buffers,
        in_source(GraphRunner, "forward", "captured[key].graph.replay()", "pass"),
        in_source(GraphRunner, "forward", "logits[step.logits_rows]", "logits[: len(step.logits_rows)]"),
        in_source(GraphRunner, "forward", "step.token_ids.numel()\n    if", "0\n    if"),
        in_source(GraphRunner, "forward", "logits_rows=every_row", "logits_rows=step.logits_rows"),
        in_source(EngineBackend, "_fixed", ".copy_(step.token_ids)", ".clone().copy_(step.token_ids)"),
        in_source(EngineBackend, "begin", "plan = plan.pad(padded_to)", "pass"),
    ],
)
def test_a_planted_fault_of_graphs_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = right()
    plant(monkeypatch)

    def both() -> None:
        assert replayed()[0] == expected
        test_logits_are_those_of_the_live_rows_that_sample()

    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        both()


def test_token_ids_in_new_memory_are_captured_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not wrong, since a graph is only replayed for the memory that it was captured on."""
    in_source(EngineBackend, "_fixed", "[:size]", "[:size].clone()")(monkeypatch)
    generated, captured = replayed()
    assert generated == right()
    assert captured > 4


class Eager:
    """A graph that keeps nothing of what it was captured on, as CUDA's keeps none of Python's objects."""

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        return work()

    def replay(self) -> None:
        pass


def test_a_runner_outlives_its_caches() -> None:
    """Graphs of a cache go with it; the runner serves the next one."""
    runner = GraphRunner(RUNNER, Eager)
    for _ in range(2):
        backend = EngineBackend(SPEC, attention=GraphsOverDouble(SPEC))
        seq = backend.manager.sequence([1])
        backend.manager.admit(seq)
        runner.forward(backend.begin([Chunk(seq, 1)]))
        assert len(runner._captured) == 1
        cache = weakref.ref(backend.attention.cache)
        del backend
        gc.collect()
        assert cache() is None
        assert len(runner._captured) == 0


def test_a_capture_allows_no_waiting_for_the_device() -> None:
    attention = GraphsOverDouble(SPEC)
    graph = RecordedGraph(attention.stream)
    with pytest.raises(ContractViolation, match=r"^wait-in-capture: a number was read"):
        graph.capture(lambda: torch.ones(1) * torch.ones(1).item())
    with pytest.raises(ContractViolation, match=r"^wait-in-capture: nothing may wait"):
        graph.capture(lambda: attention.stream.wait() or torch.ones(1))  # type: ignore[func-returns-value]
    assert attention.stream.captured is None
