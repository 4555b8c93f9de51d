"""On a processor with a matrix unit, in bfloat16, what is computed together changes no bit of what is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from kvproof.attention import tiled_kernel
from kvproof.backend import Engine, SamplingParams, Step
from kvproof.backend.models.checkpoint import open_checkpoint
from kvproof.backend.models.llama import LlamaRunner

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK, VOCABULARY = 16, 96
PROMPTS = [torch.randint(0, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (600, 40)]
PROMPTS += [PROMPTS[0][:530] + PROMPTS[1], PROMPTS[0][:290]]


class Recorder:
    """A runner that keeps the logits of its last step."""

    def __init__(self, runner: LlamaRunner) -> None:
        self.spec, self._runner = runner.spec, runner
        self.logits = torch.empty(0)

    def forward(self, step: Step) -> Tensor:
        self.logits = self._runner.forward(step)
        return self.logits


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    if tiled_kernel.load() is None:
        pytest.skip("no matrix unit (Intel AMX) for bfloat16, or no compiler")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.3,
    )
    folder: Path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return Recorder(LlamaRunner.load(open_checkpoint(folder), "bfloat16"))


def make_engine(runner: Recorder, budget: int, **options: bool) -> Engine:
    return Engine(
        runner,
        num_blocks=200,
        block_size=BLOCK,
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        attention="torch",
        **options,
    )


def logits(runner: Recorder, engine: Engine, prompts: list[list[int]]) -> list[Tensor]:
    """Of each prompt [8, vocabulary]: those that its first token is drawn from, and of the tokens after it."""
    requests = [engine.add(prompt, SamplingParams(max_tokens=8, ignore_eos=True)) for prompt in prompts]
    drawn: dict[int, list[Tensor]] = {request.request_id: [] for request in requests}
    while engine.has_unfinished:
        for row, request in enumerate(engine.step()):
            drawn[request.request_id].append(runner.logits[row])
    return [torch.stack(drawn[request.request_id]) for request in requests]


@pytest.fixture(scope="module")
def alone(runner: Recorder) -> list[Tensor]:
    """Each prompt in an engine of its own, in one step."""
    found = [logits(runner, make_engine(runner, 1024, prefix_caching=False), [prompt])[0] for prompt in PROMPTS]
    assert all(each.isfinite().all() and each.std() > 0.1 for each in found)
    return found


@pytest.mark.parametrize("budget", [8, 33, 100, 257, 1024])
def test_chunks_and_company(budget: int, runner: Recorder, alone: list[Tensor]) -> None:
    together = logits(runner, make_engine(runner, budget, prefix_caching=False), PROMPTS)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(together, alone, strict=True))


@pytest.mark.parametrize("budget", [8, 100, 1024])
def test_prefix_hits(budget: int, runner: Recorder, alone: list[Tensor]) -> None:
    """The second time most of each prompt is found, and its blocks are shared; the first time some of it is."""
    engine = make_engine(runner, budget)
    for _ in range(2):
        hits = engine.stats.num_prefix_hit_tokens
        together = logits(runner, engine, PROMPTS)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(together, alone, strict=True))
    assert engine.stats.num_prefix_hit_tokens - hits >= sum(len(prompt) - BLOCK for prompt in PROMPTS)
