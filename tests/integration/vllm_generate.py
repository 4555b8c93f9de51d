"""Generates with vLLM, for tests that compare outputs. Run by an interpreter that has it:

    $KVPROOF_VLLM_PYTHON tests/integration/vllm_generate.py FILE

FILE has a list of jobs, `{"model": folder, "waves": [[prompt]], "max_tokens": n}`; a prompt is as vLLM takes it. Other
keys are options of vLLM's LLM, but "faults": `[[owner, function, old, new]]`, what `Fault` takes, each of which is
planted for one more run of the first wave.

Prints a line of JSON for each job: of each prompt the generated tokens, and how many of its own were cached; how many
requests were preempted. And where the scheduler is in this process, which the faults need too, its class, and the share
of the KV cache that is in use in the end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from vllm import LLM, SamplingParams

from kvproof.fuzz.planted import Fault


def generate(waves: list[Any], max_tokens: int, faults: list[Any] | None = None, **options: Any) -> dict[str, Any]:
    llm = LLM(skip_tokenizer_init=True, enforce_eager=True, dtype="float32", seed=0, disable_log_stats=False, **options)
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    answer = run(llm, core, waves, max_tokens)
    if core is not None:
        kind, manager = type(core.scheduler), core.scheduler.kv_cache_manager
        answer["scheduler"] = f"{kind.__module__}.{kind.__name__}"
        for checked in (getattr(manager, "blocks", None), manager.block_pool):
            getattr(checked, "check", lambda: None)()  # ours can tell
    answer["broken"] = []
    for owner, *change in faults or ():
        assert llm.reset_prefix_cache()
        with Fault("", resolve_name(owner), *change, "").planted():
            answer["broken"].append(run(llm, core, waves[:1], max_tokens))
    if core is not None:
        llm.llm_engine.engine_core.shutdown()
    return answer


def run(llm: LLM, core: Any, waves: list[Any], max_tokens: int) -> dict[str, Any]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False, ignore_eos=True)
    outputs = [output for wave in waves for output in llm.generate(wave, params, use_tqdm=False)]
    counted = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return {
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "cached_tokens": [output.num_cached_tokens for output in outputs],
        "preemptions": counted["vllm:num_preemptions"],
        "usage": None if core is None else core.scheduler.kv_cache_manager.usage,
    }


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        sys.stdout.write(json.dumps(generate(**job)) + "\n")
        sys.stdout.flush()
