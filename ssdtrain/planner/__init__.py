"""What to keep, offload or recompute: costs, search and control.

Read in this order: `controller` (the one class that decides plans while training), its two subjects `regions` and `blocks` on the
base `subject`, `search` (the one search; `finder` gives it the limits of a config, `plans` has its types), `model` (the one cost
model). Beside them: from records to blocks (`measured`, `recent`, `block_times`, `spans`), what plans count on (`derating`,
`arena`, `room`), ranks (`agreement`), recomputation (`execute`, `actions`, `recomputations`), and what is said (`explain`,
`decisions`, `memory_plot`, `plan_metrics`).

May import everything below the runtime; nothing below it imports this. It never moves a tensor: the policies of the engine carry
out its choices, and what it asks of the engine are methods.
"""
