"""The engine on the FlashInfer driver, over the double: what it generates is what the other backends generate."""

from __future__ import annotations

import runpy
import sys
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from torch import Tensor

from kvproof.allocator import NULL_BLOCK, Admission
from kvproof.attention import AttentionBackend
from kvproof.attention.reference import ReferenceAttention
from kvproof.attention.torch_paged import TorchAttention
from kvproof.backend import Chunk, Engine, EngineBackend, ModelRunner, ModelSpec, SamplingParams, Step, selection
from kvproof.backend.graphs import GraphRunner
from kvproof.backend.registry import Group, load
from kvproof.fuzz.dense import dense
from kvproof.fuzz.flashinfer_double import AnySizeOverDouble, GraphsOverDouble
from kvproof.fuzz.flashinfer_stream import RecordedGraph
from kvproof.fuzz.machines import engine as engine_machine
from kvproof.fuzz.machines.engine import EngineMachine
from kvproof.fuzz.toy import ToyRunner

RUNNER = ToyRunner(max_length=48)  # has no end-of-sequence token


class CascadesOverDouble(AnySizeOverDouble):
    cascade_rows = 2
    cascade_tokens = 1


DOUBLES = {"flashinfer": AnySizeOverDouble, "graphs": GraphsOverDouble, "cascade": CascadesOverDouble}
BACKENDS: dict[str, type[AttentionBackend]] = {
    **DOUBLES,
    "torch": TorchAttention,
    "reference": ReferenceAttention,
}


@pytest.fixture(autouse=True)
def _over_the_double(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    def load_double(group: Group, name: str) -> object:
        return DOUBLES[name] if name in DOUBLES else load(group, name)

    monkeypatch.setattr(selection, "load", load_double)


def graphed(runner: ModelRunner, *, num_blocks: int, **options: Any) -> Engine:
    """An engine with a block more, for padding, that replays its decodes from recorded graphs."""
    it = Engine(runner, num_blocks=num_blocks + 1, **options)
    attention = it.backend.attention
    assert isinstance(attention, GraphsOverDouble)
    it.runner = GraphRunner(runner, partial(RecordedGraph, attention.stream))
    return it


@pytest.mark.parametrize("name", [*DOUBLES, "replayed"])
def test_every_request_gets_what_it_gets_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random arrivals, chunked prefills, prefix hits, forks, preemptions and aborts in tiny pools."""

    class Machine(EngineMachine):
        attention = "graphs" if name == "replayed" else name

    if name == "replayed":
        monkeypatch.setattr(engine_machine, "Engine", graphed)
    elif name == "graphs":
        monkeypatch.setattr(
            engine_machine, "Engine", lambda *a, num_blocks, **o: Engine(*a, num_blocks=num_blocks + 1, **o)
        )
    run_state_machine_as_test(
        Machine,
        settings=settings(max_examples=20, stateful_step_count=30, suppress_health_check=list(HealthCheck)),
    )


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_a_busy_engine_generates_the_same_on_every_backend(block_size: int) -> None:
    """The pool holds two of the five requests at most, the budget a third of a prompt; three share a beginning."""
    generated = {}
    for attention in BACKENDS:
        engine = Engine(
            RUNNER,
            num_blocks=-(-48 // block_size) + (attention == "graphs"),
            block_size=block_size,
            attention=attention,
            max_num_seqs=4,
            max_num_batched_tokens=6,
        )
        shared = list(range(8))
        prompts = [[*shared, 1, 2], [*shared, 9], [*shared, 1, 2, 3, 4, 5, 6, 7, 8], [4], [11, 12] * 5]
        requests = [engine.add(prompt, SamplingParams(max_tokens=16)) for prompt in prompts]
        for _ in engine.run():
            engine.manager.check()
        generated[attention] = [request.output_token_ids for request in requests]
        assert engine.stats.num_preemptions > 0
        assert engine.stats.num_prefix_hit_tokens > 0
        assert engine.stats.num_steps > 16
    assert all(len(output) == 16 for output in generated["reference"])
    assert all(output == generated["reference"] for output in generated.values())


def generate_with_forks(attention: str) -> list[list[int]]:
    """A prompt in two chunks, forked after each of three steps at the engine's own interface.

    A fork shares a block that is half full until one of the two writes to it, and goes on with the second best token.
    """
    backend = EngineBackend(RUNNER.spec.cache_spec(num_blocks=16, block_size=4), attention=attention)
    manager = backend.manager
    first = manager.sequence([3, 1, 4, 1, 5, 9])
    assert manager.admit(first) is Admission.NOW
    sequences = [first]

    def compute(n: int) -> Tensor:
        chunks = [Chunk(seq, n) for seq in sequences]
        logits = RUNNER.forward(backend.begin(chunks))
        backend.end(chunks)
        return logits

    compute(4)
    for n in (2, 1, 1, 1, 1, 1, 1):
        best = compute(n).topk(2).indices.tolist()
        if len(sequences) < 4:
            sequences.append(manager.fork(first))
            best.append([best[0][1]])
        for seq, tokens in zip(sequences, best, strict=True):
            seq.append(tokens[0])
            assert manager.reserve(seq)
    manager.check()
    return [seq.tokens().tolist() for seq in sequences]


def test_forked_sequences_generate_the_same_on_every_backend() -> None:
    generated = {attention: generate_with_forks(attention) for attention in BACKENDS}
    assert len({tuple(tokens) for tokens in generated["reference"]}) == 4
    assert all(output == generated["reference"] for output in generated.values())


class WindowedRunner:
    """The same model, in which a token sees the latest `window` only."""

    def __init__(self, window: int) -> None:
        self.spec = ModelSpec(**(RUNNER.spec.model_dump() | {"window": window}))
        self.forward = RUNNER.forward

    def alone(self, tokens: list[int]) -> int:
        n = len(tokens)

        def attention(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return dense(self.spec.cache_spec(num_blocks=1, block_size=1), q, k, v)[0].float()

        step = Step(torch.tensor(tokens), torch.arange(n), torch.tensor([n - 1]), attention)
        return int(self.forward(step)[0].argmax())


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize(("window", "block_size"), [(1, 1), (3, 2), (4, 4), (7, 3)])
def test_blocks_that_left_the_window_are_given_back(attention: str, window: int, block_size: int) -> None:
    """Sequences of up to 40 tokens decode in a pool that could not hold them all whole."""
    runner = WindowedRunner(window)
    engine = Engine(runner, num_blocks=-(-48 // block_size), block_size=block_size, attention=attention, max_num_seqs=4)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6, 7, 8, 11], [4], [11, 12] * 5]
    requests = [engine.add(prompt, SamplingParams(max_tokens=24)) for prompt in prompts]
    left = False
    for _ in engine.run():
        engine.manager.check()
        batch = engine.backend.attention.batch
        live = batch.kv_indices[: batch.kv_indptr[batch.num_rows - batch.num_padding]]
        left |= bool((live == NULL_BLOCK).any())
    assert left
    for prompt, request in zip(prompts, requests, strict=True):
        tokens = list(prompt)
        for token in request.output_token_ids:
            assert token == runner.alone(tokens)
            tokens.append(token)
        assert len(tokens) == len(prompt) + 24


def rehearsed(*options: str) -> tuple[int, str]:
    """Exit status and output of the GPU script, on the CPU."""
    script = Path(__file__).parents[1] / "gpu" / "check.py"
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out:
        patch.setattr(sys, "argv", [str(script), "--double", *options])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
    assert isinstance(ended.value.code, int)
    return ended.value.code, out.getvalue()


def test_the_gpu_script_can_be_rehearsed_without_one() -> None:
    status, output = rehearsed("--variants")
    assert status == 0, output
    rows = [line.split() for line in output.split("\n\n")[1].splitlines()]
    assert [row[0] for row in rows] == [
        "environment",
        *["conformance"] * 12,
        "generation",
        *["decode,"] * 2,
        "prefill,",
    ]
    assert all("ok" in row for row in rows)


def test_the_gpu_script_says_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its line is in the table, all others are as well, and the exit status tells."""
    monkeypatch.setattr(TorchAttention, "_write", lambda *_: None)
    status, output = rehearsed()
    assert status == 1, output
    rows = output.rstrip().split("\n\n")[-1].splitlines()
    (failed,) = (row for row in rows if "FAILED" in row)
    assert failed.startswith("conformance of torch ")
    assert "a step is right" in failed
    assert rows[-1].startswith("prefill, 64 tokens ")
