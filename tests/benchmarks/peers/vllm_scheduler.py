"""Scheduler steps of vLLM without a model, on vLLM's own KV-cache manager, on ours, and on one that does nothing.

    $KVPROOF_VLLM_PYTHON tests/benchmarks/peers/vllm_scheduler.py

First a line with vLLM's version is printed; then each line of standard input is a job, `{"prompt": tokens, "steps": n}`
of at least 16 tokens, answered by a line of JSON: for each manager the processor's seconds for 256 requests, by phase:

admit   add_request for all, and the step that admits them and takes their whole prompts
decode  the steps after it, each with `schedule` and `update_from_output`, one token for every request
finish  the step in which all of them end

The difference to the manager that does nothing is the allocator's share. vLLM's includes the hashing of blocks that its
requests do as they grow, which ours turns off; the prompts' blocks are hashed before the clock starts, for all three.
"""

from __future__ import annotations

import gc
import json
import sys
from time import process_time
from types import SimpleNamespace
from typing import Any

answers, sys.stdout = sys.stdout, sys.stderr  # whatever vLLM prints is no answer

import vllm  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402

from kvproof.backend.integrations.vllm import PoolScheduler, Scheduler  # noqa: E402
from kvproof.backend.integrations.vllm.views import Blocks  # noqa: E402
from kvproof.fuzz.machines.vllm_engine import Ask, Shape, make  # noqa: E402

NUM_REQUESTS = 256
BLOCK_SIZE = 16


class NoManager:
    """Answers as a manager does that has nothing to do: what is left is the scheduler itself."""

    def __init__(self) -> None:
        self.empty_kv_cache_blocks = self.none = Blocks([])
        self.usage = 0.0

    def new_step_starts(self) -> None: ...

    def get_computed_blocks(self, request: Any) -> tuple[Blocks, int, int]:
        return self.none, 0, 0

    def allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Blocks:
        return self.none

    def get_blocks(self, request_id: str) -> Blocks:
        return self.none

    def get_num_common_prefix_blocks(self, request_id: str) -> list[int]:
        return [0]

    def free(self, request: Any) -> None: ...

    def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None: ...

    def make_prefix_cache_stats(self) -> Any:
        return SimpleNamespace()

    def estimate_cached_tokens(self, request: Any) -> int:
        return 0

    def take_events(self) -> list[Any]:
        return []

    def take_new_block_ids(self) -> list[int]:
        return []

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        return [], []

    def take_boundary_state_offloads(self) -> dict[str, Any]:
        return {}


class BareScheduler(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_cache_manager = NoManager()


SCHEDULERS = {"nothing": BareScheduler, "ours": Scheduler, "our_pool": PoolScheduler, "vllm": StockScheduler}


def measure(scheduler_class: Any, prompt: int, steps: int) -> dict[str, Any]:
    blocks = NUM_REQUESTS * ((prompt + steps) // BLOCK_SIZE + 2)
    shape = Shape(
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        max_model_len=prompt + steps + 8,
        max_batched_tokens=NUM_REQUESTS * (prompt + 1),
        max_seqs=NUM_REQUESTS,
    )
    scheduler = make(scheduler_class, shape)
    # At any phase of their blocks: in a mean step, one in sixteen crosses into a new one.
    requests = [
        Ask(str(i), tuple(range(i * 1000, i * 1000 + prompt - i % BLOCK_SIZE)), max_tokens=steps + 2).request(shape)
        for i in range(NUM_REQUESTS)
    ]
    names = [request.request_id for request in requests]
    places = {name: i for i, name in enumerate(names)}
    seconds: list[float] = []
    gc.collect()
    gc.freeze()
    try:
        for step in range(steps + 2):
            result = ModelRunnerOutput(names, places, [[step]] * NUM_REQUESTS)
            started = process_time()
            if step == 0:
                for request in requests:
                    scheduler.add_request(request)
            output = scheduler.schedule()
            scheduler.update_from_output(output, result)
            seconds.append(process_time() - started)
            assert len(output.num_scheduled_tokens) == NUM_REQUESTS
    finally:
        gc.unfreeze()
    assert not scheduler.has_unfinished_requests()
    return {"admit": seconds[0], "decode": sum(seconds[1:-1]), "finish": seconds[-1]}


def main() -> None:
    print(json.dumps(vllm.__version__), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps({name: measure(kind, **job) for name, kind in SCHEDULERS.items()}), file=answers, flush=True)


if __name__ == "__main__":
    main()
