"""The optional package `flashinfer-python`: whether it can be used here, and what of it is used.

Importing kvproof never imports it. An import takes seconds, some releases fail at it on a CPU build of torch with an
AssertionError (flashinfer #3262, #4143), and it is of no use without a GPU; so everything cheaper is asked first.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch
from torch import Tensor

from kvproof.attention.errors import BackendUnavailable

NAME = "flashinfer"
OLDEST, NEWEST = (0, 6, 6), (0, 8)
"""Releases from `OLDEST` up to and without `NEWEST`: those whose signatures our calls were checked against."""
INSTALL = "install it with: pip install 'kvproof[flashinfer]'"


class Event(Protocol):
    """A point in the device's order of work, as `torch.cuda.Event`."""

    def record(self) -> None:
        """Mark everything submitted so far."""

    def synchronize(self) -> None:
        """Wait until what was marked is done; return at once if nothing was."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """All that the driver takes from the package and the device, so that both can be stood in for."""

    prefill: Callable[..., Any]  # BatchPrefillWithPagedKVCacheWrapper
    decode: Callable[..., Any]  # BatchDecodeWithPagedKVCacheWrapper
    persistent: Callable[..., Any]  # BatchAttention
    merge: Callable[..., Any]  # merge_state_in_place
    copy: Callable[[Tensor, Tensor], object]  # into the first tensor from the second, without waiting
    event: Callable[[], Event]
    pin_memory: bool


class DeviceEvent:
    """An `Event` of the stream that is current on `device` when it is recorded."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        self._event.synchronize()


def load(device: str) -> Kernels:
    """The real kernels. Raises `BackendUnavailable`, saying why and what to do, whatever is wrong with the package."""
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            NAME,
            "torch finds no CUDA device",
            "it needs an NVIDIA GPU and a CUDA build of torch; use the torch backend",
        )
    installed = _supported_version()
    try:
        package = import_module("flashinfer")
        return Kernels(
            prefill=package.BatchPrefillWithPagedKVCacheWrapper,
            decode=package.BatchDecodeWithPagedKVCacheWrapper,
            persistent=package.BatchAttention,
            merge=package.merge_state_in_place,
            copy=lambda to, source: to.copy_(source, non_blocking=True),
            event=lambda: DeviceEvent(device),
            pin_memory=True,
        )
    except Exception as error:  # a package that fails to import may raise anything
        reason = f"importing flashinfer-python {installed} raised {type(error).__name__}: {error}".splitlines()[0]
        raise BackendUnavailable(
            NAME, reason, "reinstall it for this version of torch, or use the torch backend"
        ) from error


def _supported_version() -> str:
    try:
        installed = version("flashinfer-python")
    except PackageNotFoundError:
        raise BackendUnavailable(NAME, "flashinfer-python is not installed", INSTALL) from None
    release = tuple(int(number) for number in re.findall(r"\d+", installed)[:3])
    if not OLDEST <= release < NEWEST:
        oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
        reason = f"flashinfer-python {installed} is installed; supported is {oldest} and later, below {newest}"
        raise BackendUnavailable(NAME, reason, INSTALL)
    return installed
