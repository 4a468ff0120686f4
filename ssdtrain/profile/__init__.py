"""What is seen of a running model, for offloading and planning.

`modules` has the names of running modules, `passes` when saved tensors were saved and used, `time_spans` what the host did,
`blocks` which modules are a model's blocks, `containers` what they are called with. It imports nothing of the engine, and never
changes what a model computes.
"""
