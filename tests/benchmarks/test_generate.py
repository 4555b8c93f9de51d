"""Our engine end to end on SmolLM2, bfloat16, beside transformers, vLLM and the model's bare matrix products.

All take turns in one run, so that a machine that slows down slows down for all of them. vLLM runs in the interpreter
that KVPROOF_VLLM_PYTHON names, with as many threads as torch has here; it is stopped while it is not its turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from mode import NO_VLLM_ENGINE, NOT_ASKED_FOR, PEERS, QUICK, full_run
from peers.our_engine import OurEngine
from pytest_benchmark.fixture import BenchmarkFixture
from serving import Conversations, conversations, converse
from smollm2 import gguf_file
from torch.nn.functional import linear

from kvproof.backend import ModelRunner
from kvproof.backend.llm import load_runner
from kvproof.backend.models.checkpoint import ModelConfig, open_checkpoint
from kvproof.cli.bench_figures import Figures

NUM_SEQS = 32
PROMPT_TOKENS = 32
NEW_TOKENS = 16 if QUICK else 64
ROUNDS = 1 if QUICK else 3
BATCHES = [1, 8, 32] if QUICK else [1, 2, 4, 8, 16, 32, 64]


@cache
def model() -> tuple[ModelConfig, ModelRunner]:
    gguf_file()
    checkpoint = open_checkpoint("smollm2")
    return checkpoint.config, load_runner(checkpoint, "bfloat16")


def bare_products(config: ModelConfig, rows: int) -> Callable[[], None]:
    """One decode step's matrix products and nothing else: what no engine can do without."""
    q, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = [(q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner)] * config.num_layers
    weights = [torch.randn(shape, dtype=torch.bfloat16) for shape in [*shapes, (config.vocab_size, hidden)]]
    inputs = {n: torch.randn(rows, n, dtype=torch.bfloat16) for n in {hidden, q, inner}}

    @torch.inference_mode()
    def products() -> None:
        for weight in weights:
            linear(inputs[weight.shape[1]], weight)

    return products


def transformers_seconds(peer: Any, work: Conversations) -> float:
    prompts, tokens = torch.tensor(work["prompts"]), work["max_tokens"]
    started = time.perf_counter()
    out = peer.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=2,
    )
    seconds = time.perf_counter() - started
    assert out.shape == (len(prompts), prompts.shape[1] + tokens)
    return seconds


class Contest:
    """Rounds of the same work in turns: every peer, then ours. One round before them warms all up."""

    def __init__(self, vllm: Any, transformers: Any = None) -> None:
        self.config, runner = model()
        self.ours = OurEngine(runner, num_blocks=4096, max_num_seqs=64)
        self.vllm, self.transformers = vllm, transformers

    def round(self, work: Conversations, results: dict[str, list[dict[str, Any]]]) -> None:
        if self.transformers is not None:
            results.setdefault("transformers", []).append({"seconds": transformers_seconds(self.transformers, work)})
        if self.vllm is not None:
            results.setdefault("vllm", []).append(self.vllm.converse(work))
        results.setdefault("ours", []).append(converse(self.ours, work))

    def rounds(self, works: list[Conversations]) -> dict[str, list[dict[str, Any]]]:
        """The results of each, by name. The first of `works` is the warm-up's."""
        results: dict[str, list[dict[str, Any]]] = {}
        self.round(works[0], {})
        for work in works[1:]:
            self.round(work, results)
        return results


def report(figures: Figures, results: dict[str, list[Any]], vllm: Any, aims: dict[str, float]) -> None:
    """Tokens a second and the ratios to the peers, and the same of the time to the first token, its median."""
    seconds = {name: [turn["seconds"] for turn in turns] for name, turns in results.items()}
    tokens = results["ours"][0]["tokens"]
    for name, taken in seconds.items():
        figures.note(**{f"{name}_tokens_per_second": round(tokens / statistics.median(taken), 1)})
        if name != "ours":
            figures.times(name, taken, seconds["ours"], aim=aims.get(name))
    with_first = {name: turns for name, turns in results.items() if name != "transformers"}
    first = {name: [statistics.median(turn["first"]) for turn in turns] for name, turns in with_first.items()}
    for name, waits in first.items():
        figures.note(**{f"{name}_first_token_ms": round(statistics.median(waits) * 1e3, 1)})
    if vllm is None:
        figures.absent("vllm", NO_VLLM_ENGINE)
    else:
        figures.times("vllm to the first token", first["vllm"], first["ours"])
        figures.note(**{f"vllm_{name}": value for name, value in vllm.about.items()})
    figures.note(torch=torch.__version__, threads=torch.get_num_threads(), rounds=len(seconds["ours"]))
    figures.show()


@pytest.mark.benchmark(group="generate: 32 sequences of 32 prompt tokens, bfloat16")
def test_generate(benchmark: BenchmarkFixture, vllm_engine: Any, transformers_model: Any) -> None:
    contest = Contest(vllm_engine, transformers_model)
    products = bare_products(contest.config, NUM_SEQS)
    works = [conversations(NUM_SEQS, PROMPT_TOKENS, NEW_TOKENS, seed=i) for i in range(ROUNDS + 1)]
    bare: list[float] = []

    def all_rounds() -> dict[str, list[Any]]:
        products()
        results = contest.rounds(works)
        for _ in range(ROUNDS):
            started = time.perf_counter()
            for _ in range(NEW_TOKENS):
                products()
            bare.append(time.perf_counter() - started)
        return results

    results = benchmark.pedantic(all_rounds, rounds=1)
    figures = Figures(benchmark)
    figures.over("bare products", [turn["seconds"] for turn in results["ours"]], bare)
    figures.note(bare_products_tokens_per_second=round(NUM_SEQS * NEW_TOKENS / statistics.median(bare), 1))
    if not PEERS:
        figures.absent("transformers", NOT_ASKED_FOR)
    report(figures, results, vllm_engine, {"vllm": 2, "transformers": 1.6})


@pytest.mark.benchmark(group="shared prefix: 32 requests of 512 shared and 32 own prompt tokens, bfloat16")
def test_shared_prefix(benchmark: BenchmarkFixture, vllm_engine: Any) -> None:
    """All at once, and nobody has seen the prefix before: whoever runs first computes it."""
    contest = Contest(vllm_engine)
    works = [conversations(NUM_SEQS, 32, NEW_TOKENS, shared=512, seed=100 + i) for i in range(ROUNDS + 1)]
    results = benchmark.pedantic(contest.rounds, args=(works,), rounds=1)
    figures = Figures(benchmark)
    for name, turns in results.items():
        figures.note(**{f"{name}_cached_of_prompt": round(turns[-1]["cached"] / turns[-1]["prompt"], 3)})
    report(figures, results, vllm_engine, {"vllm": 2})


@pytest.mark.benchmark(group="multi-turn: 8 conversations of 4 turns, 64 prompt tokens each, bfloat16")
def test_multi_turn(benchmark: BenchmarkFixture, vllm_engine: Any) -> None:
    """Each turn's prompt is all that was said before, the answers among it, and 64 tokens more."""
    contest = Contest(vllm_engine)
    works = [conversations(8, 64, NEW_TOKENS, turns=4, addition=64, seed=200 + i) for i in range(ROUNDS + 1)]
    results = benchmark.pedantic(contest.rounds, args=(works,), rounds=1)
    figures = Figures(benchmark)
    for name, turns in results.items():
        figures.note(**{f"{name}_cached_of_prompt": round(turns[-1]["cached"] / turns[-1]["prompt"], 3)})
    assert results["ours"][-1]["cached"] > results["ours"][-1]["prompt"] / 3
    report(figures, results, vllm_engine, {})


@full_run
@pytest.mark.benchmark(group="tokens a second against batch, 32 prompt tokens, bfloat16")
def test_batches(benchmark: BenchmarkFixture, vllm_engine: Any, transformers_model: Any) -> None:
    contest = Contest(vllm_engine, transformers_model)
    figures = Figures(benchmark)
    rates: dict[str, dict[int, float]] = {}

    def all_batches() -> None:
        for batch in BATCHES:
            works = [conversations(batch, PROMPT_TOKENS, 32, seed=300 + 10 * batch + i) for i in range(ROUNDS + 1)]
            seconds = {name: [t["seconds"] for t in turns] for name, turns in contest.rounds(works).items()}
            for name, taken in seconds.items():
                rates.setdefault(name, {})[batch] = batch * 32 / statistics.median(taken)
                if name != "ours":
                    figures.times(f"{name}, batch of {batch}", taken, seconds["ours"])

    benchmark.pedantic(all_batches, rounds=1)
    for name, rate in rates.items():
        figures.curve("Tokens a second against batch", name, rate, x="sequences", y="tokens a second")
    figures.note(threads=torch.get_num_threads())
    figures.show()
