"""The engine: requests in, tokens out, one batched step at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random

from kvproof.allocator import Admission, EvictionPolicy, KvproofError
from kvproof.attention import AttentionBackend
from kvproof.backend.engine_backend import Chunk, EngineBackend, reaches_end
from kvproof.backend.request import FinishReason, Request, RequestRefused
from kvproof.backend.runner import ModelRunner
from kvproof.backend.sampling import SamplingParams, sample
from kvproof.backend.scheduler import Scheduler
from kvproof.backend.selection import AUTO


class EngineStalled(KvproofError, RuntimeError):
    """Requests wait and none can run: blocks are held by sequences that are not the engine's."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the engine was made. Prompt tokens and hits count once a request, at its first admission."""

    num_steps: int
    num_prompt_tokens: int
    num_prefix_hit_tokens: int
    num_output_tokens: int
    num_preemptions: int
    peak_used_blocks: int


class Engine:
    """Continuous batching of requests on one `ModelRunner`.

    Deterministic: the same requests, seed and settings give the same tokens. Not for use from several threads.

    runner                  the model
    num_blocks, block_size  the KV cache, see `CacheSpec`
    attention               an attention backend's name, or "auto"
    policy                  a new eviction policy; LRU by default
    prefix_caching          whether prompts may reuse computed blocks of others
    max_num_seqs            most requests running at once
    max_num_batched_tokens  most tokens computed in a step, at least `max_num_seqs`
    seed                    for requests that bring no seed of their own
    detokenize              token ids to text; needed for `SamplingParams.stop` only
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        num_blocks: int,
        block_size: int = 16,
        attention: str | AttentionBackend = AUTO,
        policy: EvictionPolicy | None = None,
        prefix_caching: bool = True,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        seed: int = 0,
        detokenize: Callable[[list[int]], str] | None = None,
    ) -> None:
        self.runner = runner
        spec = runner.spec.cache_spec(num_blocks=num_blocks, block_size=block_size)
        self.backend = EngineBackend(
            spec,
            attention=attention,
            layer_windows=runner.spec.layer_windows,
            policy=policy,
            prefix_caching=prefix_caching,
        )
        self.manager = self.backend.manager
        self.scheduler = Scheduler(
            self.manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )
        self._seed = seed
        self._detokenize = detokenize
        self._num_requests = 0
        self._num_steps = 0
        self._num_output_tokens = 0
        self._peak_used_blocks = 0

    def add(self, prompt: Iterable[int], params: SamplingParams | None = None, *, priority: int = 0) -> Request:
        """Queue a request. Raises `RequestRefused`, and queues nothing, when it could not finish even alone.

        The output ends at the model's `max_length` if `max_tokens` reaches past it.
        """
        prompt = list(prompt)
        params = params or SamplingParams()
        self._check_prompt(prompt)
        if params.stop and self._detokenize is None:
            raise RequestRefused("stop texts need an engine with a detokenizer")
        # The last token that is sampled is never computed, so it needs no slot.
        num_slots = min(len(prompt) + params.max_tokens, self.runner.spec.max_length) - 1
        seq = self.manager.sequence(prompt, max_length=num_slots)
        if self.manager.can_admit(seq) is Admission.NEVER:
            blocks, size = self.manager.num_blocks, self.manager.block_size
            raise RequestRefused(
                f"{len(prompt)} prompt tokens and up to {params.max_tokens} new ones need {num_slots} token slots, "
                f"the whole pool has {blocks * size} ({blocks} blocks of {size})"
            )
        request_id = self._num_requests
        rng = Random(f"{self._seed}/{request_id}" if params.seed is None else params.seed)
        request = Request(request_id, seq, len(prompt), params, rng, priority)
        self._num_requests += 1
        self.scheduler.add(request)
        return request

    def _check_prompt(self, prompt: list[int]) -> None:
        model = self.runner.spec
        if not prompt:
            raise RequestRefused("the prompt is empty")
        if len(prompt) >= model.max_length:
            raise RequestRefused(
                f"the prompt has {len(prompt)} tokens, the model takes {model.max_length} with at least one new token"
            )
        outside = [token for token in prompt if not 0 <= token < model.vocab_size]
        if outside:
            raise RequestRefused(f"token id {outside[0]} is not in the vocabulary, 0 to {model.vocab_size - 1}")

    def abort(self, request: Request) -> None:
        """End a request wherever it is and release its blocks; a finished one stays as it is."""
        if request.finish_reason is None:
            self._finish(request, FinishReason.ABORT)

    def step(self) -> list[Request]:
        """Compute one step. Returns the requests that have one output token more, finished ones among them.

        Raises `EngineStalled` when requests wait and nothing can run.
        """
        work = self.scheduler.schedule()
        if not work:
            if self.has_unfinished:
                raise EngineStalled(f"{len(self.scheduler.waiting)} requests wait for blocks that nobody will release")
            return []
        chunks = [Chunk(request.seq, n) for request, n in work]
        sampling = [request for (request, _), chunk in zip(work, chunks, strict=True) if reaches_end(chunk)]
        self._peak_used_blocks = max(self._peak_used_blocks, self.manager.num_used)
        logits = self.runner.forward(self.backend.begin(chunks))
        tokens = sample(logits, [r.params for r in sampling], [r.rng for r in sampling])
        # Nothing has changed so far, so a step that failed can be tried again.
        self.backend.end(chunks)
        for request, token in zip(sampling, tokens, strict=True):
            request.seq.append(token)
        for request, token in zip(sampling, tokens, strict=True):
            reason = self._reason_to_finish(request, token)
            if reason is not None:
                self._finish(request, reason)
        self._num_steps += 1
        self._num_output_tokens += len(tokens)
        return sampling

    def run(self) -> Iterator[Request]:
        """Step until nothing is left. Yields a request each time it has one output token more."""
        while self.has_unfinished:
            yield from self.step()

    @property
    def has_unfinished(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_steps=self._num_steps,
            num_prompt_tokens=self.scheduler.num_prompt_tokens,
            num_prefix_hit_tokens=self.scheduler.num_prefix_hit_tokens,
            num_output_tokens=self._num_output_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            peak_used_blocks=self._peak_used_blocks,
        )

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self.scheduler.remove(request)
        request.finish_reason = reason

    def _reason_to_finish(self, request: Request, token: int) -> FinishReason | None:
        params = request.params
        if token in params.stop_token_ids or (token in self.runner.spec.eos_token_ids and not params.ignore_eos):
            return FinishReason.STOP
        if params.stop and self._ends_with_stop_text(request):
            return FinishReason.STOP
        if request.num_output_tokens >= params.max_tokens or len(request.seq) >= self.runner.spec.max_length:
            return FinishReason.LENGTH
        return None

    def _ends_with_stop_text(self, request: Request) -> bool:
        """Whether the newest token completed a stop text. Looks no further back than such a text can reach."""
        stops = request.params.stop
        # A token is at least a byte and a character at most four, so this many tokens hold the longest text.
        reach = 4 * max(map(len, stops))
        start = max(request.num_prompt_tokens, len(request.seq) - reach)
        tail = self._detokenize(request.seq.tokens(start).tolist()) if self._detokenize else ""
        return any(stop in tail for stop in stops)
