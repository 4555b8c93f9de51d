------------------------------- MODULE PagedKV -------------------------------
\* The design: the contract of PrivateKV kept with blocks that sequences share. One action per operation of
\* `BlockManager`, atomic as in the code, down to which block is handed out next. Invariants.tla says what holds.
\*
\* Identity. A published block's content is a node <<parent, tokens>>, where the parent is a node again or, for a
\* first block, the namespace. In the code a parent is a number that is never used again; here it is a value that
\* can't mean anything else. At most one live node has this value, and it has none but live ancestors (I3, I4): so
\* no counter is needed, and equal situations are equal states.
EXTENDS Integers, Sequences, FiniteSets, TLC

CONSTANTS
    NumBlocks, BlockSize,
    Seqs, Namespaces, None,         \* model values: equal to nothing else
    Tokens, MaxPrompt, MaxLen,      \* what callers may ask for
    Limits, Ahead,                  \* of admission, and slots reserved ahead of the known tokens
    Merge,                          \* duplicates are merged, or kept beside each other
    Forks, Truncates, Pins, MaxFlights,
    Hash(_)                         \* of a namespace and a prefix; it may collide

VARIABLES
    seq,    \* of every sequence: None, or ns, tokens, computed, reserved, table, and step (see flights)
    pool,   \* refs:    of every block: its references
            \* content: of every block: its node, or None
            \* index:   of every live node: the blocks that carry it, oldest first
            \* free:    a stack of the unreferenced blocks without content, the next one to be taken last
            \* lru:     a queue of the cached blocks, the next one to be evicted first
            \* flights: of every step in flight, oldest first: the blocks to release when it retires;
            \*          seq[s].step is the place here of the last step with s in it, 0 when that has retired
    pins,   \* of every pin: the blocks it holds
    copies, \* orders not carried out yet: of every destination, its source
    mem     \* of every block and slot: the KV in it, which is the whole prefix it was computed from

vars == <<seq, pool, pins, copies, mem>>

Blocks == 0 .. NumBlocks - 1
Prompts == UNION {[1..n -> Tokens] : n \in 1..MaxPrompt}
Admitted == {s \in Seqs : seq[s] # None}

Range(q) == {q[i] : i \in DOMAIN q}
Last(q) == q[Len(q)]
Front(q) == SubSeq(q, 1, Len(q) - 1)
Reverse(q) == [i \in 1..Len(q) |-> q[Len(q) + 1 - i]]
Without(q, S) == LET Stays(x) == x \notin S IN SelectSeq(q, Stays)
The(S) == CHOOSE x \in S : TRUE
Min(a, b) == IF a < b THEN a ELSE b
Max(a, b) == IF a > b THEN a ELSE b
RECURSIVE Ascending(_)
Ascending(S) == IF S = {} THEN <<>> ELSE LET least == The({x \in S : \A y \in S : x <= y})
                                         IN <<least>> \o Ascending(S \ {least})

BlocksFor(n) == (n + BlockSize - 1) \div BlockSize
Slot(q, i) == <<q.table[BlocksFor(i)], (i - 1) % BlockSize>>            \* of position i, counted from 1
KV(q, i) == <<q.ns, SubSeq(q.tokens, 1, i)>>                            \* of position i
Chunk(q, i) == SubSeq(q.tokens, (i - 1) * BlockSize + 1, i * BlockSize) \* the tokens of table entry i

--------------------------------------------------------------------------------
\* The prefix index

RECURSIVE Root(_), Prefix(_), IsBelow(_, _)
Root(node) == IF node \in Namespaces THEN node ELSE Root(node[1])
Prefix(node) == IF node \in Namespaces THEN <<>> ELSE Prefix(node[1]) \o node[2]
IsBelow(node, top) == node = top \/ (node \notin Namespaces /\ IsBelow(node[1], top))

\* The live node of table entry i of q below parent, as a set of at most one. The hash only selects candidates.
Find(p, q, i, parent) ==
    LET Candidate(node) == Hash(<<Root(node), Prefix(node)>>) = Hash(KV(q, i * BlockSize))
    IN  {node \in DOMAIN p.index : Candidate(node) /\ node[1] = parent /\ node[2] = Chunk(q, i)}

\* The longest cached prefix from table entry i on, short of the last token.
RECURSIVE Match(_, _, _, _)
Match(p, q, i, parent) ==
    LET found == IF i * BlockSize < Len(q.tokens) THEN Find(p, q, i, parent) ELSE {}
    IN  IF found = {} THEN <<>> ELSE <<The(found)>> \o Match(p, q, i + 1, The(found))

Carrier(p, node) ==
    LET Owned(b) == p.refs[b] > 0
    IN  Head(SelectSeq(p.index[node], Owned) \o p.index[node])

--------------------------------------------------------------------------------
\* The pool: operators from a pool to the pool after it

NumFree(p) == Len(p.free) + Len(p.lru)

Share(p, blocks) ==  \* one reference more on each
    [p EXCEPT !.refs = [b \in Blocks |-> IF b \in Range(blocks) THEN @[b] + 1 ELSE @[b]],
              !.lru = Without(@, Range(blocks))]

RECURSIVE Give(_, _)
Give(p, blocks) ==  \* one reference less on each, in this order
    IF blocks = <<>> THEN p
    ELSE LET b == Head(blocks)
             list == IF p.refs[b] > 1 THEN "none" ELSE IF p.content[b] = None THEN "free" ELSE "lru"
         IN  Give([p EXCEPT !.refs[b] = @ - 1,
                            !.free = IF list = "free" THEN Append(@, b) ELSE @,
                            !.lru = IF list = "lru" THEN Append(@, b) ELSE @], Tail(blocks))

Drop(p, q, blocks) ==  \* q lets go of blocks; a step in flight may still use them
    IF q.step = 0 THEN Give(p, blocks) ELSE [p EXCEPT !.flights[q.step] = @ \o blocks]

Withdraw(p, b) ==  \* b loses its content, and when it was the last carrier, so do all descendants
    LET node == p.content[b]
        left == Without(p.index[node], {b})
        dead == IF left # <<>> THEN {} ELSE {n \in DOMAIN p.index : IsBelow(n, node)}
        orphans == UNION {Range(p.index[n]) : n \in dead} \ {b}
        Unreferenced(x) == p.refs[x] = 0
    IN  [p EXCEPT !.content = [x \in Blocks |-> IF x = b \/ x \in orphans THEN None ELSE @[x]],
                  !.index = [n \in DOMAIN @ \ dead |-> IF n = node THEN left ELSE @[n]],
                  !.free = @ \o SelectSeq(<<b>> \o Ascending(orphans), Unreferenced),
                  !.lru = Without(@, {b} \union orphans)]

RECURSIVE Take(_, _, _)
Take(p, table, n) ==  \* the pool, and the table with n blocks more; evicts when no block is without content
    IF n = 0 THEN <<p, table>>
    ELSE LET room == IF p.free = <<>> THEN Withdraw(p, Head(p.lru)) ELSE p
             b == Last(room.free)
         IN  Take([room EXCEPT !.free = Front(@), !.refs[b] = 1], Append(table, b), n - 1)

RECURSIVE Publish(_, _, _, _)
Publish(p, q, i, duplicates) ==  \* table entries i and up that are full; the pool, the table, the merged-away blocks
    LET b == q.table[i]
        parent == IF i = 1 THEN q.ns ELSE p.content[q.table[i - 1]]
        found == Find(p, q, i, parent)
        node == IF found = {} THEN <<parent, Chunk(q, i)>> ELSE The(found)
        keeper == Carrier(p, node)
        carriers == IF found = {} THEN <<>> ELSE p.index[node]
    IN  IF i * BlockSize > q.computed THEN <<p, q.table, duplicates>>
        ELSE IF found # {} /\ Merge
        THEN Publish(Share(p, <<keeper>>), [q EXCEPT !.table[i] = keeper], i + 1, Append(duplicates, b))
        ELSE Publish([p EXCEPT !.content[b] = node, !.index = (node :> Append(carriers, b)) @@ @],
                     q, i + 1, duplicates)

--------------------------------------------------------------------------------
\* The manager

Init ==
    /\ seq = [s \in Seqs |-> None]
    /\ pool = [refs |-> [b \in Blocks |-> 0], content |-> [b \in Blocks |-> None], index |-> [node \in {} |-> <<>>],
               free |-> Reverse([i \in 1..NumBlocks |-> i - 1]), lru |-> <<>>, flights |-> <<>>]
    /\ pins = [pin \in Pins |-> <<>>]
    /\ copies = [b \in {} |-> b]
    /\ mem = [b \in Blocks |-> [slot \in 0 .. BlockSize - 1 |-> None]]

Admit(s, ns, tokens, limit) ==
    LET q == [ns |-> ns, tokens |-> tokens]
        nodes == Match(pool, q, 1, ns)
        hits == [i \in DOMAIN nodes |-> Carrier(pool, nodes[i])]
        cached == Len(hits) * BlockSize
        reserved == Min(Len(tokens), cached + limit)
        new == BlocksFor(reserved) - Len(hits)
        revived == Cardinality({b \in Range(hits) : pool.refs[b] = 0})
        taken == Take(Share(pool, hits), hits, new)
    IN  /\ seq[s] = None
        /\ new + revived <= NumFree(pool)
        /\ pool' = taken[1]
        /\ seq' = [seq EXCEPT ![s] = [ns |-> ns, tokens |-> tokens, computed |-> cached, reserved |-> reserved,
                                      table |-> taken[2], step |-> 0]]
        /\ UNCHANGED <<pins, copies, mem>>

Extend(s, t) ==  \* a token was sampled
    /\ seq[s] # None /\ Len(seq[s].tokens) < MaxLen
    /\ seq' = [seq EXCEPT ![s].tokens = Append(@, t)]
    /\ UNCHANGED <<pool, pins, copies, mem>>

\* The first write behind KV that is there already goes into a tail that may be shared (copy) or published (withdraw).
Dirty(q) == q.reserved = q.computed /\ q.computed % BlockSize # 0
Copies(q) == Dirty(q) /\ pool.refs[Last(q.table)] > 1
Needed(q, reserved) == BlocksFor(reserved) - Len(q.table) + (IF Copies(q) THEN 1 ELSE 0)

Reserve(s, reserved) ==
    LET q == seq[s]
        tail == Last(q.table)
        ready == IF Dirty(q) /\ ~Copies(q) /\ pool.content[tail] # None THEN Withdraw(pool, tail) ELSE pool
        taken == Take(ready, IF Copies(q) THEN Front(q.table) ELSE q.table, Needed(q, reserved))
        copy == taken[2][Len(q.table)]
        source == IF tail \in DOMAIN copies THEN copies[tail] ELSE tail  \* whose own copy is not made yet
    IN  /\ q # None
        /\ q.reserved < reserved /\ reserved <= Len(q.tokens) + Ahead
        /\ Needed(q, reserved) <= NumFree(pool)
        /\ pool' = IF Copies(q) THEN Drop(taken[1], q, <<tail>>) ELSE taken[1]
        /\ copies' = IF Copies(q) THEN (copy :> source) @@ copies ELSE copies
        /\ seq' = [seq EXCEPT ![s].reserved = reserved, ![s].table = taken[2]]
        /\ UNCHANGED <<pins, mem>>

Copy ==  \* the orders are carried out together
    /\ DOMAIN copies # {}
    /\ mem' = [b \in Blocks |-> mem[IF b \in DOMAIN copies THEN copies[b] ELSE b]]
    /\ copies' = [b \in {} |-> b]
    /\ UNCHANGED <<seq, pool, pins>>

Commit(s, n) ==  \* the KV of n tokens is written and, in the same breath, said to be
    LET old == seq[s]
        q == [old EXCEPT !.computed = @ + n]
        Writes(b, slot) == {i \in old.computed + 1 .. q.computed : Slot(q, i) = <<b, slot>>}
        published == Publish(pool, q, old.computed \div BlockSize + 1, <<>>)
    IN  /\ old # None
        /\ q.computed <= Min(q.reserved, Len(q.tokens))
        /\ \A i \in old.computed + 1 .. q.computed : Slot(q, i)[1] \notin DOMAIN copies \union Range(copies)
        /\ pool' = Drop(published[1], q, published[3])
        /\ mem' = [b \in Blocks |-> [slot \in 0 .. BlockSize - 1 |->
                     IF Writes(b, slot) = {} THEN mem[b][slot] ELSE KV(q, The(Writes(b, slot)))]]
        /\ seq' = [seq EXCEPT ![s] = [q EXCEPT !.table = published[2]]]
        /\ UNCHANGED <<pins, copies>>

Fork(s, child) ==
    /\ Forks /\ seq[s] # None /\ seq[child] = None
    /\ seq[s].reserved = seq[s].computed
    /\ pool' = Share(pool, seq[s].table)
    /\ seq' = [seq EXCEPT ![child] = [seq[s] EXCEPT !.step = 0]]
    /\ UNCHANGED <<pins, copies, mem>>

Truncate(s, length) ==
    LET q == seq[s]
        reserved == Min(q.reserved, length)
        kept == BlocksFor(reserved)
    IN  /\ Truncates /\ q # None
        /\ length <= Len(q.tokens) /\ length < Max(Len(q.tokens), q.reserved)
        /\ pool' = Drop(pool, q, Reverse(SubSeq(q.table, kept + 1, Len(q.table))))
        /\ seq' = [seq EXCEPT ![s] = [q EXCEPT !.tokens = SubSeq(@, 1, length), !.computed = Min(@, length),
                                               !.reserved = reserved, !.table = SubSeq(@, 1, kept)]]
        /\ UNCHANGED <<pins, copies, mem>>

Release(s) ==
    /\ seq[s] # None
    /\ pool' = Drop(pool, seq[s], Reverse(seq[s].table))
    /\ seq' = [seq EXCEPT ![s] = None]
    /\ UNCHANGED <<pins, copies, mem>>

Pin(s, pin) ==
    LET full == SubSeq(seq[s].table, 1, seq[s].computed \div BlockSize)
    IN  /\ seq[s] # None /\ pins[pin] = <<>> /\ full # <<>>
        /\ pool' = Share(pool, full)
        /\ pins' = [pins EXCEPT ![pin] = full]
        /\ UNCHANGED <<seq, copies, mem>>

Unpin(pin) ==
    /\ pins[pin] # <<>>
    /\ pool' = Give(pool, Reverse(pins[pin]))
    /\ pins' = [pins EXCEPT ![pin] = <<>>]
    /\ UNCHANGED <<seq, copies, mem>>

Launch(batch) ==
    /\ batch \subseteq Admitted /\ Len(pool.flights) < MaxFlights
    /\ pool' = [pool EXCEPT !.flights = Append(@, <<>>)]
    /\ seq' = [s \in Seqs |-> IF s \in batch THEN [seq[s] EXCEPT !.step = Len(pool.flights) + 1] ELSE seq[s]]
    /\ UNCHANGED <<pins, copies, mem>>

Retire ==
    /\ pool.flights # <<>>
    /\ pool' = Give([pool EXCEPT !.flights = Tail(@)], Head(pool.flights))
    /\ seq' = [s \in Seqs |-> IF seq[s] # None /\ seq[s].step > 0 THEN [seq[s] EXCEPT !.step = @ - 1] ELSE seq[s]]
    /\ UNCHANGED <<pins, copies, mem>>

Next ==
    \/ \E s \in Seqs, ns \in Namespaces, tokens \in Prompts, limit \in Limits : Admit(s, ns, tokens, limit)
    \/ \E s \in Seqs, t \in Tokens : Extend(s, t)
    \/ \E s \in Seqs, reserved \in 1 .. MaxLen + Ahead : Reserve(s, reserved)
    \/ Copy
    \/ \E s \in Seqs, n \in 1 .. MaxLen : Commit(s, n)
    \/ \E s, child \in Seqs : Fork(s, child)
    \/ \E s \in Seqs, length \in 1 .. MaxLen : Truncate(s, length)
    \/ \E s \in Seqs : Release(s)
    \/ \E s \in Seqs, pin \in Pins : Pin(s, pin)
    \/ \E pin \in Pins : Unpin(pin)
    \/ \E batch \in SUBSET Seqs \ {{}} : Launch(batch)
    \/ Retire

Spec == Init /\ [][Next]_vars
==============================================================================
