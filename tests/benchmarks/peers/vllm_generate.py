"""Text from a real vLLM engine, under one scheduler after the other, by the interpreter that vLLM is installed in.

    $KVPROOF_VLLM_PYTHON tests/benchmarks/peers/vllm_generate.py JOB

JOB is a file with `{"model": folder, "schedulers": [name or null], "waves": [[tokens of a prompt]], "max_tokens": n,
"engine": {}}`; null is vLLM's own scheduler, `engine` has further arguments of `LLM`. The answer is a line of JSON for
each scheduler: its class, and for each prompt the generated tokens and how many of the prompt's were cached; how many
requests were preempted; and the share of the KV cache that is in use at the end.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

answers, sys.stdout = sys.stdout, sys.stderr  # whatever vLLM prints is no answer
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

from vllm import LLM, SamplingParams  # noqa: E402


def generate(scheduler: str | None, job: dict[str, Any]) -> dict[str, Any]:
    llm = LLM(
        job["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        scheduler_cls=scheduler,
        **job["engine"],
    )
    core = llm.llm_engine.engine_core.engine_core
    preemptions = 0
    preempt = core.scheduler._preempt_request

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal preemptions
        preemptions += 1
        preempt(*args, **kwargs)

    core.scheduler._preempt_request = counted
    params = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    tokens, cached = [], []
    for wave in job["waves"]:
        prompts = [{"prompt_token_ids": prompt} for prompt in wave]
        for output in llm.generate(prompts, params, use_tqdm=False):
            tokens.append(list(output.outputs[0].token_ids))
            cached.append(output.num_cached_tokens)
    manager = core.scheduler.kv_cache_manager
    if hasattr(manager, "blocks"):
        manager.blocks.check()
    elif hasattr(manager.block_pool, "check"):
        manager.block_pool.check()
    kind = type(core.scheduler)
    llm.llm_engine.engine_core.shutdown()
    return {
        "scheduler": f"{kind.__module__}.{kind.__name__}",
        "tokens": tokens,
        "cached": cached,
        "preemptions": preemptions,
        "usage": manager.usage,
    }


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for name in job["schedulers"]:
        print(json.dumps(generate(name, job)), file=answers, flush=True)
