"""Sampling: exact supports, right frequencies, and results that depend on the request alone."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvproof.allocator import InvalidArgument
from kvproof.backend.sampling import NUCLEUS_GUESS, SamplingParams, first_largest, sample

PROBS = (0.5, 0.25, 0.15, 0.07, 0.03)
LOGITS = torch.tensor([PROBS]).log()


def draws(n: int = 4000, logits: torch.Tensor = LOGITS, **params: object) -> Counter[int]:
    rng = Random(7)
    settings = SamplingParams(**params)
    return Counter(sample(logits, [settings], [rng])[0] for _ in range(n))


def test_greedy_takes_the_first_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    assert sample(logits, [SamplingParams()] * 2, [Random(0)] * 2) == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 16, 32, 250, 256, 288, 768, 49152])
def test_the_first_largest_is_argmax(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = [
        torch.randn(vocab),
        torch.randint(3, (vocab,)).float(),
        torch.zeros(vocab),
        torch.full((vocab,), -torch.inf),
    ]
    logits = torch.stack([*rows, *rows]).to(dtype)
    logits[4:, vocab // 2] = float("nan")  # which is the largest, wherever it is
    logits[6:, vocab // 3] = float("inf")
    logits[7, -1] = float("nan")
    logits[3, vocab // 4] = torch.finfo(dtype).min
    assert torch.equal(first_largest(logits), logits.argmax(dim=-1))
    assert first_largest(logits[:0]).shape == (0,)


def test_frequencies_follow_the_distribution() -> None:
    counts = draws(temperature=1.0)
    chi_square = sum((counts[i] - 4000 * p) ** 2 / (4000 * p) for i, p in enumerate(PROBS))
    assert chi_square < 18.5  # 0.1 % of honest runs exceed it, with 4 degrees of freedom; the seed is fixed


def test_temperature_sharpens_and_flattens() -> None:
    cold, hot = draws(temperature=0.5), draws(temperature=2.0)
    squared = [p**2 for p in PROBS]
    assert cold[0] / 4000 == pytest.approx(squared[0] / sum(squared), abs=0.03)
    roots = [p**0.5 for p in PROBS]
    assert hot[0] / 4000 == pytest.approx(roots[0] / sum(roots), abs=0.03)


@pytest.mark.parametrize(
    ("params", "support"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.5}, {0}),  # the first alone reaches it
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.76}, {0, 1, 2}),
        ({"top_p": 1e-9}, {0}),  # one always stays
        ({"top_k": 3, "top_p": 0.84}, {0, 1, 2}),  # of the three's own total .9, the first two reach .833
        ({"top_k": 3, "top_p": 0.83}, {0, 1}),
    ],
)
def test_only_allowed_tokens_are_drawn(params: dict[str, float], support: set[int]) -> None:
    assert set(draws(temperature=1.0, **params)) == support


def test_a_nucleus_wider_than_the_guess_is_exact() -> None:
    vocab = 4 * NUCLEUS_GUESS
    rng = Random(3)
    params = SamplingParams(temperature=1.0, top_p=0.5)
    drawn = {sample(torch.zeros(1, vocab), [params], [rng])[0] for _ in range(3000)}
    assert NUCLEUS_GUESS < len(drawn) <= vocab // 2 + 1


def test_the_smallest_temperature_is_greedy_not_nan() -> None:
    assert set(draws(50, temperature=1e-300)) == {0}


@given(st.integers(0, 2**32), st.floats(0.1, 2.0), st.integers(0, 6), st.floats(0.1, 1.0), st.integers(0, 5))
def test_a_row_does_not_depend_on_its_batch(seed: int, temperature: float, top_k: int, top_p: float, at: int) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 40, generator=generator)
    alone = sample(logits[at : at + 1], [params], [Random(seed)])
    rngs = [Random(seed) if row == at else Random(row) for row in range(6)]
    everyone = [params if row == at else SamplingParams(temperature=float(row % 2)) for row in range(6)]
    assert sample(logits, everyone, rngs)[at] == alone[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", 1.1),
    ],
)
def test_bad_parameters_are_named_in_one_line(field: str, value: float) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(**{field: value})
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_default_device_changes_nothing() -> None:
    logits = torch.randn(3, 64)
    torch.set_default_device("meta")
    try:
        found = first_largest(logits)
    finally:
        torch.set_default_device(None)
    assert torch.equal(found, logits.argmax(dim=-1))
