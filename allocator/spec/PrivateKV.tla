------------------------------ MODULE PrivateKV ------------------------------
\* The contract: every sequence behaves as if it owned a private KV memory. No blocks here, and nothing is shared.
\*
\* A sequence knows its tokens and has KV for the first of them. The KV of position i is computed from the whole
\* prefix up to i, so that prefix is what a read of position i returns. Any other answer is someone else's memory.
EXTENDS Naturals, Sequences

CONSTANTS Seqs, Tokens, Namespaces, None

VARIABLE private  \* of every sequence: None, or its namespace ns, its tokens, and kv, what each position reads as

KV(q, n) == [i \in 1..n |-> <<q.ns, SubSeq(q.tokens, 1, i)>>]  \* of the first n positions
Min(a, b) == IF a < b THEN a ELSE b
Becomes(s, q) == private' = [private EXCEPT ![s] = q]  \* and every other sequence stays what it is

Admit(s) ==  \* a beginning may come out of the prefix cache; the last token is always left to compute
    LET q == private'[s] IN
    /\ private[s] = None /\ q # None
    /\ q.ns \in Namespaces /\ q.tokens \in Seq(Tokens)
    /\ \E cached \in 0 .. Len(q.tokens) - 1 : q.kv = KV(q, cached)
    /\ Becomes(s, q)

Use(s) ==
    LET q == private[s] IN
    /\ q # None
    /\ \/ \E t \in Tokens : Becomes(s, [q EXCEPT !.tokens = Append(@, t)])
       \/ \E n \in Len(q.kv) + 1 .. Len(q.tokens) : Becomes(s, [q EXCEPT !.kv = KV(q, n)])
       \/ \E n \in 1 .. Len(q.tokens) : Becomes(s, [q EXCEPT !.tokens = SubSeq(@, 1, n),
                                                             !.kv = SubSeq(@, 1, Min(n, Len(@)))])
       \/ \E child \in Seqs : private[child] = None /\ Becomes(child, q)
       \/ Becomes(s, None)

Init == private = [s \in Seqs |-> None]
Next == \E s \in Seqs : Admit(s) \/ Use(s)
Spec == Init /\ [][Next]_private
==============================================================================
