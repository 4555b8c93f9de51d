----------------------------- MODULE Invariants -----------------------------
\* What holds in every reachable state of PagedKV, by the names of docs/specification.md. TLC starts from this module.
EXTENDS PagedKV

\* What tells states apart. What mem holds in the slots that count follows from it (I6, I13); the others don't matter.
View == <<seq, pool, pins, copies>>

Names(kind, lists, b) ==  \* the places in a family of lists that name b
    UNION {{<<kind, k, i>> : i \in {i \in DOMAIN lists[k] : lists[k][i] = b}} : k \in DOMAIN lists}
Owners(b) == UNION {Names("table", [s \in Admitted |-> seq[s].table], b),
                    Names("pin", pins, b),
                    Names("step", pool.flights, b)}
NothingElse == pool.flights = <<>> /\ \A pin \in Pins : pins[pin] = <<>>

I1 == \A b \in Blocks : pool.refs[b] = Cardinality(Owners(b))

I2 == /\ Cardinality(Range(pool.free) \union Range(pool.lru)) = NumFree(pool)
      /\ Range(pool.free) = {b \in Blocks : pool.refs[b] = 0 /\ pool.content[b] = None}
      /\ Range(pool.lru) = {b \in Blocks : pool.refs[b] = 0 /\ pool.content[b] # None}

I3 == /\ \A node \in DOMAIN pool.index :
            LET carriers == pool.index[node] IN carriers # <<>> /\ Cardinality(Range(carriers)) = Len(carriers)
      /\ \A b \in Blocks :
            {node \in DOMAIN pool.index : b \in Range(pool.index[node])} = {pool.content[b]} \ {None}
      /\ \A s \in Admitted : \A i \in 1 .. seq[s].computed \div BlockSize :
            LET parent == IF i = 1 THEN seq[s].ns ELSE pool.content[seq[s].table[i - 1]]
            IN  pool.content[seq[s].table[i]] = <<parent, Chunk(seq[s], i)>>

I4 == \A node \in DOMAIN pool.index : node[1] \in Namespaces \union DOMAIN pool.index

I5 == \A s \in Admitted : \A i \in seq[s].computed + 1 .. seq[s].reserved :  \* the slots that will be written
        LET b == seq[s].table[BlocksFor(i)] IN pool.refs[b] = 1 /\ pool.content[b] = None

I6 == \A node \in DOMAIN pool.index : \A b \in Range(pool.index[node]), slot \in 0 .. BlockSize - 1 :
        mem[b][slot] = <<Root(node), SubSeq(Prefix(node), 1, Len(Prefix(node)) - BlockSize + slot + 1)>>

I7 == \A s \in Admitted : /\ Len(seq[s].table) = BlocksFor(seq[s].reserved)
                          /\ seq[s].computed <= Min(seq[s].reserved, Len(seq[s].tokens))

I9 == \A s \in Admitted : \A b \in Range(seq[s].table) : pool.content[b] = None \/ Root(pool.content[b]) = seq[s].ns

I11 == Admitted = {} /\ NothingElse => \A b \in Blocks : pool.refs[b] = 0

I12 == \A s \in Admitted : Admitted = {s} /\ NothingElse =>
        \A n \in seq[s].reserved + 1 .. MaxLen : BlocksFor(n) <= NumBlocks => Needed(seq[s], n) <= NumFree(pool)

\* What each computed position of q reads as; a block whose copy is ordered reads as the source.
Read(q) == [i \in 1 .. q.computed |->
              LET slot == Slot(q, i) IN mem[IF slot[1] \in DOMAIN copies THEN copies[slot[1]] ELSE slot[1]][slot[2]]]

I13 == \A s \in Admitted : Read(seq[s]) = [i \in 1 .. seq[s].computed |-> KV(seq[s], i)]

\* I14: what a step in flight may use keeps a reference until it has retired.
Held(step) == UNION {Range(seq[s].table) : s \in {s \in Admitted : seq[s].step >= step}}
              \union UNION {Range(pool.flights[f]) : f \in step .. Len(pool.flights)}
I14 == [][\A step \in DOMAIN pool.flights :
            IF Len(pool'.flights) < Len(pool.flights) THEN step > 1 => Held(step) \subseteq Held(step - 1)'
                                                      ELSE Held(step) \subseteq Held(step)']_vars

Private == INSTANCE PrivateKV WITH private <-
    [s \in Seqs |-> IF seq[s] = None THEN None
                    ELSE [ns |-> seq[s].ns, tokens |-> seq[s].tokens, kv |-> Read(seq[s])]]
Contract == Private!Spec

--------------------------------------------------------------------------------
\* Hash functions to check with

Perfect(kv) == kv
Parity(kv) == Cardinality({i \in DOMAIN kv[2] : kv[2][i] % 2 = 1}) % 2
Constant(kv) == 0
==============================================================================
