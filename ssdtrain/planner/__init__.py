"""What to keep, offload or recompute: costs, search and control.

What lives here: `step` (its words) and `timeline` (the one cost model: the time line of a step under given
choices); `models` and `hardware` (shapes and published figures, for machines that are not at hand); `search`
(the plan that is best under limits). May import everything below the runtime; nothing below it imports this.
It never moves a tensor itself: it chooses, and the engine's policies carry out.
"""
