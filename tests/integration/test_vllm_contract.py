"""The record of what we touch of vLLM: complete, as installed, and refused where it is not known.

Sources are read, not imported, so this needs no more than the folder of a vLLM: that of KVPROOF_VLLM_PYTHON.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

from kvproof.backend.integrations.vllm import contract, surface
from kvproof.backend.integrations.vllm.errors import UnsupportedVllm

WHERE = "import importlib.util as i; print(i.find_spec('vllm').submodule_search_locations[0])"
MODULES = [Path(*module.split(".")[1:]) for module in surface.NAMES]
READ = sorted(
    {"_version.py", *surface.ASKERS, *(name.split(":")[0] for name in (*surface.SIGNATURES, *surface.FIELDS))}
)
OURS = Path(contract.__file__).parent


@pytest.fixture(scope="module")
def installed(vllm_python: str) -> Path:
    found = subprocess.run([vllm_python, "-c", WHERE], capture_output=True, text=True, check=True)
    return Path(found.stdout.strip())


@pytest.fixture
def copy(installed: Path, tmp_path: Path) -> Path:
    modules = [module / "__init__.py" if (installed / module).is_dir() else f"{module}.py" for module in MODULES]
    for file in [*READ, *modules]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed / file, tmp_path / file)
    return tmp_path


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_three_versions_are_on_record_and_nothing_is_missing_from_them() -> None:
    record = contract.recorded()
    assert list(record) == ["0.30", "0.31", "0.32"]
    missing = [(version, name) for version, touched in record.items() for name in touched if touched[name] == "missing"]
    assert missing == [("0.30", "vllm.v1.core.kv_cache_utils:to_event_extra_keys")]  # `seam` has a stand-in


def test_one_module_imports_vllm_and_it_takes_what_the_contract_names() -> None:
    taken = set()
    for file in OURS.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if file.name != "seam.py":
                assert not [name for name in modules if name.split(".")[0] == "vllm"], (
                    f"{file.name}, line {node.lineno}"
                )
            if isinstance(node, ast.ImportFrom) and (node.module or "").endswith(".vllm.seam"):
                taken |= {alias.name for alias in node.names}
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "seam":
                taken.add(node.attr)
    assert sorted(taken) == sorted(name for names in surface.NAMES.values() for name in names)


def test_the_installed_version_is_as_recorded(installed: Path) -> None:
    assert contract.minor(contract.version_of(installed)) in contract.recorded()
    assert contract.drift(installed) == []


def test_what_has_moved_is_named(copy: Path) -> None:
    edit(copy / "v1/core/kv_cache_manager.py", "has_scheduled_reqs: bool = True", "nobody_runs: bool = False")
    edit(copy / "v1/request.py", "self.cache_salt: str | None = cache_salt", "self.salt = cache_salt")
    edit(copy / "v1/core/sched/scheduler.py", "kv_cache_manager.new_step_starts()", "kv_cache_manager.begin_step(1)")
    edit(copy / "v1/core/block_pool.py", "def touch(", "def pat(")
    moved = contract.drift(copy)
    manager = "v1/core/kv_cache_manager.py:KVCacheManager.allocate_slots"
    assert moved[0].startswith(f"{manager} was (self, request, num_new_tokens")
    assert "has_scheduled_reqs=True" in moved[0].split(" and is ")[0]
    assert "nobody_runs=False" in moved[0].split(" and is ")[1]
    assert moved[1].startswith("v1/core/block_pool.py:BlockPool.touch was (self, blocks)")
    assert moved[1].endswith(" and is missing")
    assert moved[2:] == [
        "v1/request.py:Request.cache_salt was there and is missing",
        "asked: new_step_starts was v1/core/sched/scheduler.py and is nothing",
        "asked: begin_step was nothing and is v1/core/sched/scheduler.py",
    ]


def test_what_has_moved_below_the_attention_is_named(copy: Path) -> None:
    edit(copy / "v1/attention/backend.py", "    block_table_tensor: torch.Tensor\n", "    block_tables: torch.Tensor\n")
    edit(copy / "v1/attention/backend.py", "attn_metadata: T,\n        output: torch.Tensor,", "output: torch.Tensor,")
    edit(
        copy / "v1/attention/backend.py",
        "    def update_block_table(",
        "    @abstractmethod\n    def update_block_table(",
    )
    edit(copy / "v1/attention/backends/registry.py", "CUSTOM = ", "THIRD_PARTY = ")
    edit(
        copy / "model_executor/layers/attention/__init__.py", "attention import Attention\n", "attention import Layer\n"
    )
    edit(copy / "model_executor/layers/attention/attention.py", "self.kv_cache", "self.cache")
    moved = contract.drift(copy)
    backend, builder = "v1/attention/backend.py", "v1/attention/backend.py:AttentionMetadataBuilder"
    assert moved[0] == "vllm.model_executor.layers.attention:Attention was there and is missing"
    assert moved[1].startswith(f"{backend}:AttentionImpl.forward was (self, layer, query, key, value, kv_cache, attn_m")
    assert " and is (self, layer, query, key, value, kv_cache, output, output_scale=None" in moved[1]
    assert moved[2:] == [
        f"{backend}:CommonAttentionMetadata.block_table_tensor was there and is missing",
        "v1/attention/backends/registry.py:AttentionBackendEnum.CUSTOM was there and is missing",
        "model_executor/layers/attention/attention.py:Attention.kv_cache was there and is missing",
        f"abstract in {builder} was __init__, build and is __init__, build, update_block_table",
    ]


def test_our_manager_answers_all_that_is_asked() -> None:
    sources = (OURS / "manager.py").read_text(), (OURS / "views.py").read_text()
    nodes = [node for source in sources for node in ast.parse(source).body]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    answers = {name: set(contract._fields(found)) for name, found in classes.items()}
    parts = {"block_pool": "PoolView", "coordinator": "Coordinator", "empty_kv_cache_blocks": "Blocks"}
    for version, touched in contract.recorded().items():
        asked = [name.removeprefix("asked: ") for name in touched if name.startswith("asked: ")]
        assert len(asked) > 25
        for name in asked:
            first, _, second = name.partition(".")
            answered = second in answers[parts[first]] if second else first in answers["KVCacheManager"]
            assert answered != (name in surface.UNREACHED), f"vLLM {version} asks {name}"


def test_other_versions_are_refused_unless_forced(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contract.require_known("0.31.4+cpu")
    monkeypatch.delenv(contract.FORCE, raising=False)
    with pytest.raises(UnsupportedVllm) as refused:
        contract.require_known("0.33.0")
    assert str(refused.value) == (
        "vLLM 0.33.0 is not among the tested versions 0.30, 0.31, 0.32; KVPROOF_VLLM_UNTESTED=1 tries it anyway"
    )
    monkeypatch.setenv(contract.FORCE, "1")
    monkeypatch.setattr(contract, "installed", lambda: copy)
    with pytest.warns(RuntimeWarning, match="vLLM 0.33.0 is untested, .*: nothing that we know of has moved"):
        contract.require_known("0.33.0")
    edit(copy / "v1/core/block_pool.py", "def touch(", "def pat(")
    contract._parse.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"BlockPool\.touch was \(self, blocks\) and is missing"):
        contract.require_known("0.33.0")
