"""The driver over the real package's Python, with the compiled kernels replaced: skipped where it isn't installed.

`make test-flashinfer` installs two releases of it, each aside, and runs this over both.

What a wrapper hands to its kernel module is computed on as it is, so a wrong argument anywhere gives wrong numbers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from kvproof.attention.flashinfer import FlashInferFA3, FlashInferPersistent
from kvproof.attention.flashinfer_package import Kernels
from kvproof.fuzz.conformance import attention_checks
from kvproof.fuzz.flashinfer_double import FlashInferOnCPU, make_spec
from kvproof.fuzz.flashinfer_modules import FakeModule, FakePersistentModule
from kvproof.fuzz.flashinfer_stream import Stream, StreamEvent
from kvproof.fuzz.flashinfer_wrappers import merge

pytestmark = pytest.mark.usefixtures("wrappers")


def imported() -> ModuleType:
    """The package; where KVPROOF_FLASHINFER is a release, that one and no excuses."""
    release = os.environ.get("KVPROOF_FLASHINFER")
    try:
        import flashinfer
    except Exception as error:  # some releases fail with an AssertionError on a CPU build of torch
        if release is not None:
            raise
        pytest.skip(f"flashinfer-python can't be imported: {type(error).__name__}: {error}".splitlines()[0])
    assert release in (None, flashinfer.__version__)
    return flashinfer


@pytest.fixture(scope="module")
def wrappers(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[ModuleType]:
    """The real package, its kernel modules faked and its pinned memory ordinary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path_factory.mktemp("flashinfer")))  # else the home folder
        package = imported()
        import flashinfer.decode
        import flashinfer.prefill

        persistent = sys.modules[package.BatchAttention.__module__]
        patch.setattr(persistent, "get_holistic_attention_module", FakePersistentModule)
        # A later release loads another one for keys and values of different strides.
        patch.setattr(persistent, "get_holistic_attention_independent_module", lambda *_: None, raising=False)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        empty = torch.empty
        for module in (flashinfer.decode, flashinfer.prefill):
            patch.setattr(module, "get_batch_prefill_module", FakeModule)
            patch.setattr(module, "device_support_pdl", lambda _: False)
        patch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
        OverRealWrappers.wrappers = package
        yield package


class OverRealWrappers(FlashInferOnCPU):
    workspace_bytes = 2**20
    wrappers: Any

    def _kernels(self) -> Kernels:
        stream = Stream()
        return Kernels(
            prefill=self.wrappers.BatchPrefillWithPagedKVCacheWrapper,
            decode=self.wrappers.BatchDecodeWithPagedKVCacheWrapper,
            event=lambda: StreamEvent(stream),
            persistent=self.wrappers.BatchAttention,
            merge=partial(merge, stream),
            copy=stream.copy,
            pin_memory=False,
        )


class GraphsOverRealWrappers(OverRealWrappers):
    graph_sizes = (1, 2, 4, 8)


class CascadeOverRealWrappers(OverRealWrappers):
    cascade_rows = 2
    cascade_tokens = 1


class FA3OverRealWrappers(OverRealWrappers, FlashInferFA3):
    """FA3 kernels for prefills."""


class PersistentOverRealWrappers(OverRealWrappers, FlashInferPersistent):
    """BatchAttention for everything."""


def test_graphs_get_the_workspace_that_the_real_package_asks_for(wrappers: ModuleType) -> None:
    can_say = hasattr(wrappers.BatchDecodeWithPagedKVCacheWrapper, "workspace_size")
    workspace = GraphsOverRealWrappers(make_spec())._lane._workspace
    assert workspace.numel() == 2**20 + (16 * 8 if can_say else 0)


test_conforms = attention_checks(OverRealWrappers, examples=10)
test_graphs_conform = attention_checks(GraphsOverRealWrappers, examples=4)
test_cascade_conforms = attention_checks(CascadeOverRealWrappers, examples=4)
test_fa3_conforms = attention_checks(FA3OverRealWrappers, examples=4)
test_persistent_conforms = attention_checks(PersistentOverRealWrappers, examples=4)
