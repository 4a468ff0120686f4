"""What to keep, offload or recompute: costs, search and control.

Read in this order: `controller` (the one class that decides plans while training), its two subjects `regions` and `blocks` on
the base `subject`, `search` (the one search; `judge` plays and scores its candidates, `finder` gives it the limits of a config,
`plans` has its types), `model` (the one cost model). Beside them: from recorded steps to blocks (`profile`, `recent`, `spans`),
what plans count on (`derating`), ranks (`agreement`), what carries a plan of blocks out (`execute`, `recompute`), and what is
said (`explain`, `memory_plot`, `plan_metrics`).

May import everything below the runtime; nothing below it imports this. It never moves a tensor: the policies of the engine carry
out its choices, and what it asks of the engine are methods.
"""
