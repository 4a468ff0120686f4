"""What to keep, offload or recompute: costs, search and control.

What lives here: the one cost model (`step` its types, `timeline` the simulation, `queues` the queues of transfers);
`models` and `hardware` (shapes and published figures, for machines that are not available); `search` (the plan that is
best under limits); `cluster` and `estimate` (a job by its shape, a model by its code), `explain`, `execute` (a plan in
plain PyTorch); and `offload.amount: "auto"`: `measured` (a step as blocks), `choose` (which of them to offload),
`adaptive` (the engine's policy), `controller` (when to plan again),
`room` (what may stay on a device), `decisions` (its table in the log). May import
everything below the runtime; nothing below it imports this. It never moves a tensor: the policies of the
engine carry out its choices.
"""
