"""From logits to token ids: greedy, temperature, top-k and top-p, reproducible from a seed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from ctypes import c_int, c_void_p
from functools import cache
from pathlib import Path
from random import Random
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from kvproof.attention import Validated, native

SOURCE = Path(__file__).with_name("sampling.c")
VECTORS = 32
"""What a vocabulary is a multiple of, for `sampling.c`: two vectors of the widest."""
THREAD_ELEMENTS = 2**17
"""Logits that are worth a thread."""
NUCLEUS_GUESS = 1024  # a nucleus is nearly always within so many candidates, which saves sorting a vocabulary


class SamplingParams(Validated):
    """How a request's tokens are chosen and when it ends."""

    max_tokens: int = Field(default=16, ge=1, description="most tokens to generate")
    temperature: float = Field(default=0.0, ge=0.0, allow_inf_nan=False, description="0 is greedy")
    top_k: int = Field(default=0, ge=0, description="sample among the k likeliest tokens; 0 for all")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="sample within this total probability")
    seed: int | None = Field(default=None, description="same seed, same tokens; None draws one from the engine's seed")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="texts that end the output, and are cut off it"
    )
    stop_token_ids: tuple[int, ...] = Field(default=(), description="tokens that end the output too")
    ignore_eos: bool = Field(default=False, description="go on after the model's end-of-sequence token")


def sample(logits: Tensor, params: Seq[SamplingParams], rngs: Seq[Random]) -> list[int]:
    """One token id for each row of `logits` [R, vocab], each with its own parameters and random source.

    A row's result depends on that row alone, and a sampled row takes exactly one number from its source: a request
    draws the same tokens whatever else is in its batch.
    """
    tokens: list[int] = first_largest(logits).tolist()
    for row, (param, rng) in enumerate(zip(params, rngs, strict=True)):
        if param.temperature > 0:
            tokens[row] = _draw(logits[row].double(), param, rng.random())
    return tokens


def first_largest(logits: Tensor) -> Tensor:
    """`logits.argmax(dim=-1)` of [R, vocab].

    On a CPU that looks at one element after the other, where a maximum is a vector's work (`sampling.c`).
    """
    rows, vocab = logits.shape
    dtype = str(logits.dtype).removeprefix("torch.")
    library = _library() if logits.device.type == "cpu" and logits.is_contiguous() and dtype in native.DTYPES else None
    if library is None or vocab % VECTORS:
        return logits.argmax(dim=-1)
    out = logits.new_empty(rows, dtype=torch.int64)
    threads = min(native.num_threads(), 1 + logits.numel() // THREAD_ELEMENTS)
    library.kvproof_first_largest(
        *(native.DTYPES.index(dtype), threads, rows, vocab), logits.data_ptr(), out.data_ptr()
    )
    return out


@cache
def _library() -> ctypes.CDLL | None:
    library = native.loaded(SOURCE)
    if library is not None:
        library.kvproof_first_largest.argtypes = [*[c_int] * 4, *[c_void_p] * 2]
        library.kvproof_first_largest.restype = None
    return library


def _draw(logits: Tensor, params: SamplingParams, u: float) -> int:
    """Invert the cumulative distribution of the allowed candidates at `u` in [0, 1)."""
    # The largest becomes 0, so that the smallest temperature underflows instead of overflowing.
    probs = torch.softmax((logits - logits.max()) / params.temperature, dim=-1)
    vocab = probs.numel()
    if params.top_k == 0 and params.top_p == 1.0:
        return _invert(probs, u)
    k = min(params.top_k or vocab, vocab)
    guess = k if params.top_p == 1.0 else min(k, NUCLEUS_GUESS)
    likeliest, ids = probs.topk(guess)
    mass = probs.topk(k).values.sum() if params.top_k else probs.sum()
    if params.top_p < 1.0:
        if guess < k and likeliest.sum() < params.top_p * mass:
            likeliest, ids = probs.topk(k)
        # A candidate stays while those before it have not reached top_p, so at least one does.
        before = likeliest.cumsum(0) - likeliest
        likeliest = likeliest[before < params.top_p * mass]
    return int(ids[_invert(likeliest, u)])


def _invert(weights: Tensor, u: float) -> int:
    cumulative = weights.cumsum(0)
    index = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    return min(index, weights.numel() - 1)
