"""CacheSpec bounds and what a backend's declared capabilities refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvproof.attention import CacheSpec, Capabilities, InvalidSpec, UnsupportedSpec

VALID: dict[str, Any] = {
    "num_layers": 30,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_size": 64,
    "dtype": "bfloat16",
    "num_blocks": 512,
    "block_size": 16,
}


def spec(**changes: Any) -> CacheSpec:
    return CacheSpec(**(VALID | changes))


def test_derived_sizes() -> None:
    it = spec()
    assert it.group_size == 3
    assert it.torch_dtype is torch.bfloat16
    assert it.softmax_scale == 0.125
    assert it.cache_shape == (30, 512, 2, 16, 3, 64)
    assert it.block_bytes == 30 * 2 * 16 * 3 * 64 * 2
    assert spec(layout="HND", scale=0.5).cache_shape == (30, 512, 2, 3, 16, 64)
    assert spec(scale=0.5).softmax_scale == 0.5
    assert it.torch_cache_dtype is torch.bfloat16
    small = spec(cache_dtype="float8_e4m3fn", k_scale=0.5)
    assert (small.torch_dtype, small.torch_cache_dtype) == (torch.bfloat16, torch.float8_e4m3fn)
    assert (small.cache_shape, small.block_bytes) == (it.cache_shape, it.block_bytes // 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 0}, ["num_layers=0", "1"]),
        ({"num_heads": -3}, ["num_heads=-3", "1"]),
        ({"num_kv_heads": 0}, ["num_kv_heads=0", "1"]),
        ({"num_heads": 10}, ["CacheSpec: num_heads=10", "num_kv_heads=3"]),
        ({"head_size": 0}, ["head_size=0", "1"]),
        ({"head_size": 513}, ["head_size=513", "512"]),
        ({"num_blocks": 0}, ["num_blocks=0", "1"]),
        ({"block_size": 0}, ["block_size=0", "1"]),
        ({"block_size": True}, ["block_size=True", "integer"]),
        ({"num_blocks": 2**27}, ["num_blocks=134217728", "block_size=16", "2147483648"]),
        ({"num_blocks": 1, "block_size": 2**23}, ["block_size=8388608", "3221225472", "2147483648"]),
        ({"dtype": "int8"}, ["dtype='int8'", "bfloat16"]),
        ({"device": "abacus"}, ["device='abacus'", "torch device"]),
        ({"layout": "DHN"}, ["layout='DHN'", "NHD"]),
        ({"scale": 0.0}, ["scale=0.0", "greater than 0"]),
        ({"scale": float("inf")}, ["scale=inf", "finite"]),
        ({"cache_dtype": "int8"}, ["cache_dtype='int8'", "float8_e4m3fn"]),
        ({"cache_dtype": "float8_e4m3fn", "k_scale": 0.0}, ["k_scale=0.0", "greater than 0"]),
        ({"cache_dtype": "float8_e4m3fn", "v_scale": float("inf")}, ["v_scale=inf", "finite"]),
        ({"v_scale": 0.5}, ["k_scale, v_scale=(1.0, 0.5)", "cache_dtype", "bfloat16"]),
        ({"pages": 3}, ["pages=3"]),
    ],
)
def test_a_field_out_of_bounds_is_refused_in_one_line(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidSpec) as refusal:
        spec(**changes)
    message = str(refusal.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


def test_a_missing_field_is_refused_in_one_line() -> None:
    with pytest.raises(InvalidSpec, match=r"^CacheSpec: dtype is required$"):
        CacheSpec(**{name: value for name, value in VALID.items() if name != "dtype"})


def test_the_largest_pool_that_32_bit_slots_allow() -> None:
    assert spec(num_blocks=2**27 - 1).num_blocks == 134217727


NARROW = Capabilities(
    devices=frozenset({"cpu"}),
    dtypes=frozenset({"bfloat16", "float16"}),
    head_sizes=frozenset({64, 128}),
    group_sizes=frozenset({1, 3}),
    block_sizes=frozenset({16, 32}),
    layouts=frozenset({"NHD"}),
)


@pytest.mark.parametrize(
    ("changes", "feature", "value", "supported"),
    [
        ({"device": "cuda:1"}, "device", "cuda", "cpu"),
        ({"dtype": "float32"}, "dtype", "float32", "bfloat16, float16"),
        ({"head_size": 80}, "head_size", 80, "64, 128"),
        ({"num_heads": 6}, "group_size", 2, "1, 3"),
        ({"block_size": 8}, "block_size", 8, "16, 32"),
        ({"layout": "HND"}, "layout", "HND", "NHD"),
        ({"scale": 0.25}, "scale", 0.25, "only the default, 1/sqrt(head_size)"),
        ({"cache_dtype": "float8_e4m3fn"}, "cache_dtype", "float8_e4m3fn", "only caches of the model's dtype"),
    ],
)
def test_capabilities_refuse_what_they_lack(
    changes: dict[str, Any], feature: str, value: object, supported: str
) -> None:
    NARROW.check(spec(), "narrow")
    with pytest.raises(UnsupportedSpec) as refusal:
        NARROW.check(spec(**changes), "narrow")
    error = refusal.value
    assert (error.backend, error.feature, error.value, error.supported) == ("narrow", feature, value, supported)
    assert str(error) == f"the narrow backend does not support {feature} {value}; it supports {supported}"


def test_capabilities_without_limits_take_every_spec() -> None:
    anything = Capabilities(devices=frozenset({"cpu"}), features=frozenset({"custom_scale"}))
    anything.check(spec(dtype="float64", head_size=7, num_heads=21, block_size=1, layout="HND", scale=2.0))
