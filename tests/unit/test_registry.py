"""Plugins through real entry points: found without being imported, broken ones reported, never fatal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvproof.attention import AttentionBackend, BackendUnavailable, CacheSpec, Capabilities, UnsupportedSpec
from kvproof.attention.reference import ReferenceAttention
from kvproof.backend.registry import BrokenPlugin, Group, UnknownPlugin, load, plugins
from kvproof.backend.selection import require_known, select, survey

MODULE = """
from kvproof.attention import BackendUnavailable
from kvproof.attention.reference import ReferenceAttention

class Mine(ReferenceAttention):
    name = "mine"
    priority = 99

class Absent(Mine):
    @classmethod
    def probe(cls):
        raise BackendUnavailable("absent", "no such accelerator here", "plug one in")
"""


def spec(**changes: object) -> CacheSpec:
    fields = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_size": 8, "dtype": "float32", "num_blocks": 4,
              "block_size": 2}  # fmt: skip
    return CacheSpec(**(fields | changes))


def install(folder: Path, package: str, entries: dict[str, str], module: str = MODULE) -> None:
    """A distribution as pip would leave it."""
    folder.mkdir(exist_ok=True)
    (folder / f"{package}.py").write_text(module)
    info = folder / f"{package}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    lines = [f"{name} = {target}" for name, target in entries.items()]
    (info / "entry_points.txt").write_text("[kvproof.attention_backends]\n" + "\n".join(lines) + "\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_own_plugins_are_registered() -> None:
    assert {"reference", "torch"} <= set(plugins(Group.ATTENTION))
    assert "llama" in plugins(Group.RUNNER)
    assert "lru" in plugins(Group.POLICY)
    assert load(Group.ATTENTION, "reference") is ReferenceAttention


def test_listing_imports_nothing(site: Path) -> None:
    install(site, "plug_lazy", {"lazy": "plug_lazy:Mine"})
    assert plugins(Group.ATTENTION)["lazy"].origin == "plug_lazy 1.2"
    assert "plug_lazy" not in sys.modules


def test_a_plugin_with_the_highest_priority_wins_auto(site: Path) -> None:
    assert select("auto", spec()).name == "torch"
    install(site, "plug_mine", {"mine": "plug_mine:Mine"})
    assert select("auto", spec()).name == "mine"


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(UnknownPlugin, match=r"unknown attention backend 'nope', known are: .*reference.*torch"):
        require_known("nope")
    require_known("auto")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("plug_bad:Missing", "AttributeError"),
        ("plug_gone:Mine", "ModuleNotFoundError"),
        ("plug_bad:NOT_A_BACKEND", "not a subclass of AttentionBackend"),
        ("plug_raises:Mine", "RuntimeError: broken build"),
        ("plug_bad:Unfinished", "lacks _attend, capabilities"),
    ],
)
def test_a_broken_plugin_is_reported_and_harms_no_other(site: Path, entry: str, reason: str) -> None:
    install(
        site,
        "plug_bad",
        {"bad": entry},
        "from kvproof.attention import AttentionBackend as Base\nNOT_A_BACKEND = 3\nclass Unfinished(Base): pass\n",
    )
    (site / "plug_raises.py").write_text("raise RuntimeError('broken build\\nwith details')\n")
    verdict = next(v for v in survey() if v.plugin.name == "bad")
    assert verdict.backend is None
    assert reason in verdict.reason
    assert "\n" not in verdict.reason
    assert select("auto", spec()).name == "torch"
    with pytest.raises(BrokenPlugin, match=reason):
        select("bad", spec())


def test_a_probe_that_raises_anything_is_a_reason(site: Path) -> None:
    module = MODULE + "\nclass Probing(Mine):\n    @classmethod\n    def probe(cls):\n        import no_such_kernels\n"
    install(site, "plug_probing", {"probing": "plug_probing:Probing"}, module)
    verdict = next(v for v in survey() if v.plugin.name == "probing")
    assert (verdict.backend, verdict.reason) == (None, "broken: ModuleNotFoundError: No module named 'no_such_kernels'")
    assert select("auto", spec()).name == "torch"


def test_one_name_of_two_packages_is_neither(site: Path) -> None:
    install(site, "plug_one", {"torch": "plug_one:Mine"})
    with pytest.raises(BrokenPlugin, match=r"'torch' is registered by more than one package: .*plug_one 1.2"):
        select("torch", spec())


def test_unavailable_backends_say_why(site: Path) -> None:
    install(site, "plug_absent", {"absent": "plug_absent:Absent"})
    verdict = next(v for v in survey() if v.plugin.name == "absent")
    assert verdict.backend is None
    assert verdict.reason == "the absent backend is not available: no such accelerator here; plug one in"
    with pytest.raises(BackendUnavailable, match="plug one in"):
        select("absent", spec())


def test_what_a_backend_lacks_names_those_that_have_it() -> None:
    with pytest.raises(UnsupportedSpec, match=r"float64.*backends that support this cache: reference"):
        select("torch", spec(dtype="float64"))


def test_the_reference_is_never_chosen_unasked() -> None:
    with pytest.raises(BackendUnavailable, match="reference: only when named"):
        select("auto", spec(dtype="float64"))
    assert issubclass(select("reference", spec(dtype="float64")), AttentionBackend)
    assert isinstance(ReferenceAttention.capabilities(), Capabilities)
