"""What a model runner must do: the logits of a token follow from the tokens before it, however a step is put together.

A runner is compared with itself: each sequence is computed whole and alone on a dense attention that has no cache, and
again in chunks beside others on an `EngineBackend`.
"""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from kvproof.attention.reference import ReferenceAttention
from kvproof.backend.engine_backend import Chunk, EngineBackend
from kvproof.backend.runner import ModelRunner, Step
from kvproof.fuzz.conformance.report import Check, on_data
from kvproof.fuzz.dense import dense

RELATIVE = 64
"""Logits may differ by this many units of the dtype's precision, relative to the largest: several layers' worth of
rounding in another order. A wrong position, token or row changes them by the largest itself."""


def checks(model: ModelRunner) -> tuple[Check, ...]:
    """All checks of `model`."""
    return (
        on_data("logits do not depend on the batch", lambda data: logits_do_not_depend_on_the_batch(model, data)),
        on_data("logits are those that were asked for", lambda data: logits_are_those_asked_for(model, data)),
    )


def alone(model: ModelRunner, tokens: list[int], rows: list[int]) -> Tensor:
    """Logits [len(rows), vocab_size] of a whole sequence, without a cache."""
    spec = model.spec.cache_spec(num_blocks=1, block_size=len(tokens))

    def attention(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense(spec, q, k, v).out.to(q.dtype)

    places = torch.arange(len(tokens), device=model.spec.device)
    ids = torch.tensor(tokens, device=model.spec.device)
    return model.forward(Step(ids, places, torch.tensor(rows, dtype=torch.int64, device=model.spec.device), attention))


def logits_do_not_depend_on_the_batch(model: ModelRunner, data: st.DataObject) -> None:
    """Several sequences, computed in chunks of any size and mixture."""
    longest = min(12, model.spec.max_length)
    token = st.integers(0, min(model.spec.vocab_size, 50) - 1)
    prompts = data.draw(
        st.lists(st.lists(token, min_size=1, max_size=longest), min_size=1, max_size=3), label="prompts"
    )
    spec = model.spec.cache_spec(num_blocks=len(prompts) * longest, block_size=2)
    backend = EngineBackend(spec, attention=ReferenceAttention(spec))
    seqs = [backend.manager.sequence(prompt) for prompt in prompts]
    for seq in seqs:
        backend.manager.admit(seq)
    while left := [seq for seq in seqs if seq.num_computed < len(seq)]:
        sizes = [data.draw(st.integers(1, len(seq) - seq.num_computed), label="chunk") for seq in left]
        chunks = sorted((Chunk(*pair) for pair in zip(left, sizes, strict=True)), key=lambda chunk: chunk.n != 1)
        ended = [chunk.seq for chunk in chunks if chunk.seq.num_computed + chunk.n == len(chunk.seq)]
        logits = model.forward(backend.begin(chunks))
        backend.end(chunks)
        assert logits.shape == (len(ended), model.spec.vocab_size), f"logits have shape {list(logits.shape)}"
        for seq, got in zip(ended, logits, strict=True):
            tokens = seq.tokens(0).tolist()
            _same(model, got, alone(model, tokens, [len(tokens) - 1])[0], f"the last token of {tokens}")


def logits_are_those_asked_for(model: ModelRunner, data: st.DataObject) -> None:
    """Any rows, none included; and no token's logits depend on those after it."""
    longest = min(12, model.spec.max_length)
    token = st.integers(0, min(model.spec.vocab_size, 50) - 1)
    tokens = data.draw(st.lists(token, min_size=1, max_size=longest), label="tokens")
    rows = data.draw(st.lists(st.integers(0, len(tokens) - 1), max_size=4, unique=True).map(sorted), label="rows")
    logits = alone(model, tokens, rows)
    assert logits.shape == (len(rows), model.spec.vocab_size), f"logits have shape {list(logits.shape)}"
    for row, got in zip(rows, logits, strict=True):
        _same(model, got, alone(model, tokens[: row + 1], [row])[0], f"token {row} of {tokens}")


def _same(model: ModelRunner, got: Tensor, right: Tensor, what: str) -> None:
    eps = torch.finfo(getattr(torch, model.spec.dtype)).eps
    error = float((got.double() - right.double()).abs().max())
    bound = RELATIVE * eps * float(right.abs().max())
    assert error <= bound, f"the logits of {what} are off by {error:.3g}, {bound:.3g} may be lost to rounding"
