"""Which sequences compute which tokens in the next step: continuous batching with chunked prefill and preemption."""

from __future__ import annotations

from bisect import insort

from kvproof.allocator import Admission, BlockManager, Namespace, require_int
from kvproof.backend.request import Request

Prefix = tuple[Namespace, bytes]


class Scheduler:
    """Fills each step with at most `max_num_batched_tokens` tokens of at most `max_num_seqs` running requests.

    Decodes come first, then the prompts of running requests, chunk by chunk, then new admissions. A request's whole
    prompt gets its blocks at admission, so only a decode can ever lack one. It then takes them from the request that
    runs last by `Request.key`, which is preempted: its blocks are released and it waits to be computed again, with
    whatever the prefix cache still has. The first request is never preempted for another, so there is progress.

    A request whose next block is being computed, by one that comes before it, waits for that block: the step after, it
    finds it in the prefix cache. Of a burst of requests with one beginning, the first computes it for all. Those behind
    may go first meanwhile, but not onto its seat. As it waits only for those before it, each of which computes its
    prompt once and again for each preemption, there is an end to waiting.
    """

    def __init__(self, manager: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        require_int("max_num_seqs", max_num_seqs, 1, 2**20)
        # A decode can't wait for the next step, so the budget must hold one for every running sequence.
        require_int("max_num_batched_tokens", max_num_batched_tokens, max_num_seqs, 2**24)
        self.manager = manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Request] = []  # both lists are sorted by key
        self.running: list[Request] = []
        self.num_preemptions = 0
        # Counted once a request, at its first admission: a preempted one that finds its own blocks again saved nothing.
        self.num_prompt_tokens = 0
        self.num_prefix_hit_tokens = 0

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda r: r.key)

    def remove(self, request: Request) -> None:
        """Forget a request that finished or was aborted, and release its blocks if it holds any."""
        if request in self.running:
            self.running.remove(request)
            self.manager.release(request.seq)
        else:
            self.waiting.remove(request)

    def schedule(self) -> list[tuple[Request, int]]:
        """Who computes how many tokens next, single tokens first; every slot they write is reserved.

        Empty when nothing can run: nobody is left, or the waiting need blocks that no running request holds.
        """
        short_before = self.num_preemptions
        work = self._decodes()
        budget = self.max_num_batched_tokens - len(work)
        for request in self.running:
            remaining = _remaining(request)
            if remaining > 1 and budget > 0:
                work.append((request, min(remaining, budget)))
                budget -= work[-1][1]
        if self.num_preemptions == short_before:  # else blocks are short, and admitting would only preempt again
            work += self._admissions(budget, work)
        return sorted(work, key=lambda item: item[1] > 1)

    def _decodes(self) -> list[tuple[Request, int]]:
        work = []
        i = 0
        while i < len(self.running):
            request = self.running[i]
            if _remaining(request) > 1:
                i += 1
            elif self.manager.reserve(request.seq):
                work.append((request, 1))
                i += 1
            else:
                # The last by key has no work in this step yet, so there is nothing to take back; it may be `request`.
                self._preempt(self.running[-1])
        return work

    def _admissions(self, budget: int, running: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        work: list[tuple[Request, int]] = []
        candidates = self.waiting[: self.max_num_seqs - len(self.running)] if budget > 0 else []
        computing = self._prefixes_of(running) if candidates else {}
        for request in candidates:
            if computing and computing.get(self._missing_prefix(request), request.key) < request.key:
                continue
            if self.manager.admit(request.seq) is not Admission.NOW:
                break  # first come, first served: nobody overtakes it
            self.waiting.remove(request)
            insort(self.running, request, key=lambda r: r.key)
            if request.num_cached_tokens is None:
                request.num_cached_tokens = request.seq.num_cached
                self.num_prompt_tokens += request.num_prompt_tokens
                self.num_prefix_hit_tokens += request.num_cached_tokens
            work.append((request, min(_remaining(request), budget)))
            budget -= work[-1][1]
            if budget == 0:
                break
            computing |= self._prefixes_of(work[-1:])
        return work

    def _prefixes_of(self, work: list[tuple[Request, int]]) -> dict[Prefix | None, tuple[int, int]]:
        """The first block that each prefill of this step fills, as the prefix that ends with it, and whose it is."""
        found: dict[Prefix | None, tuple[int, int]] = {}
        size = self.manager.block_size
        for request, n in work if self.manager.prefix_caching else ():
            end = request.seq.num_computed // size * size + size
            if n > 1 and end <= request.seq.num_computed + n:
                found.setdefault(_prefix(request, end), request.key)
        return found

    def _missing_prefix(self, request: Request) -> Prefix | None:
        """Its shortest prefix of whole blocks that the cache does not have; None when it could not find that either."""
        end = self.manager.match(request.seq) + self.manager.block_size
        return _prefix(request, end) if end < len(request.seq) else None

    def _preempt(self, request: Request) -> None:
        self.remove(request)
        self.add(request)
        request.num_preemptions += 1
        self.num_preemptions += 1


def _prefix(request: Request, end: int) -> Prefix:
    return request.seq.namespace, request.seq.tokens(0, end).tobytes()


def _remaining(request: Request) -> int:
    """Known tokens that are not computed: 1 while decoding, more during prefill."""
    return len(request.seq) - request.seq.num_computed
