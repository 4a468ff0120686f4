"""A simulated accelerator, its memory and its drives, in virtual time: what offloading does to a device's time line.

`timeline` (the clock and what happens when), `device` (streams, events, copies, memory that is reused at once), `drive` (an I/O
pool with set bandwidths behind a real `SpillStore`), `training` (a model whose layers take set times) and `measure` (overlap,
bounds).

Everything runs on the thread that calls, so a run is exactly repeatable: the same seed gives the same order of events and the
same figures, whatever else the machine does. The engine, its mover, transfers, prefetcher and store are the real ones. Bytes
really move: copies and kernels act on memory when their virtual time comes, so that an order which is not enforced is seen as
wrong bytes. Nothing here imports a framework; tests and `benchmarks.simulated_device` use it.
"""
