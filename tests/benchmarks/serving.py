"""Work for whole engines as plain data, and the loop that drives any engine through it.

Plain Python only: the same file runs in the tests and in the interpreter of a peer that has one of its own.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple, Protocol, TypedDict


class Conversations(TypedDict):
    """Prompts that arrive together. When all are answered, each conversation goes on: its prompt, its answer and the
    next of its `additions`. Every answer has `max_tokens` tokens."""

    prompts: list[list[int]]
    additions: list[list[list[int]]]
    max_tokens: int


class Served(NamedTuple):
    """One batch of requests. `first` has the seconds until each request's first token, from the batch's arrival."""

    answers: list[list[int]]
    seconds: float
    first: list[float]
    cached: int


class Server(Protocol):
    def serve(self, prompts: list[list[int]], max_tokens: int) -> Served:
        """All prompts at once, greedily, to the end."""


def converse(server: Server, work: Conversations) -> dict[str, Any]:
    """All turns of all conversations.

    seconds     of serving
    first       seconds until each request's first token
    tokens      generated
    prompt      tokens of all prompts, and `cached`, how many of them were found in the prefix cache
    """
    prompts, seconds, first, tokens, prompt, cached = work["prompts"], 0.0, list[float](), 0, 0, 0
    for additions in [*work["additions"], None]:
        served = server.serve(prompts, work["max_tokens"])
        assert [len(answer) for answer in served.answers] == [work["max_tokens"]] * len(prompts)
        seconds += served.seconds
        first += served.first
        tokens += len(prompts) * work["max_tokens"]
        prompt += sum(map(len, prompts))
        cached += served.cached
        if additions is not None:
            turns = zip(prompts, served.answers, additions, strict=True)
            prompts = [said + answer + more for said, answer, more in turns]
    return {"seconds": seconds, "first": first, "tokens": tokens, "prompt": prompt, "cached": cached}


def conversations(
    count: int, own: int, max_tokens: int, *, shared: int = 0, turns: int = 1, addition: int = 0, seed: int
) -> Conversations:
    """`count` of them: `shared` tokens that all begin with, `own` of their own, and more in each further turn.

    Another seed gives other tokens throughout, which nobody's cache has seen.
    """
    draw = random.Random(seed)

    def some(n: int) -> list[int]:
        return draw.choices(range(1000, 40000), k=n)

    prefix = some(shared)
    return {
        "prompts": [prefix + some(own) for _ in range(count)],
        "additions": [[some(addition) for _ in range(count)] for _ in range(turns - 1)],
        "max_tokens": max_tokens,
    }
