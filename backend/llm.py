"""Text in, text out: a checkpoint, its tokenizer and an engine in one object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kvproof.allocator import InvalidArgument
from kvproof.attention import DType
from kvproof.backend.engine import Engine
from kvproof.backend.models.checkpoint import Checkpoint, UnsupportedModel, open_checkpoint
from kvproof.backend.registry import BrokenPlugin, Group, load, plugins
from kvproof.backend.request import FinishReason, Request, RequestRefused
from kvproof.backend.runner import ModelRunner
from kvproof.backend.sampling import SamplingParams
from kvproof.backend.selection import AUTO, new_policy

DEFAULT_CACHE_BYTES = 1 << 30

Progress = Callable[[int, int], None]
"""Called with how much is done and how much there is."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of one prompt. `error` says why when it was refused."""

    prompt: str
    text: str
    token_ids: list[int]
    cached_tokens: int
    finish_reason: FinishReason
    error: str | None = None


def load_runner(
    checkpoint: Checkpoint, dtype: DType, progress: Progress | None = None, *, runner: str = AUTO
) -> ModelRunner:
    """The checkpoint on the registered model runner called `runner`.

    "auto" is the first that does not refuse it: those whose `architectures` name that of the checkpoint come before
    those that leave it open with None. Raises `UnsupportedModel` with every refusal, or what the runner raises.
    """
    if runner != AUTO:
        chosen: ModelRunner = load(Group.RUNNER, runner).load(checkpoint, dtype=dtype, progress=progress)
        return chosen
    refusals: list[str] = []
    for candidate in _candidates(checkpoint.architecture, refusals):
        try:
            loaded: ModelRunner = candidate.load(checkpoint, dtype=dtype, progress=progress)
        except UnsupportedModel as error:
            refusals.append(str(error))
        else:
            return loaded
    raise UnsupportedModel(f"no model runner for {checkpoint.path}: {'; '.join(refusals) or 'none is registered'}")


def _candidates(architecture: str, refusals: list[str]) -> Iterator[Any]:
    """Runners in the order in which they are tried. Lazy, since importing one may take seconds."""
    open_ones = []
    for plugin in plugins(Group.RUNNER).values():
        try:
            runner = plugin.load()
        except BrokenPlugin as error:
            refusals.append(str(error))
            continue
        known: frozenset[str] | None = getattr(runner, "architectures", frozenset())
        if known is None:
            open_ones.append(runner)
        elif architecture in known:
            yield runner
        else:
            refusals.append(f"{plugin.name} runs {', '.join(sorted(known)) or 'none'}, not {architecture!r}")
    yield from open_ones


class LLM:
    """A model ready to generate.

    `model` is a GGUF file, a Hugging Face folder or a known name such as "smollm2". `num_blocks` left out gives the
    KV cache 1 GiB (or one block, if that is larger), or less when `max_num_seqs` sequences of the longest kind need
    less. `runner`, `backend` and `policy` are names of plugins. The other options are those of `Engine`.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: DType = "float32",
        runner: str = AUTO,
        backend: str = AUTO,
        policy: str = "lru",
        block_size: int = 16,
        num_blocks: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        prefix_caching: bool = True,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        eviction = new_policy(policy)
        checkpoint = open_checkpoint(model)
        self.tokenizer = checkpoint.tokenizer()
        loaded = load_runner(checkpoint, dtype, progress, runner=runner)
        if num_blocks is None:
            block_bytes = loaded.spec.cache_spec(num_blocks=1, block_size=block_size).block_bytes
            longest = -(-loaded.spec.max_length // block_size)
            num_blocks = max(1, min(DEFAULT_CACHE_BYTES // block_bytes, max_num_seqs * longest))
        self.engine = Engine(
            loaded,
            num_blocks=num_blocks,
            block_size=block_size,
            attention=backend,
            policy=eviction,
            prefix_caching=prefix_caching,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            seed=seed,
            detokenize=self.tokenizer.decode,
        )

    def generate(
        self,
        prompts: Iterable[str],
        params: SamplingParams | None = None,
        *,
        on_token: Callable[[Request], None] | None = None,
    ) -> list[Completion]:
        """Complete all prompts in one batch, in their order. One that can't run is refused and stops no other.

        `on_token` is called with a request each time it has one token more. If it raises, all requests are aborted.
        """
        params = params or SamplingParams()
        requests: list[tuple[str, Request | RequestRefused]] = []
        try:
            for prompt in prompts:
                requests.append((prompt, self._add(prompt, params)))  # noqa: PERF401 - some are queued if one raises
            for advanced in self.engine.run():
                if on_token is not None:
                    on_token(advanced)
        finally:
            for _, request in requests:
                if isinstance(request, Request):
                    self.engine.abort(request)  # has no effect on a finished one
        return [self._completion(prompt, request) for prompt, request in requests]

    def _add(self, prompt: str, params: SamplingParams) -> Request | RequestRefused:
        try:
            return self.engine.add(self.tokenizer.encode(prompt), params)
        except RequestRefused as refusal:
            return refusal
        except InvalidArgument as error:  # no Unicode text
            return RequestRefused(str(error))

    def _completion(self, prompt: str, request: Request | RequestRefused) -> Completion:
        if isinstance(request, RequestRefused):
            return Completion(prompt, "", [], 0, FinishReason.REFUSED, str(request))
        tokens = request.output_token_ids
        text = self.tokenizer.decode(tokens)
        text = text[: min((text.find(stop) for stop in request.params.stop if stop in text), default=len(text))]
        return Completion(
            prompt, text, tokens, request.num_cached_tokens or 0, request.finish_reason or FinishReason.ABORT
        )
