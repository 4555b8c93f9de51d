"""What the integration refuses, one line each."""

from __future__ import annotations

from kvproof.allocator import KvproofError


class UnsupportedVllm(KvproofError, RuntimeError):
    """The installed vLLM is a version whose surface is not recorded, or its surface is not what was recorded."""


class UnsupportedFeature(KvproofError, ValueError):
    """The engine is configured with a feature of vLLM that ours does not have; the message names it."""

    def __init__(self, feature: str, instead: str) -> None:
        super().__init__(f"kvproof does not support {feature}: {instead}")
