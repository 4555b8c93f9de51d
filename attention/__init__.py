"""Paged attention: the cache's shape, a step's metadata, and the backends that run on them."""

from kvproof.attention.base import AttentionBackend, Capabilities, Feature
from kvproof.attention.errors import (
    BackendUnavailable,
    InvalidBatch,
    InvalidSpec,
    NotPlanned,
    UnsupportedSpec,
)
from kvproof.attention.plan import BatchPlan
from kvproof.attention.spec import CacheSpec, DType, Layout
from kvproof.attention.validated import Validated

__all__ = [
    "CacheSpec",
    "DType",
    "Layout",
    "BatchPlan",
    "AttentionBackend",
    "Capabilities",
    "Feature",
    "BackendUnavailable",
    "InvalidBatch",
    "InvalidSpec",
    "NotPlanned",
    "UnsupportedSpec",
    "Validated",
]
