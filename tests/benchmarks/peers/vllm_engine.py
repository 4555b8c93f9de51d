"""vLLM's whole engine on the CPU, timed by the interpreter that vLLM is installed in.

    PYTHONPATH=tests/benchmarks $KVPROOF_VLLM_PYTHON tests/benchmarks/peers/vllm_engine.py FOLDER

FOLDER has the model. First a line is printed with vLLM's version, how its threads are bound and how it compiles; then
each line of standard input is a `Conversations`, answered by what `converse` returns. The prefix cache is on; the rest
is vLLM's default for the CPU, but for the limits that ours has too, and for blocks of 32, the smallest that its fastest
kernel takes: a smaller block shares more.
"""

from __future__ import annotations

import json
import os
import sys
from time import perf_counter
from typing import Any

if __name__ == "__main__":  # its worker processes import this file too
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever vLLM prints is no answer

import vllm
from serving import Served, converse
from vllm import LLM, SamplingParams

BLOCK_SIZE = 32


class VllmEngine:
    def __init__(self, model: str) -> None:
        self.llm: Any = LLM(
            model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=True,
        )
        self.requests = 0

    def serve(self, prompts: list[list[int]], max_tokens: int) -> Served:
        engine = self.llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        names = [str(self.requests + i) for i in range(len(prompts))]
        self.requests += len(prompts)
        first: dict[str, float] = {}
        done: dict[str, Any] = {}
        started = perf_counter()
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                first.setdefault(output.request_id, perf_counter() - started)
                if output.finished:
                    done[output.request_id] = output
        seconds = perf_counter() - started
        return Served(
            [list(done[name].outputs[0].token_ids) for name in names],
            seconds,
            [first[name] for name in names],
            sum(done[name].num_cached_tokens or 0 for name in names),
        )


def main() -> None:
    engine = VllmEngine(sys.argv[1])
    about = {
        "version": vllm.__version__,
        "threads_bound_to": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto"),
        "block_size": BLOCK_SIZE,
        "compilation": engine.llm.llm_engine.vllm_config.compilation_config.mode.name,
    }
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(converse(engine, json.loads(line))), file=answers, flush=True)
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
