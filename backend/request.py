"""One request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

from kvproof.allocator import KvproofError, Sequence
from kvproof.backend.sampling import SamplingParams


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence token, a stop token or a stop text
    LENGTH = "length"  # max_tokens, or the model's longest sequence
    ABORT = "abort"  # the caller's wish
    REFUSED = "refused"  # it could never have run; see `RequestRefused`


class RequestRefused(KvproofError):
    """A request that can never run: empty, or longer than the model or the whole pool. Nothing was queued."""


@dataclass(eq=False, slots=True)
class Request:
    """The engine's record of a request; callers read it, the engine writes it.

    `seq` holds prompt and output tokens, through preemption. Requests run by `key`: lower `priority` first, then in
    order of arrival.
    """

    request_id: int
    seq: Sequence
    num_prompt_tokens: int
    params: SamplingParams
    rng: Random
    priority: int = 0
    num_cached_tokens: int | None = field(default=None, init=False)  # prompt tokens found at the first admission
    num_preemptions: int = field(default=0, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)

    @property
    def key(self) -> tuple[int, int]:
        return self.priority, self.request_id

    @property
    def num_output_tokens(self) -> int:
        return len(self.seq) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.seq.tokens(self.num_prompt_tokens).tolist()
