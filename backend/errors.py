"""The backend's own branch of the exception hierarchy."""

from __future__ import annotations

from kvproof.allocator import KvproofError


class CheckpointError(KvproofError):
    """A model's files are missing, damaged or of a kind that isn't supported. The message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


class UnsupportedModel(CheckpointError):
    """A model whose files are sound, and which the runner that was asked can't compute. Another one may."""
