"""Measurements of a user's own machine: `ssdtrain bench`.

What lives here: `io` (a directory's drive through SSDTrain's pool, beside fio), `codec` (codecs on the CPU or the GPU),
`collective` (compressed all-reduces beside plain ones), `script` (a training step of the user's own model with and without
SSDTrain) and `ratios` (how runs are compared). Each returns a dict of figures; the command shows it.

The repository's benchmarks/ use the same pieces; they need a checkout, this package only what is installed. May import all of
`ssdtrain` but its commands, and no framework.
"""
