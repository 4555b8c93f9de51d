"""Our engine end to end on SmolLM2, bfloat16, beside transformers, vLLM, PyTorch's bare products and a bare read.

All take turns in one run, so that a machine that slows down slows down for all of them. vLLM runs in the interpreter
that KVPROOF_VLLM_PYTHON names, with as many threads as torch has here; it is stopped while it is not its turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from mode import NO_VLLM_ENGINE, NOT_ASKED_FOR, PEERS, QUICK, full_run
from peers.our_engine import OurEngine
from pytest_benchmark.fixture import BenchmarkFixture
from serving import Conversations, conversations, converse
from smollm2 import gguf_file
from torch.nn.functional import linear

from kvproof.attention.large_pages import ask_for_large_pages
from kvproof.backend import ModelRunner
from kvproof.backend.llm import load_runner
from kvproof.backend.models.checkpoint import ModelConfig, open_checkpoint
from kvproof.cli.bench_figures import Figures

NUM_SEQS = 32
PROMPT_TOKENS = 32
NEW_TOKENS = 16 if QUICK else 64
ROUNDS = 1 if QUICK else 3
Result = dict[str, Any]
Contender = Callable[[Conversations], Result]
BATCHES = [1, 2, 4, 8, 16, 32, 64]
PRODUCTS, READ = "bare products", "bare read"


@cache
def model() -> tuple[ModelConfig, ModelRunner]:
    gguf_file()
    checkpoint = open_checkpoint("smollm2")
    return checkpoint.config, load_runner(checkpoint, "bfloat16")


def weight_shapes() -> list[tuple[int, int]]:
    """Of the weights that a decode step multiplies by, [out, in]."""
    config = model()[0]
    q, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = [(q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner)]
    return [*layer * config.num_layers, (config.vocab_size, hidden)]


def limit(step: Callable[[], object]) -> Contender:
    """`step` instead of each decode step, and nothing else."""

    @torch.inference_mode()
    def turn(work: Conversations) -> Result:
        steps = []
        for _ in range(work["max_tokens"]):
            started = time.perf_counter()
            step()
            steps.append(time.perf_counter() - started)
        return {"seconds": sum(steps), "decode_step": statistics.median(steps)}

    return turn


def bare_products(rows: int) -> Contender:
    """The matrix products, by PyTorch."""
    weights = [torch.randn(shape, dtype=torch.bfloat16) for shape in weight_shapes()]
    inputs = {n: torch.randn(rows, n, dtype=torch.bfloat16) for n in {weight.shape[1] for weight in weights}}

    def products() -> None:
        for weight in weights:
            linear(inputs[weight.shape[1]], weight)

    return limit(products)


def bare_read() -> Contender:
    """Each weight once: what no engine can do without, whoever multiplies."""
    weights = torch.empty(sum(n * m for n, m in weight_shapes()) // 4, dtype=torch.int64)  # as many bytes of bfloat16
    ask_for_large_pages(weights)
    return limit(weights.fill_(1).sum)


def transformers_turn(peer: Any, work: Conversations) -> Result:
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
    return {"seconds": seconds}


def contenders(vllm: Any, transformers: Any) -> dict[str, Contender]:
    """Those that are here, ours last."""
    ours = OurEngine(model()[1], num_blocks=4096, max_num_seqs=64)

    def our_turn(work: Conversations) -> Result:
        return {**converse(ours, work), "decode_step": statistics.median(ours.steps[1:])}

    found: dict[str, Contender] = {}
    if transformers is not None:
        found["transformers"] = partial(transformers_turn, transformers)
    if vllm is not None:
        found["vllm"] = vllm.converse
    return {**found, "ours": our_turn}


def contest(sides: dict[str, Contender], works: list[Conversations]) -> dict[str, list[Result]]:
    """All sides in turns, a round for each of `works`. The first warms all up and does not count."""
    rounds = [{name: side(work) for name, side in sides.items()} for work in works][1:]
    return {name: [results[name] for results in rounds] for name in sides}


def report(figures: Figures, results: dict[str, list[Result]], vllm: Any, aims: dict[str, float]) -> None:
    """Tokens a second and the time to the first token (its median), and the ratios to the peers."""
    tokens = results["ours"][0]["tokens"]
    seconds = {name: [turn["seconds"] for turn in turns] for name, turns in results.items()}
    for name, taken in seconds.items():
        figures.note(**{f"{name}_tokens_per_second": round(tokens / statistics.median(taken), 1)})
        if name not in ("ours", PRODUCTS, READ):
            figures.times(name, taken, seconds["ours"], aim=aims.get(name))
    servers = {name: turns for name, turns in results.items() if "first" in turns[0]}
    waits = {name: [statistics.median(turn["first"]) for turn in turns] for name, turns in servers.items()}
    for name, turns in servers.items():
        figures.note(**{f"{name}_first_token_ms": round(statistics.median(waits[name]) * 1e3, 1)})
        figures.note(**{f"{name}_cached_of_prompt": round(turns[-1]["cached"] / turns[-1]["prompt"], 3)})
    if vllm is None:
        figures.absent("vllm", NO_VLLM_ENGINE)
    else:
        figures.times("vllm to the first token", waits["vllm"], waits["ours"])
        figures.note(**{f"vllm_{name}": value for name, value in vllm.about.items()})
    figures.note(threads=torch.get_num_threads(), rounds=len(seconds["ours"]))
    figures.show()


@pytest.mark.benchmark(group="generate: 32 sequences of 32 prompt tokens, bfloat16; the time is of the whole contest")
def test_generate(benchmark: BenchmarkFixture, vllm_engine: Any, transformers_model: Any) -> None:
    limits = {PRODUCTS: bare_products(NUM_SEQS), READ: bare_read()}
    sides = {**limits, **contenders(vllm_engine, transformers_model)}
    works = [conversations(NUM_SEQS, PROMPT_TOKENS, NEW_TOKENS, seed=i) for i in range(ROUNDS + 1)]
    results = benchmark.pedantic(contest, args=(sides, works), rounds=1)
    figures = Figures(benchmark)
    steps = {name: [turn["decode_step"] for turn in results[name]] for name in ("ours", *limits)}
    figures.over(f"{PRODUCTS}, a decode step", steps["ours"], steps[PRODUCTS], aim=1.7)
    figures.over(f"{READ}, a decode step", steps["ours"], steps[READ])
    figures.note(**{f"{name}_decode_step_ms": round(statistics.median(t) * 1e3, 1) for name, t in steps.items()})
    if not PEERS:
        figures.absent("transformers", NOT_ASKED_FOR)
    report(figures, results, vllm_engine, {"vllm": 2, "transformers": 1.6})


@pytest.mark.benchmark(group="shared prefix: 32 requests of 512 shared and 32 own prompt tokens, bfloat16")
def test_shared_prefix(benchmark: BenchmarkFixture, vllm_engine: Any) -> None:
    """All at once, and nobody has seen the prefix before: whoever runs first computes it."""
    works = [conversations(NUM_SEQS, 32, NEW_TOKENS, shared=512, seed=100 + i) for i in range(ROUNDS + 1)]
    results = benchmark.pedantic(contest, args=(contenders(vllm_engine, None), works), rounds=1)
    assert results["ours"][-1]["cached"] > results["ours"][-1]["prompt"] / 2
    report(Figures(benchmark), results, vllm_engine, {"vllm": 2})


@pytest.mark.benchmark(group="multi-turn: 8 conversations of 4 turns, 64 prompt tokens each, bfloat16")
def test_multi_turn(benchmark: BenchmarkFixture, vllm_engine: Any) -> None:
    """Each turn's prompt is all that was said before, the answers among it, and 64 tokens more."""
    works = [conversations(8, 64, NEW_TOKENS, turns=4, addition=64, seed=200 + i) for i in range(ROUNDS + 1)]
    results = benchmark.pedantic(contest, args=(contenders(vllm_engine, None), works), rounds=1)
    assert results["ours"][-1]["cached"] > results["ours"][-1]["prompt"] / 3
    report(Figures(benchmark), results, vllm_engine, {})


@full_run
@pytest.mark.benchmark(group="tokens a second against batch, 32 prompt tokens, bfloat16")
def test_batches(benchmark: BenchmarkFixture, vllm_engine: Any, transformers_model: Any) -> None:
    sides = contenders(vllm_engine, transformers_model)
    figures = Figures(benchmark)
    rates: dict[str, dict[int, float]] = {}

    def all_batches() -> None:
        for batch in BATCHES:
            works = [conversations(batch, PROMPT_TOKENS, 32, seed=300 + 10 * batch + i) for i in range(ROUNDS + 1)]
            results = contest({**sides, PRODUCTS: bare_products(batch)}, works)
            seconds = {name: [turn["seconds"] for turn in turns] for name, turns in results.items()}
            for name, taken in seconds.items():
                rates.setdefault(name, {})[batch] = batch * 32 / statistics.median(taken)
                if name not in ("ours", PRODUCTS, READ):
                    figures.times(f"{name}, batch of {batch}", taken, seconds["ours"])

    benchmark.pedantic(all_batches, rounds=1)
    for name, rate in rates.items():
        figures.curve("Tokens a second against batch", name, rate, x="sequences", y="tokens a second")
    figures.note(threads=torch.get_num_threads(), prompt_tokens=PROMPT_TOKENS, new_tokens=32)
    figures.show()
