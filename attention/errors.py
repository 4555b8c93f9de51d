"""The attention layer's branch of the exception hierarchy."""

from __future__ import annotations

from kvproof.allocator.errors import InvalidArgument, KvproofError


class InvalidSpec(InvalidArgument):
    """A `CacheSpec` field out of bounds; the message names the field, the value and the limit."""


class InvalidBatch(InvalidArgument):
    """Batch metadata that breaks a rule of `BatchPlan`.

    `rule` is its name in the table of `kvproof.attention.plan`, such as `"block-range"`.
    """

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


class UnsupportedSpec(KvproofError):
    """A valid `CacheSpec` that this backend does not implement."""

    def __init__(self, backend: str, feature: str, value: object, supported: str) -> None:
        super().__init__(f"the {backend} backend does not support {feature} {value}; it supports {supported}")
        self.backend = backend
        self.feature = feature
        self.value = value
        self.supported = supported


class BackendUnavailable(KvproofError, RuntimeError):
    """A backend that cannot run on this machine: why, and what the user can do about it."""

    def __init__(self, backend: str, reason: str, remedy: str) -> None:
        super().__init__(f"the {backend} backend is not available: {reason}; {remedy}")
        self.backend = backend
        self.reason = reason
        self.remedy = remedy


class NotPlanned(KvproofError, RuntimeError):
    """`run` was called before the first `plan`."""
