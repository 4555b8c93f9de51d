"""The optional package: told from afar whether it can be used, and called by keywords that every release knows."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvproof.attention import BackendUnavailable, BatchPlan
from kvproof.attention import flashinfer_package as package
from kvproof.attention.flashinfer import FlashInferAttention, FlashInferFA3, WorkspaceTooSmall
from kvproof.attention.flashinfer_package import Kernels
from kvproof.backend import selection
from kvproof.backend.registry import Group, Plugin
from kvproof.fuzz.flashinfer_double import (
    CascadeOverDouble,
    FlashInferOverDouble,
    GraphsOverDouble,
    PersistentOverDouble,
    make_spec,
)

WRAPPERS = SimpleNamespace(
    BatchPrefillWithPagedKVCacheWrapper=object(),
    BatchDecodeWithPagedKVCacheWrapper=object(),
    BatchAttention=object(),
    merge_state_in_place=object(),
    __version__="0.7.4",
)


def machine(
    patch: pytest.MonkeyPatch, *, gpu: bool = True, installed: str | None = "0.7.4", imported: object = WRAPPERS
) -> None:
    """Make this machine look like another one; `imported` is the package, or what importing it raises."""

    def version(name: str) -> str:
        assert name == "flashinfer-python"
        if installed is None:
            raise PackageNotFoundError
        return installed

    def import_module(name: str) -> object:
        assert name == "flashinfer"
        if isinstance(imported, BaseException):
            raise imported
        return imported

    patch.setattr(torch.cuda, "is_available", lambda: gpu)
    patch.setattr(package, "version", version)
    patch.setattr(package, "import_module", import_module)


@pytest.mark.parametrize(
    ("state", "reason", "remedy"),
    [
        ({"gpu": False}, "torch finds no CUDA device", "use the torch backend"),
        ({"installed": None}, "flashinfer-python is not installed", r"pip install 'kvproof\[flashinfer\]'"),
        *(
            ({"installed": version}, f"flashinfer-python {version} is installed; supported is 0.6.6 and later", "pip")
            for version in ("0.5.3", "0.6.5", "0.8.0", "1.0")
        ),
        (
            {"imported": AssertionError("Torch not compiled with CUDA enabled\nmore")},
            "importing flashinfer-python 0.7.4 raised AssertionError: Torch not compiled with CUDA enabled",
            "reinstall",
        ),
        ({"imported": OSError("libcuda.so.1")}, "raised OSError: libcuda.so.1", "reinstall"),
        ({"imported": SimpleNamespace()}, "raised AttributeError: ", "reinstall"),
    ],
)
def test_a_machine_that_lacks_something_is_told_what_and_what_to_do(
    state: dict[str, Any], reason: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, **state)
    for attempt in (FlashInferAttention.probe, lambda: FlashInferAttention(make_spec(device="cuda"))):
        with pytest.raises(
            BackendUnavailable, match=rf"^the flashinfer backend is not available: .*{reason}"
        ) as refusal:
            attempt()
        assert "\n" not in str(refusal.value)
        refusal.match(remedy)
    entry = EntryPoint("flashinfer", "kvproof.attention.flashinfer:FlashInferAttention", Group.ATTENTION)
    verdict = selection._judge(Plugin(Group.ATTENTION, "flashinfer", (entry,)), None)
    assert (verdict.backend, verdict.reason) == (None, str(refusal.value))


@pytest.mark.parametrize("version", ["0.6.6", "0.6.18.post1", "0.7.4"])
def test_a_supported_release_is_loaded(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, installed=version)
    loaded = package.load("cuda")
    assert loaded.prefill is WRAPPERS.BatchPrefillWithPagedKVCacheWrapper
    assert loaded.decode is WRAPPERS.BatchDecodeWithPagedKVCacheWrapper
    assert loaded.persistent is WRAPPERS.BatchAttention
    assert loaded.merge is WRAPPERS.merge_state_in_place
    assert loaded.pin_memory


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_fa3_is_for_hopper(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    reason = f"FA3 needs a GPU of compute capability 9, this one has {capability[0]}.{capability[1]}"
    with pytest.raises(BackendUnavailable, match=f"^the flashinfer-fa3 backend is not available: {reason}; use the "):
        FlashInferFA3.probe()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    FlashInferFA3.probe()


def test_kvproof_never_imports_it_unasked(tmp_path: Path) -> None:
    """Not even where it is installed: this one would end the process."""
    (tmp_path / "flashinfer.py").write_text("raise SystemExit('imported')")
    (tmp_path / "flashinfer_python-0.7.4.dist-info").mkdir()
    (tmp_path / "flashinfer_python-0.7.4.dist-info" / "METADATA").write_text(
        "Name: flashinfer-python\nVersion: 0.7.4\n"
    )
    script = (
        "import sys, torch, kvproof.attention.flashinfer, kvproof.backend.selection, kvproof.cli\n"
        "torch.cuda.is_available = lambda: False\n"
        "kvproof.backend.selection.survey()\n"
        "print('flashinfer' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert (run.stdout, run.returncode) == ("False\n", 0), run.stderr


Call = tuple[str, str, frozenset[str]]


class Recorder:
    """Notes the keywords of every call to a wrapper, and passes them on to the double's."""

    def __init__(self, calls: set[Call], name: str, wrapper: Any, **options: Any) -> None:
        self._calls, self._name = calls, name
        self._note("__init__", options)
        self._wrapper = wrapper(**options)

    def _note(self, method: str, arguments: dict[str, Any]) -> None:
        self._calls.add((self._name, method, frozenset(arguments)))

    def plan(self, **arguments: Any) -> None:
        self._note("plan", arguments)
        self._wrapper.plan(**arguments)

    def run(self, **arguments: Any) -> None:
        self._note("run", arguments)
        self._wrapper.run(**arguments)

    def workspace_size(self, **arguments: Any) -> tuple[int, int]:
        self._note("workspace_size", arguments)
        return 2**30, 0


def recorded(backend: type[FlashInferOverDouble], calls: set[Call]) -> type[FlashInferOverDouble]:
    def made(name: str, wrapper: Any) -> Any:
        return lambda **options: Recorder(calls, name, wrapper, **options)

    class Recording(backend):  # type: ignore[valid-type, misc]
        def _kernels(self) -> Kernels:
            real = super()._kernels()

            def merge(**arguments: Any) -> None:
                calls.add(("merge_state_in_place", "__call__", frozenset(arguments)))
                real.merge(**arguments)

            return replace(
                real,
                prefill=made("BatchPrefillWithPagedKVCacheWrapper", real.prefill),
                decode=made("BatchDecodeWithPagedKVCacheWrapper", real.decode),
                persistent=made("BatchAttention", real.persistent),
                merge=merge,
            )

    return Recording


@cache
def recorded_calls() -> set[Call]:
    """Every call that the drivers make: decodes with a common prefix and a prefill, graphs, an 8-bit cache, with and
    without log-sum-exp, and in a workspace that is too small."""
    calls = set[Call]()
    for variant in (CascadeOverDouble, GraphsOverDouble, PersistentOverDouble):
        for cache_dtype in (None,) if variant is PersistentOverDouble else (None, "float8_e4m3fn"):
            backend = recorded(variant, calls)(make_spec(cache_dtype=cache_dtype))
            for lens in ([1, 1, 2], [1, 1]):
                tables = [array("i", table) for table in ([1, 2], [1, 3], [4])]
                backend.plan(BatchPlan.build(tables[: len(lens)], [5, 6, 2][: len(lens)], lens, 4))
                q, k = torch.ones(sum(lens), 4, 64).bfloat16(), torch.ones(sum(lens), 2, 64).bfloat16()
                backend.run(0, q, k, k)
                backend.attend_lse(0, q)
    for rows in (1, 2):  # of query tokens, so that each of the two wrappers refuses

        class Cramped(FlashInferOverDouble):
            workspace_bytes = 16

        with pytest.raises(WorkspaceTooSmall, match=r"is too small for this step \(it needs 1073741824\); set"):
            recorded(Cramped, calls)(make_spec()).plan(BatchPlan.build([array("i", [1])], [2], [rows], 4))
    return calls


SIGNATURES = json.loads((Path(__file__).parents[1] / "data" / "flashinfer_signatures.json").read_text())


@pytest.mark.parametrize("release", SIGNATURES)
def test_every_call_fits_the_signatures_of_every_supported_release(release: str) -> None:
    """By keyword, each known and none missing. 0.5.3 shows that the table can tell: it is why 0.6 is the oldest."""
    unknown, missing = set[str](), set[str]()
    for wrapper, method, given in recorded_calls():
        if method == "workspace_size" and method not in SIGNATURES[release][wrapper]:
            continue  # the driver asks first
        names = SIGNATURES[release][wrapper][method]
        required, optional = (set(names[kind].split()) for kind in ("required", "optional"))
        unknown |= given - required - optional
        missing |= required - given
    assert (unknown, missing) == ({"o_data_type"} if release == "0.5.3" else set(), set())


def test_the_table_spans_the_supported_releases() -> None:
    assert {"0.6.6", "0.7.4"} <= set(SIGNATURES)
    assert "workspace_size" not in SIGNATURES["0.6.6"]["BatchDecodeWithPagedKVCacheWrapper"]
    assert "workspace_size" in SIGNATURES["0.7.4"]["BatchDecodeWithPagedKVCacheWrapper"]
    methods = {(wrapper, method) for wrapper, method, _ in recorded_calls()}
    assert len(methods) == 4 + 4 + 3 + 1
