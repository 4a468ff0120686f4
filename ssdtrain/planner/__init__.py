"""What to keep, offload or recompute: costs, search and control.

What lives here: the one cost model (`step` its words, `timeline` the simulation, `queues` what transfers wait for);
`models` and `hardware` (shapes and published figures, for machines that are not at hand); `search` (the plan that is
best under limits); `cluster` and `estimate` (a job by its shape, a model by its code), `explain`, `execute` (a plan in
plain PyTorch); and `offload.amount: "auto"`: `measured` (a step as blocks), `choose` (which of them to offload),
`adaptive` (the engine's policy), `controller` (when to plan again), `decisions` (what is said of it). May import
everything below the runtime; nothing below it imports this. It never moves a tensor itself: it chooses, and the engine's
policies carry out.
"""
