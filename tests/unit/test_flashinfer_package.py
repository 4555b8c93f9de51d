"""The optional package: told from afar whether it can be used, and called by keywords that every release knows."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from importlib.metadata import EntryPoint, PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvproof.attention import BackendUnavailable, BatchPlan
from kvproof.attention import flashinfer_package as package
from kvproof.attention.flashinfer import FlashInferAttention
from kvproof.attention.flashinfer_package import Kernels
from kvproof.backend import selection
from kvproof.backend.registry import Group, Plugin
from kvproof.fuzz.flashinfer_double import FlashInferOverDouble
from kvproof.fuzz.flashinfer_examples import make_spec

WRAPPERS = SimpleNamespace(
    BatchPrefillWithPagedKVCacheWrapper=object(), BatchDecodeWithPagedKVCacheWrapper=object(), __version__="0.7.4"
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
    assert loaded.pin_memory


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


class Recorder:
    """Notes the keywords of every call to a wrapper, and passes them on to the double's."""

    def __init__(self, calls: list[tuple[str, str, set[str]]], name: str, wrapper: Any, **options: Any) -> None:
        self._calls, self._name = calls, name
        self._calls.append((name, "__init__", set(options)))
        self._wrapper = wrapper(**options)

    def plan(self, **arguments: Any) -> None:
        self._calls.append((self._name, "plan", set(arguments)))
        self._wrapper.plan(**arguments)

    def run(self, **arguments: Any) -> None:
        self._calls.append((self._name, "run", set(arguments)))
        self._wrapper.run(**arguments)


def recorded_calls() -> list[tuple[str, str, set[str]]]:
    """Every call that the driver makes in a step of a decode and a prefill, with and without log-sum-exp."""
    calls: list[tuple[str, str, set[str]]] = []

    class Recording(FlashInferOverDouble):
        def _kernels(self) -> Kernels:
            real = super()._kernels()
            return Kernels(
                prefill=lambda **options: Recorder(
                    calls, "BatchPrefillWithPagedKVCacheWrapper", real.prefill, **options
                ),
                decode=lambda **options: Recorder(calls, "BatchDecodeWithPagedKVCacheWrapper", real.decode, **options),
                event=real.event,
                pin_memory=False,
            )

    backend = Recording(make_spec())
    backend.plan(BatchPlan.build([array("i", [1]), array("i", [2])], [3, 2], [1, 2], 4))
    q, k, v = torch.ones(3, 4, 64), torch.ones(3, 2, 64), torch.ones(3, 2, 64)
    backend.run(0, q.bfloat16(), k.bfloat16(), v.bfloat16())
    backend.attend_lse(0, q.bfloat16())
    return calls


SIGNATURES = json.loads((Path(__file__).parents[1] / "data" / "flashinfer_signatures.json").read_text())


@pytest.mark.parametrize("release", SIGNATURES)
def test_every_call_fits_the_signatures_of_every_supported_release(release: str) -> None:
    """By keyword, each known and none missing. 0.5.3 shows that the table can tell: it is why 0.6 is the oldest."""
    unknown, missing = set[str](), set[str]()
    for wrapper, method, given in recorded_calls():
        names = SIGNATURES[release][wrapper][method]
        required, optional = (set(names[kind].split()) for kind in ("required", "optional"))
        unknown |= given - required - optional
        missing |= required - given
    assert (unknown, missing) == ({"o_data_type"} if release == "0.5.3" else set(), set())


def test_the_table_spans_the_supported_releases() -> None:
    assert {"0.6.6", "0.7.4"} <= set(SIGNATURES)
    methods = {(wrapper, method) for wrapper, method, _ in recorded_calls()}
    assert len(methods) == 6
