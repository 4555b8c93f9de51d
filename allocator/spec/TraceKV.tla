------------------------------- MODULE TraceKV -------------------------------
\* Recorded runs of the code, followed by the design event by event. A run that it can't follow is a deadlock.
\*
\* TraceData.tla, which fuzz/spec/traces.py writes, defines Runs: sequences of events, each with the name and the
\* arguments of an action, whether the code refused the call, and what the code shows of its state then (see Shown).
EXTENDS TraceData

VARIABLES trace_run, trace_event  \* names that nothing in the design has: a variable would capture a LET of its name

Graph(f) == {<<x, f[x]>> : x \in DOMAIN f}
Shown == [seq |-> Graph(seq),
          refs |-> Graph(pool.refs),
          index |-> {<<Root(node), Prefix(node), pool.index[node]>> : node \in DOMAIN pool.index},
          free |-> Reverse(pool.free),
          lru |-> pool.lru,
          flights |-> pool.flights,
          pins |-> Graph(pins),
          copies |-> Graph(copies)]

Does(name, with) ==
    CASE name = "Admit" -> Admit(with[1], with[2], with[3], with[4])
      [] name = "Extend" -> Extend(with[1], with[2])
      [] name = "Reserve" -> Reserve(with[1], with[2])
      [] name = "Copy" -> Copy
      [] name = "Commit" -> Commit(with[1], with[2])
      [] name = "Fork" -> Fork(with[1], with[2])
      [] name = "Truncate" -> Truncate(with[1], with[2])
      [] name = "Release" -> Release(with[1])
      [] name = "Pin" -> Pin(with[1], with[2])
      [] name = "Unpin" -> Unpin(with[1])
      [] name = "Launch" -> Launch(Range(with))
      [] name = "Retire" -> Retire

Agrees(part, design, code) ==  \* and if not, it is said how
    IF design = code THEN TRUE
    ELSE PrintT(part \o ": design " \o ToString(design) \o ", code " \o ToString(code)) /\ FALSE

Follow ==
    LET event == Runs[trace_run][trace_event]
    IN  /\ trace_event <= Len(Runs[trace_run])
        /\ IF event.refused THEN ~ENABLED Does(event.name, event.with) /\ UNCHANGED vars
           ELSE Does(event.name, event.with)
        /\ \A part \in DOMAIN event.shows : Agrees(part, Shown'[part], event.shows[part])
        /\ trace_event' = trace_event + 1
        /\ UNCHANGED trace_run

End == trace_event > Len(Runs[trace_run]) /\ UNCHANGED <<vars, trace_run, trace_event>>

Trace == Init /\ trace_run \in DOMAIN Runs /\ trace_event = 1 /\ [][Follow \/ End]_<<vars, trace_run, trace_event>>
==============================================================================
