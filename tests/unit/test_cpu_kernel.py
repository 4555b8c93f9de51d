"""How the decode kernel is built, kept, refused and driven; and the matrix unit's is driven alike.

What they compute is tested with the backends.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import shutil
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvproof.attention import BatchPlan, CacheSpec, NotPlanned, cpu_kernel, native, tiled_kernel
from kvproof.attention.tiled_kernel import TiledKernel
from kvproof.attention.torch_paged import TorchAttention

SMALL = "int answer(void) { return 42; }"


@pytest.fixture(autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode kernel is meant, also where there is a matrix unit, unless a test says `both`."""
    if getattr(request, "param", "decode") == "decode":
        monkeypatch.setattr(TiledKernel, "create", lambda *_: None)
    elif tiled_kernel.load() is None:
        pytest.skip("no matrix unit, or no compiler")


both = pytest.mark.parametrize("kernel", ["decode", "tiles"], indirect=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, in which nothing has been looked for yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KVPROOF_NO_KERNEL", raising=False)
    cpu_kernel.load.cache_clear()
    yield tmp_path / "kvproof"
    cpu_kernel.load.cache_clear()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source that compiles in no time."""
    if not (shutil.which("cc") or shutil.which("gcc")):
        pytest.skip("no C compiler")
    path = tmp_path / "small.c"
    path.write_text(SMALL)
    monkeypatch.setattr(cpu_kernel, "SOURCE", path)
    return path


def make_backend(num_layers: int = 1) -> TorchAttention:
    """32 decodes of 40 to 600 tokens, planned, over random keys and values."""
    seq_lens = [random.Random(row).randint(40, 600) for row in range(32)]
    counts = [-(-length // 16) for length in seq_lens]
    blocks = iter(random.Random(0).sample(range(sum(counts)), sum(counts)))
    spec = CacheSpec(
        num_layers=num_layers,
        num_heads=6,
        num_kv_heads=2,
        head_size=32,
        dtype="bfloat16",
        num_blocks=sum(counts),
        block_size=16,
    )
    backend = TorchAttention(spec)
    backend.cache.copy_(torch.randn(spec.cache_shape, generator=torch.Generator().manual_seed(0)))
    tables = [array("i", [next(blocks) for _ in range(count)]) for count in counts]
    backend.plan(BatchPlan.build(tables, seq_lens, [1] * 32, 16))
    return backend


def tokens(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    fused = torch.randn(32, 6 + 2 + 2, 32, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return fused[:, :6], fused[:, 6:8], fused[:, 8:]


@pytest.mark.usefixtures("source")
def test_a_library_is_built_once_for_one_user_alone(folder: Path, source: Path) -> None:
    library = native.built(cpu_kernel.SOURCE)
    built = library.stat()
    assert ctypes.CDLL(str(library)).answer() == 42
    assert library.parent == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert native.built(cpu_kernel.SOURCE) == library
    assert (library.stat().st_ino, library.stat().st_mtime_ns) == (built.st_ino, built.st_mtime_ns)
    source.write_text(SMALL.replace("42", "43"))
    other = native.built(cpu_kernel.SOURCE)
    assert ctypes.CDLL(str(other)).answer() == 43
    assert sorted(folder.iterdir()) == sorted([library, other])


@pytest.mark.usefixtures("folder", "source")
@pytest.mark.parametrize("damage", [b"", b"\x7fELF", "half", "zeros inside"])
def test_a_damaged_library_is_built_again(damage: bytes | str) -> None:
    library = native.built(cpu_kernel.SOURCE)
    content = library.read_bytes()
    if damage == "half":
        damage = content[: len(content) // 2]
    if damage == "zeros inside":
        damage = content[:4096] + bytes(512) + content[4608:]
    assert isinstance(damage, bytes)
    library.write_bytes(damage)
    assert native.built(cpu_kernel.SOURCE) == library
    assert library.read_bytes() != damage
    assert ctypes.CDLL(str(library)).answer() == 42


@pytest.mark.usefixtures("source")
def test_two_processes_that_build_at_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler dawdles, so that both are at it before either is done."""
    (tmp_path / "cc").write_text(f'#!/bin/sh\nsleep 0.3\nexec {shutil.which("cc") or shutil.which("gcc")} "$@"\n')
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    context = multiprocessing.get_context("fork")
    start, answers = context.Barrier(2), context.SimpleQueue()

    def build() -> None:
        start.wait()
        library = native.built(cpu_kernel.SOURCE)
        answers.put((library, native._is_intact(library), ctypes.CDLL(str(library)).answer()))

    processes = [context.Process(target=build) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    first, second = answers.get(), answers.get()
    assert first == second
    assert first[1:] == (True, 42)
    assert list(folder.iterdir()) == [first[0]]


def no_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PATH", "")
    return "there is no C compiler, neither cc nor gcc"


def broken_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder.parent / "cc").write_text("#!/bin/sh\necho 'cc: fatal error: no room' >&2\nexit 4\n")
    (folder.parent / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder.parent))
    return f"{folder.parent}/cc failed: cc: fatal error: no room"


def compiler_that_makes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder.parent / "cc").write_text("#!/bin/sh\n")
    (folder.parent / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder.parent))
    return "No such file or directory"


def broken_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder.parent / "broken.c").write_text("#error broken")
    monkeypatch.setattr(cpu_kernel, "SOURCE", folder.parent / "broken.c")
    return "error: #error broken"


def folder_of_everybody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.mkdir()
    folder.chmod(0o777)
    return f"{folder} must be a folder that only its owner, user {os.getuid()}, can enter (mode 700)"


def folder_that_is_a_link(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to("elsewhere")
    return f"{folder} must be a folder that only its owner"


def folder_that_is_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.write_text("")
    return f"File exists: '{folder}'"


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    "obstacle",
    [
        no_compiler,
        broken_compiler,
        compiler_that_makes_nothing,
        broken_source,
        folder_of_everybody,
        folder_that_is_a_link,
        folder_that_is_a_file,
    ],
)
def test_without_the_kernel_attention_says_so_and_works(
    obstacle: object, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(obstacle)
    reason = obstacle(folder, monkeypatch)
    backend = make_backend()
    assert backend._kernel is None
    assert make_backend()._kernel is None
    (record,) = caplog.records
    assert record.name == "kvproof.attention.cpu_kernel"
    assert record.levelname == "WARNING"
    message = record.getMessage()
    assert message.startswith("decode attention runs without its compiled kernel, several times slower: ")
    assert reason in message
    assert "\n" not in message
    assert backend.run(0, *tokens()).isfinite().all()


@both
def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("KVPROOF_NO_KERNEL", "1")
    assert make_backend()._kernel is None
    assert not caplog.records


def needs_kernel() -> TorchAttention:
    backend = make_backend()
    if backend._kernel is None:
        pytest.skip("no kernel on this machine")
    return backend


@both
def test_slices_of_fused_projections_are_read_where_they_lie() -> None:
    backend = needs_kernel()
    q, k, v = tokens()
    apart = backend.run(0, q, k, v)
    written = backend.cache.clone()
    backend.cache.zero_()
    backend.cache.copy_(make_backend().cache)
    assert torch.equal(backend.run(0, q.contiguous(), k.contiguous(), v.contiguous()), apart)
    assert torch.equal(backend.cache, written)
    for strided in (torch.stack((q, q), dim=-1)[..., 0], q.transpose(1, 2).contiguous().transpose(1, 2)):
        assert torch.equal(backend.run(0, strided, k, v), apart)


@both
def test_threads_change_no_bit_and_come_from_the_one_openmp_library() -> None:
    def libraries() -> set[str]:
        maps = Path("/proc/self/maps").read_text().split()
        return {path for path in maps if "libgomp" in path or "libomp" in path}

    torch.ones(1000, 1000).sum()
    before, threads = libraries(), torch.get_num_threads()
    backend = needs_kernel()
    assert libraries() == before
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results += [backend.run(0, *tokens()) for _ in range(3)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


@both
def test_a_forked_child_computes_on_one_thread() -> None:
    backend = needs_kernel()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    expected = backend.run(0, *tokens())
    child = os.fork()
    if child == 0:
        os._exit(0 if native.num_threads() == 1 and torch.equal(backend._attend(0, tokens()[0]), expected) else 1)
    _, status = os.waitpid(child, 0)
    torch.set_num_threads(threads)
    assert status == 0
    assert native.num_threads() == threads


def test_a_longer_batch_gets_more_room_for_its_sums() -> None:
    whole, fresh = needs_kernel(), TorchAttention(make_backend().spec)
    assert whole._kernel is not None
    assert fresh._kernel is not None
    fresh.cache.copy_(whole.cache)
    q, k, v = tokens()
    right, plan = whole.run(0, q, k, v), whole.batch
    table = array("i", plan.kv_indices[: plan.kv_indptr[1]].tolist())
    fresh.plan(BatchPlan.build([table], [int(plan.seq_lens[0])], [1], 16))
    assert torch.equal(fresh.run(0, q[:1], k[:1], v[:1]), right[:1])
    fresh.plan(plan)
    assert fresh._kernel._planned is not None
    assert whole._kernel._planned is not None
    assert fresh._kernel._planned.plan.num_spans == whole._kernel._planned.plan.num_spans
    assert torch.equal(fresh.run(0, q, k, v), right)


def planned() -> tuple[TorchAttention, BatchPlan]:
    shape = {"num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_size": 32}
    spec = CacheSpec(**shape, num_blocks=8, block_size=4, dtype="bfloat16")
    backend = TorchAttention(spec)
    batch = BatchPlan.build([array("i", [3, 5])], [6], [1], 4)
    backend.plan(batch)
    return backend, batch


def one_token() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 32, generator=generator).bfloat16() for heads in (4, 2, 2))
    return q, k, v


@both
def test_what_a_caller_does_to_its_arrays_later_decides_nothing() -> None:
    """Else memory outside the cache would be written and read."""
    backend, batch = planned()
    expected = backend.run(0, *one_token()).clone()
    for name in ("slot_mapping", "kv_indices", "kv_indptr", "qo_indptr", "positions", "seq_lens"):
        getattr(batch, name).fill_(2**30)
    assert torch.equal(backend.run(0, *one_token()), expected)


@both
def test_the_cache_is_found_where_it_has_moved_to() -> None:
    backend, _ = planned()
    expected = backend.run(0, *one_token()).clone()
    backend.cache.zero_()
    backend.cache.share_memory_()
    assert torch.equal(backend.run(0, *one_token()), expected)
    assert backend.cache.any()


@both
def test_another_default_device_changes_nothing() -> None:
    expected = planned()[0].run(0, *one_token()).clone()
    inputs = one_token()
    torch.set_default_device("meta")
    try:
        backend, _ = planned()
        result = backend.run(0, *inputs)
    finally:
        torch.set_default_device("cpu")
    assert torch.equal(result, expected)


@both
def test_a_step_that_is_not_the_planned_one_reads_nothing() -> None:
    kernel = planned()[0]._kernel
    assert kernel is not None
    q, k, v = (x.repeat(2, 1, 1) for x in one_token())
    with pytest.raises(NotPlanned, match="there are 2 tokens, and the last plan was of another step"):
        kernel.attend(0, q)
    with pytest.raises(NotPlanned):
        kernel.write(0, k, v)


@both
def test_threads_take_turns() -> None:
    backend = needs_kernel()
    kernel, expected = backend._kernel, backend.run(0, *tokens())
    assert kernel is not None
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: kernel.attend(0, tokens()[0]), range(200)))
    assert all(torch.equal(result, expected) for result in results)


def test_the_soft_cap_is_good_to_a_few_units() -> None:
    """A row of one token has its capped score for log-sum-exp: here the hyperbolic tangent of the query."""
    spec = CacheSpec(
        num_layers=1,
        num_heads=4096,
        num_kv_heads=1,
        head_size=1,
        dtype="float32",
        num_blocks=1,
        block_size=1,
        scale=1.0,
        soft_cap=1.0,
    )
    backend = TorchAttention(spec)
    if backend._kernel is None:
        pytest.skip("no kernel on this machine")
    backend.plan(BatchPlan.build([array("i", [0])], [1], [1], 1))
    x = torch.cat((torch.logspace(-7, 1.5, 2047), torch.tensor([0.0])))
    q, one = torch.cat((x, -x)).view(1, -1, 1), torch.ones(1, 1, 1)
    backend.run(0, q, one, one)
    lse = backend.attend_lse(0, q)[1]
    torch.testing.assert_close(lse.double(), torch.tanh(q.double())[..., 0], rtol=4 * 2**-24, atol=0)


@pytest.mark.usefixtures("folder")
def test_without_a_compiler_there_are_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert tiled_kernel.load.__wrapped__() is None


def test_a_relative_cache_folder_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    with pytest.raises(OSError, match="here/kvproof is relative"):
        native._own_folder()
    assert list(tmp_path.iterdir()) == []
