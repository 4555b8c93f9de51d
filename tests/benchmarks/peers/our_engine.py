"""Our engine as the benchmarks drive it."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter

from serving import Served

from kvproof.backend import Engine, ModelRunner, SamplingParams


class OurEngine:
    """`steps` has the seconds of each step of the last batch; the first computes all prompts, if they are short."""

    def __init__(self, runner: ModelRunner, *, num_blocks: int, max_num_seqs: int) -> None:
        self.engine = Engine(
            runner, num_blocks=num_blocks, block_size=16, max_num_seqs=max_num_seqs, max_num_batched_tokens=2048
        )
        self.steps: list[float] = []

    def serve(self, prompts: list[list[int]], max_tokens: int) -> Served:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        first: dict[int, float] = {}
        ends = [started := perf_counter()]
        requests = [self.engine.add(prompt, params) for prompt in prompts]
        while self.engine.has_unfinished:
            advanced = self.engine.step()
            ends.append(perf_counter())
            for request in advanced:
                first.setdefault(request.request_id, ends[-1] - started)
        self.steps = [end - start for start, end in pairwise(ends)]
        return Served(
            [request.output_token_ids for request in requests],
            ends[-1] - started,
            [first[request.request_id] for request in requests],
            sum(request.num_cached_tokens or 0 for request in requests),
        )
