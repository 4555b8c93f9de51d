"""vLLM's own KVCacheManager, driven through the benchmarks' workloads by the interpreter that vLLM is installed in.

    PYTHONPATH=tests/benchmarks $KVPROOF_VLLM_PYTHON tests/benchmarks/peers/vllm_kv.py

First a line with vLLM's version is printed; then each line of standard input is a job, `{"job": "drive" | "memory" |
"hash", "workload": ...}`, answered by a line of JSON. The job "drive" answers a `Result`, with `request_seconds`: the
part of the admission that makes the Requests and hashes their blocks, which vLLM does before they are scheduled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from itertools import count
from time import perf_counter
from typing import Any

answers, sys.stdout = sys.stdout, sys.stderr  # whatever vLLM prints is no answer

import torch  # noqa: E402
import vllm  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from workload import bytes_per_block, drive, seconds_each  # noqa: E402

MAX_MODEL_LEN = 2**20
HASH = get_hash_fn_by_name("sha256")  # vLLM's default
init_none_hash(HASH)


class VllmKV:
    """As its scheduler drives it: one group of full attention, prefix caching, no statistics and no events."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = KVCacheManager(
            config, MAX_MODEL_LEN, scheduler_block_size=block_size, hash_block_size=block_size, enable_caching=True
        )
        self.hasher = get_request_block_hasher(block_size, HASH)
        self.sampling_params = SamplingParams(max_tokens=MAX_MODEL_LEN)
        self.ids = map(str, count())
        self.request_seconds = 0.0
        self.hits: dict[str, int] = {}

    def request(self, prompt: list[int]) -> Request:
        return Request(next(self.ids), prompt, self.sampling_params, None, block_hasher=self.hasher)

    def admit(self, prompt: list[int], sampled: int) -> Request:
        manager = self.manager
        started = perf_counter()
        request = self.request(prompt)
        self.request_seconds += perf_counter() - started
        blocks, num_hit, _ = manager.get_computed_blocks(request)
        assert manager.allocate_slots(
            request,
            len(prompt) - num_hit,
            num_new_computed_tokens=num_hit,
            new_computed_blocks=blocks,
            full_sequence_must_fit=True,  # the scheduler's default
        )
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = len(prompt)
        request.append_output_token_ids(sampled)
        self.hits[request.request_id] = num_hit
        return request

    def rows(self, running: Iterable[Request]) -> Sequence[Request]:
        return list(running)

    def step(self, rows: Sequence[Request], sampled: list[int]) -> None:
        manager = self.manager
        for request, token in zip(rows, sampled, strict=True):
            assert manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
            request.append_output_token_ids(token)

    def release(self, request: Request) -> None:
        self.manager.free(request)

    def table(self, request: Request) -> Sequence[int]:
        return self.manager.get_block_ids(request.request_id)[0]

    def hit_tokens(self, request: Request) -> int:
        return self.hits.pop(request.request_id)


def run(job: str, workload: Any) -> Any:
    def make() -> VllmKV:
        return VllmKV(workload["num_blocks"], workload["block_size"])

    if job == "drive":
        allocator = make()
        return {**drive(allocator, workload), "request_seconds": allocator.request_seconds}
    if job == "memory":
        return bytes_per_block(make, workload)
    if job == "hash":
        requests = [make().request(request["prompt"]) for request in workload["requests"]]

        def hash_all() -> None:
            for request in requests:
                request.block_hashes.clear()
                request.update_block_hashes()

        return seconds_each(hash_all)
    raise ValueError(f"no such job: {job}")


def main() -> None:
    print(json.dumps(vllm.__version__), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
