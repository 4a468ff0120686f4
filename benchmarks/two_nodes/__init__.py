"""Nodes on one machine: network namespaces joined by a slow link, real processes in them, GPTs trained across.

What lives here: `network` (namespaces, their links and byte counters), `ranks` (starts the ranks of a run and steps them),
`rank` (the other end of that, in each rank), the workloads `deepspeed_zero2` and `megatron_gpt`, and `variants` (what is
compared, side by side).

`network` and `ranks` need nothing but the standard library; the network needs root and iproute2 (`apt-get install iproute2`).
The workloads import the frameworks, everything else does not. Benchmarks and tests import this package; nothing else does.
"""
