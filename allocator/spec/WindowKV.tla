------------------------------- MODULE WindowKV -------------------------------
\* Sliding windows. A token attends to the Window newest tokens, itself included, so a sequence gives back the blocks
\* that no later token of it sees, while it runs, and names the null block in their place.
\*
\* A specification of its own, because it leaves open what PagedKV fixes: which unreferenced block is handed out (and
\* so evicted), how much of a cached prefix is used, whether a full block is published. Whatever the cache does, windows
\* are safe. Positions, entries and slots count from 1. The KV in a slot is the prefix it was computed from.
EXTENDS Integers, Sequences, FiniteSets, TLC

CONSTANTS Blocks, Null, None,  \* model values; Null is one of Blocks
          BlockSize, Window, Seqs, Tokens, MaxLen

VARIABLES seq,      \* of every sequence: None, or tokens, computed, reserved and table
          refs,     \* of every block: its references
          content,  \* of every block: the prefix it is found by, or None
          mem       \* of every block and slot: the KV in it

vars == <<seq, refs, content, mem>>

Prompts == UNION {[1..n -> Tokens] : n \in 1..MaxLen}
Real(table) == {table[e] : e \in DOMAIN table} \ {Null}
Front(q) == SubSeq(q, 1, Len(q) - 1)
Min(a, b) == IF a < b THEN a ELSE b
Max(a, b) == IF a > b THEN a ELSE b
BlocksFor(n) == (n + BlockSize - 1) \div BlockSize
Slot(i) == ((i - 1) % BlockSize) + 1
Prefix(q, i) == SubSeq(q.tokens, 1, i)

\* How many leading entries the next token, at position computed + 1, does not see, and so none after it.
Hidden(computed) == Max(0, computed - Window + 1) \div BlockSize

\* Every choice of n different blocks that nobody references.
Fresh(n) == {f \in [1..n -> {b \in Blocks \ {Null} : refs[b] = 0}] : \A i, j \in 1..n : f[i] = f[j] => i = j}
Count(given, taken) ==  \* references, when blocks are given up and taken
    [b \in Blocks |-> refs[b] - (IF b \in given THEN 1 ELSE 0) + (IF b \in taken THEN 1 ELSE 0)]
Forget(blocks) == [b \in Blocks |-> IF b \in blocks THEN None ELSE content[b]]

Init ==
    /\ seq = [s \in Seqs |-> None]
    /\ refs = [b \in Blocks |-> 0]
    /\ content = [b \in Blocks |-> None]
    /\ mem = [b \in Blocks |-> [slot \in 1..BlockSize |-> None]]

\* A hit is used from the start, blocks that the next token does not see included, short of the last token.
Admit(s, tokens) == \E cached \in 0 .. (Len(tokens) - 1) \div BlockSize :
    \E hits \in [1..cached -> {b \in Blocks : content[b] # None}], fresh \in Fresh(BlocksFor(Len(tokens)) - cached) :
        /\ seq[s] = None
        /\ \A e \in 1..cached : content[hits[e]] = SubSeq(tokens, 1, e * BlockSize) /\ hits[e] \notin Real(fresh)
        /\ refs' = Count({}, Real(hits) \union Real(fresh))
        /\ content' = Forget(Real(fresh))
        /\ seq' = [seq EXCEPT ![s] = [tokens |-> tokens, computed |-> cached * BlockSize, reserved |-> Len(tokens),
                                      table |-> hits \o fresh]]
        /\ UNCHANGED mem

\* A token was sampled and gets a slot. A tail that others share is copied before, one that is published withdrawn.
Extend(s, t) ==
    LET q == seq[s]
        tail == q.table[Len(q.table)]
        dirty == q.computed = q.reserved /\ q.computed % BlockSize # 0
        copies == dirty /\ refs[tail] > 1
        kept == IF copies THEN Front(q.table) ELSE q.table
    IN  /\ q # None /\ Len(q.tokens) < MaxLen /\ q.reserved = Len(q.tokens)
        /\ \E fresh \in Fresh(BlocksFor(q.reserved + 1) - Len(kept)) :
            /\ refs' = Count(IF copies THEN {tail} ELSE {}, Real(fresh))
            /\ content' = Forget(Real(fresh) \union (IF dirty /\ ~copies THEN {tail} ELSE {}))
            /\ mem' = IF copies THEN [mem EXCEPT ![fresh[1]] = mem[tail]] ELSE mem
            /\ seq' = [seq EXCEPT ![s] = [q EXCEPT !.tokens = Append(@, t), !.reserved = @ + 1,
                                                   !.table = kept \o fresh]]

Commit(s, n) ==
    LET old == seq[s]
        q == [old EXCEPT !.computed = @ + n]
        Written(b, slot) == {i \in old.computed + 1 .. q.computed : q.table[BlocksFor(i)] = b /\ Slot(i) = slot}
        Full(b) == {e \in old.computed \div BlockSize + 1 .. q.computed \div BlockSize : q.table[e] = b}
        left == Hidden(q.computed)
    IN  /\ old # None /\ q.computed <= q.reserved
        /\ mem' = [b \in Blocks |-> [slot \in 1..BlockSize |->
                     IF Written(b, slot) = {} THEN mem[b][slot] ELSE Prefix(q, CHOOSE i \in Written(b, slot) : TRUE)]]
        /\ \E published \in BOOLEAN : content' = [b \in Blocks |->
             IF published /\ Full(b) # {} THEN Prefix(q, BlockSize * CHOOSE e \in Full(b) : TRUE) ELSE content[b]]
        /\ refs' = Count(Real(SubSeq(q.table, 1, left)), {})
        /\ seq' = [seq EXCEPT ![s] = [q EXCEPT !.table = [e \in DOMAIN @ |-> IF e <= left THEN Null ELSE @[e]]]]

Truncate(s, length) ==
    LET q == seq[s]
        computed == Min(q.computed, length)
        kept == BlocksFor(length)
    IN  /\ q # None /\ length < Len(q.tokens)
        /\ \A e \in Hidden(computed) + 1 .. BlocksFor(computed) : q.table[e] # Null
        /\ refs' = Count(Real(SubSeq(q.table, kept + 1, Len(q.table))), {})
        /\ seq' = [seq EXCEPT ![s] = [tokens |-> Prefix(q, length), computed |-> computed, reserved |-> length,
                                      table |-> SubSeq(q.table, 1, kept)]]
        /\ UNCHANGED <<content, mem>>

Fork(s, child) ==
    /\ seq[s] # None /\ seq[child] = None /\ seq[s].computed = seq[s].reserved
    /\ refs' = Count({}, Real(seq[s].table))
    /\ seq' = [seq EXCEPT ![child] = seq[s]]
    /\ UNCHANGED <<content, mem>>

Release(s) ==
    /\ seq[s] # None
    /\ refs' = Count(Real(seq[s].table), {})
    /\ seq' = [seq EXCEPT ![s] = None]
    /\ UNCHANGED <<content, mem>>

Next == \E s \in Seqs :
    \/ \E tokens \in Prompts : Admit(s, tokens)
    \/ \E t \in Tokens : Extend(s, t)
    \/ \E n \in 1..MaxLen : Commit(s, n) \/ Truncate(s, n)
    \/ \E child \in Seqs : Fork(s, child)
    \/ Release(s)

Spec == Init /\ [][Next]_vars

--------------------------------------------------------------------------------
\* What holds, said by positions: nothing here uses Hidden.

Admitted == {s \in Seqs : seq[s] # None}
Visible(q) == {i \in 1 .. q.computed : i > q.computed + 1 - Window}  \* to the next token, with those before it

Present == \A s \in Admitted : \A i \in Visible(seq[s]) : seq[s].table[BlocksFor(i)] # Null

\* Of the visible positions, and of those that a truncation can make visible.
Reads == \A s \in Admitted : \A i \in 1 .. seq[s].computed :
    LET b == seq[s].table[BlocksFor(i)] IN b # Null => mem[b][Slot(i)] = Prefix(seq[s], i)

Shape == \A s \in Admitted : /\ Len(seq[s].table) = BlocksFor(seq[s].reserved)
                             /\ seq[s].computed <= seq[s].reserved /\ seq[s].reserved = Len(seq[s].tokens)

References == \A b \in Blocks \ {Null} : refs[b] = Cardinality({s \in Admitted : b \in Real(seq[s].table)})

NullUnused == refs[Null] = 0 /\ content[Null] = None /\ \A slot \in 1..BlockSize : mem[Null][slot] = None

\* After a commit, a sequence holds no block that is wholly out of sight.
OutOfSight(q) == {e \in DOMAIN q.table : e * BlockSize <= q.computed + 1 - Window}
GivenBack == [][\A s \in Admitted : seq'[s] # None /\ seq'[s].computed > seq[s].computed =>
                    \A e \in OutOfSight(seq'[s]) : seq'[s].table[e] = Null]_vars

Symmetry == Permutations(Blocks \ {Null}) \union Permutations(Seqs)
View == <<seq, refs, content>>  \* what slots that count hold follows, by Reads; the others don't matter
==============================================================================
