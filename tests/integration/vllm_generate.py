"""Generates with vLLM, for tests that compare outputs. Run by an interpreter that has it:

    $KVPROOF_VLLM_PYTHON tests/integration/vllm_generate.py '[{"model": FOLDER, "prompts": [[1, 2], [3]], ...}]'

Prints a line of JSON for each job: the token ids of each completion, and what was counted. A job's other keys are
options of vLLM's LLM.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def generate(prompts: list[list[int]], max_tokens: int, **options: Any) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(skip_tokenizer_init=True, enforce_eager=True, dtype="float32", seed=0, disable_log_stats=False, **options)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    counted = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return {
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "cached_tokens": [output.num_cached_tokens for output in outputs],
        "preemptions": counted["vllm:num_preemptions"],
    }


if __name__ == "__main__":
    for job in json.loads(sys.argv[1]):
        sys.stdout.write(json.dumps(generate(**job)) + "\n")
