"""Our engine as the benchmarks drive it."""

from __future__ import annotations

from time import perf_counter

from serving import Served

from kvproof.backend import Engine, ModelRunner, SamplingParams


class OurEngine:
    def __init__(self, runner: ModelRunner, *, num_blocks: int, max_num_seqs: int) -> None:
        self.engine = Engine(
            runner, num_blocks=num_blocks, block_size=16, max_num_seqs=max_num_seqs, max_num_batched_tokens=2048
        )

    def serve(self, prompts: list[list[int]], max_tokens: int) -> Served:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        first: dict[int, float] = {}
        started = perf_counter()
        requests = [self.engine.add(prompt, params) for prompt in prompts]
        for request in self.engine.run():
            first.setdefault(request.request_id, perf_counter() - started)
        seconds = perf_counter() - started
        return Served(
            [request.output_token_ids for request in requests],
            seconds,
            [first[request.request_id] for request in requests],
            sum(request.num_cached_tokens or 0 for request in requests),
        )
