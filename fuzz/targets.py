"""What `kvproof fuzz` can run: the machines, by the names that the command line has for them.

Modules are named and not imported: an attention machine needs torch, which a user of the allocator may not have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True)
class MachineEntry:
    """A machine at `path`, "module:Class", and the code it is there to exercise: files of `package`, as patterns."""

    name: str
    path: str
    files: tuple[str, ...]
    package: str = "kvproof.allocator"

    @property
    def needs_torch(self) -> bool:
        return self.package != "kvproof.allocator"


MACHINES = {
    entry.name: entry
    for entry in (
        MachineEntry("pool", "kvproof.fuzz.machines.pool:PoolMachine", ("allocator/pool.py", "allocator/policy.py")),
        MachineEntry("index", "kvproof.fuzz.machines.index:IndexMachine", ("allocator/index.py",)),
        MachineEntry("manager", "kvproof.fuzz.machines.manager:ManagerMachine", ("allocator/*.py",)),
        MachineEntry("compat", "kvproof.fuzz.machines.compat:CompatMachine", ("allocator/compat.py",)),
        MachineEntry("batch", "kvproof.fuzz.machines.batch:BatchMachine", ("attention/plan.py",), "kvproof.attention"),
        MachineEntry(
            "attention", "kvproof.fuzz.machines.attention:AttentionMachine",
            ("attention/plan.py", "attention/torch_paged.py"), "kvproof.attention",
        ),
        MachineEntry(
            "engine", "kvproof.fuzz.machines.engine:EngineMachine",
            ("backend/engine.py", "backend/scheduler.py", "backend/engine_backend.py"), "kvproof.backend",
        ),
    )
}  # fmt: skip

TARGETS = {
    "allocator": ("pool", "index", "manager", "compat"),
    **{name: (name,) for name in MACHINES},
    "all": tuple(MACHINES),
}
"""The machines of each target."""

EXPLORED = {"allocator", "manager", "all"}
"""The targets that begin with the explorer, which drives a `BlockManager`."""

FOREIGN = "target"
"""The machine that drives code of others; which one it is, that code decides."""

NOT_FUZZED = ("allocator/replay.py", "allocator/traces.py")
"""Tools of the allocator package that read recorded traces: no machine is there to run them."""


def code_under_test(machines: Iterable[str]) -> tuple[list[str], list[str]]:
    """Patterns of the files that `machines` exercise, and of those that the patterns take in wrongly."""
    entries = [MACHINES[name] for name in machines]
    include = sorted({f"*/{pattern}" for entry in entries for pattern in entry.files})
    foreign = () if any(entry.name == "compat" for entry in entries) else MACHINES["compat"].files
    return include, [f"*/{name}" for name in (*NOT_FUZZED, *foreign)]


def load(path: str) -> Any:
    """The object at "module:name". Raises `ImportError` or `AttributeError`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
