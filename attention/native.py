"""C compiled for this very processor when it is first needed.

A library is kept in the user's cache folder under a name that stands for all that it was made from: source, compiler,
flags, processor. Its threads are those of the OpenMP library that PyTorch has loaded: a second one would bring threads
of its own to the same cores. Such threads do not survive a fork, so a forked child has one.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import torch

HEADERS = tuple(Path(__file__).with_name(name) for name in ("paged.h", "tiles.h", "vectors.h"))
FLAGS = ("-O3", "-march=native", "-fPIC", "-std=gnu11", "-fno-math-errno", f"-I{HEADERS[0].parent}")
DTYPES = ("float32", "bfloat16", "float16")
"""Types of elements, in the order of the header's numbers for them."""

_process = os.getpid()


def num_threads() -> int:
    """How many threads a library may use now."""
    return torch.get_num_threads() if os.getpid() == _process else 1


def switched_off() -> bool:
    """Whether the environment says to do without compiled kernels."""
    return os.environ.get("KVPROOF_NO_KERNEL") == "1"


def built(source: Path, *included: Path) -> Path:
    """The library made from a C file, which may include `HEADERS` and those beside it that are named.

    Raises `OSError` or `SubprocessError`, which say in one line why there is none.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise OSError("there is no C compiler, neither cc nor gcc")
    text, openmp = [file.read_bytes() for file in (source, *included, *HEADERS)], _openmp()
    version = _call([compiler, "--version"])
    key = hashlib.sha256(repr((text, compiler, version, FLAGS, openmp, _processor())).encode()).hexdigest()
    folder = _own_folder()
    library = folder / f"{source.stem}-{key[:32]}.so"
    if not _is_intact(library):
        # Made aside and renamed: a process that builds the same at the same time never sees half of it.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            compiled, linked = Path(scratch, "made.o"), Path(scratch, "made.so")
            _call([compiler, *FLAGS, *(["-fopenmp"] if openmp else []), "-c", str(source), "-o", str(compiled)])
            _call([compiler, "-shared", "-o", str(linked), str(compiled), *([openmp] if openmp else []), "-lm"])
            content = linked.read_bytes()
            linked.write_bytes(content + hashlib.sha256(content).digest())
            linked.replace(library)
    return library


def loaded(source: Path, *included: Path) -> ctypes.CDLL | None:
    """The library of `built`; None where it can't be had, or where `KVPROOF_NO_KERNEL=1` says to do without.

    It tells nothing: the decode kernel, which fails for the same reason, does.
    """
    if switched_off():
        return None
    try:
        return ctypes.CDLL(str(built(source, *included)))
    except (OSError, subprocess.SubprocessError):
        return None


def _is_intact(library: Path) -> bool:
    """Whether the file is there and ends in the digest of the rest: a damaged one could crash the process."""
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _own_folder() -> Path:
    """The cache folder. Raises `OSError` if others could put a library there."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvproof")
    if not folder.is_absolute():  # nobody's home, or a variable that the specification says to ignore
        raise OSError(f"there is no folder to keep it in: {folder} is relative")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise OSError(f"{folder} must be a folder that only its owner, user {os.getuid()}, can enter (mode 700)")
    return folder


def _openmp() -> str | None:
    """The file of the GNU OpenMP library that PyTorch has loaded, if it has."""
    try:
        mapped = Path("/proc/self/maps").read_text().split()
    except OSError:
        return None
    found = [path for path in mapped if Path(path).name.startswith("libgomp")]
    return max(found, key=lambda path: "torch" in path, default=None)  # another package may have brought one too


def _processor() -> str:
    """What -march=native looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return os.uname().machine
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), os.uname().machine)


def _call(command: list[str]) -> str:
    english = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=120, env=english, check=False
    )
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), f"status {done.returncode}")
        raise OSError(f"{command[0]} failed: {reason}")
    return done.stdout
