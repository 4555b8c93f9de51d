"""A state machine for `Engine`: whatever else is in flight, a request's tokens are those it gets when it runs alone.

Requests with shared beginnings arrive, run, are forked, preempted for lack of blocks and aborted, in pools that hold
only a few of them. The oracle computes each request by itself, from its whole prefix at every token, on a dense
attention of its own: it has no cache, no blocks, no batch and no scheduler.
"""

from __future__ import annotations

from bisect import insort
from functools import lru_cache
from random import Random

import torch
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from kvproof.backend.engine import Engine
from kvproof.backend.request import FinishReason, Request, RequestRefused
from kvproof.backend.runner import Step
from kvproof.backend.sampling import SamplingParams
from kvproof.fuzz.toy import ToyRunner

RUNNER = ToyRunner(max_length=24, eos_token_ids=(0,))


@lru_cache(maxsize=100_000)
def next_token(tokens: tuple[int, ...]) -> int:
    """What greedy decoding appends to `tokens`, by the definition of causal attention."""
    n = len(tokens)

    def attention(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)

    logits = RUNNER.forward(Step(torch.tensor(tokens), torch.arange(n), torch.tensor([n - 1]), attention))
    return int(logits[0].argmax())


def alone(prompt: tuple[int, ...], max_tokens: int) -> tuple[list[int], FinishReason]:
    """The output of a request that has the machine to itself."""
    output: list[int] = []
    while True:
        output.append(next_token((*prompt, *output)))
        if output[-1] in RUNNER.spec.eos_token_ids:
            return output, FinishReason.STOP
        if len(output) == max_tokens or len(prompt) + len(output) == RUNNER.spec.max_length:
            return output, FinishReason.LENGTH


class EngineMachine(RuleBasedStateMachine):
    """Runs on the attention backend named by `attention`."""

    attention = "torch"

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.sampled_from((1, 2, 3, 4, 16)),
        prefix_caching=st.booleans(),
        max_num_seqs=st.integers(1, 4),
        extra_budget=st.integers(0, 16),
    )
    def start(
        self, num_blocks: int, block_size: int, prefix_caching: bool, max_num_seqs: int, extra_budget: int
    ) -> None:
        self.engine = Engine(
            RUNNER,
            num_blocks=num_blocks,
            block_size=block_size,
            attention=self.attention,
            prefix_caching=prefix_caching,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
        )
        self.requests: list[tuple[Request, tuple[int, ...]]] = []
        self.prompts: list[tuple[int, ...]] = [(1, 2)]
        self.schedule = self.engine.scheduler.schedule
        self.engine.scheduler.schedule = self.checked_schedule  # type: ignore[method-assign]

    def checked_schedule(self) -> list[tuple[Request, int]]:
        """What the scheduler says: nobody admitted now begins with a block that one before it fills in this step."""
        running = set(self.engine.scheduler.running)
        work, manager = self.schedule(), self.engine.manager
        prefills = sorted((item for item in work if item[1] > 1), key=lambda item: item[0].key)
        for i, (request, _) in enumerate(prefills if manager.prefix_caching else ()):
            end = request.seq.num_computed + manager.block_size  # a hit is of whole blocks
            if request in running or end >= len(request.seq):
                continue
            for first, n in prefills[:i]:
                computed = first.seq.num_computed
                fills = computed < end <= computed + n
                assert not fills or first.seq.tokens(0, end) != request.seq.tokens(0, end), (
                    f"requests {first.request_id} and {request.request_id} compute the same block in one step"
                )
        return work

    @rule(
        base=st.integers(0, 7),
        keep=st.integers(0, 16),
        suffix=st.lists(st.integers(1, 3), max_size=5),
        max_tokens=st.integers(1, 8),
        priority=st.sampled_from((0, 0, 0, -1, 1)),
    )
    def add(self, base: int, keep: int, suffix: list[int], max_tokens: int, priority: int) -> None:
        prompt = (*self.prompts[base % len(self.prompts)][:keep], *suffix) or (1,)
        self.prompts.append(prompt)
        manager = self.engine.manager
        slots = min(len(prompt) + max_tokens, RUNNER.spec.max_length) - 1
        fits = -(-slots // manager.block_size) <= manager.num_blocks and len(prompt) < RUNNER.spec.max_length
        try:
            request = self.engine.add(prompt, SamplingParams(max_tokens=max_tokens), priority=priority)
        except RequestRefused:
            assert not fits, "a request was refused that fits alone"
            event("refused")
        else:
            assert fits, "a request was queued that can never finish"
            self.requests.append((request, prompt))

    @rule(beginning=st.lists(st.integers(1, 3), min_size=2, max_size=6), count=st.integers(2, 3))
    def burst(self, beginning: list[int], count: int) -> None:
        """Requests that begin alike arrive together."""
        for last in range(1, count + 1):
            self.add(0, 0, [*beginning, last], 2, 0)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            before = {id(request): request.num_output_tokens for request, _ in self.requests}
            busy = self.engine.has_unfinished
            advanced = self.engine.step()
            for request, _ in self.requests:
                gained = request.num_output_tokens - before[id(request)]
                assert gained == (1 if any(request is other for other in advanced) else 0)
            assert busy or not advanced

    @rule(which=st.integers(0, 3), token=st.integers(1, 3))
    def fork(self, which: int, token: int) -> None:
        """A decoding request is split in two that go on from the same KV, one of them with another last token.

        The engine has no word for this yet: it is done by hand, on its manager and its scheduler.
        """
        scheduler, manager = self.engine.scheduler, self.engine.manager
        decoding = [r for r in scheduler.running if r.seq.num_reserved == r.seq.num_computed == len(r.seq) - 1]
        if not decoding or len(scheduler.running) == scheduler.max_num_seqs:
            return
        parent = decoding[which % len(decoding)]
        seq = manager.fork(parent.seq)
        manager.truncate(seq, seq.num_computed)
        seq.append(token)
        prompt = tuple(seq.tokens(0))
        left = parent.num_prompt_tokens + parent.params.max_tokens - len(prompt)
        request_id = 1000 + len(self.requests)  # after those that the engine numbers
        params = SamplingParams(max_tokens=left)
        child = Request(request_id, seq, len(prompt), params, Random(0), parent.priority)
        insort(scheduler.running, child, key=lambda r: r.key)
        self.requests.append((child, prompt))
        event("forked")

    @rule(which=st.integers(0, 15))
    def abort(self, which: int) -> None:
        if self.requests:
            request, _ = self.requests[which % len(self.requests)]
            reason = request.finish_reason
            self.engine.abort(request)
            assert request.finish_reason is (reason or FinishReason.ABORT)

    @invariant()
    def outputs_are_those_of_a_lone_run(self) -> None:
        for request, prompt in getattr(self, "requests", ()):
            expected, reason = alone(prompt, request.params.max_tokens)
            output = request.output_token_ids
            assert output == expected[: len(output)], f"{prompt} generates {output}, alone {expected}"
            if request.finish_reason not in (None, FinishReason.ABORT):
                assert (output, request.finish_reason) == (expected, reason)

    @invariant()
    def allocator_is_sound(self) -> None:
        if hasattr(self, "engine"):
            self.engine.manager.check()

    def teardown(self) -> None:
        """Everything finishes in a bounded number of steps, and nothing is left behind."""
        if not hasattr(self, "engine"):
            return
        # Alone, a request computes a token a step at least; others can make it start over, once for each that finishes.
        bound = (len(self.requests) + 1) ** 2 * 2 * RUNNER.spec.max_length
        while self.engine.has_unfinished:
            self.engine.step()
            bound -= 1
            assert bound > 0, "the engine makes no progress"
        self.outputs_are_those_of_a_lone_run()
        if self.engine.stats.num_preemptions:
            event("preempted")
        assert self.engine.manager.num_used == 0
        self.engine.manager.check()
