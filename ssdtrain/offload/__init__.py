"""Activations: saved tensors leave memory during forward and come back before backward needs them.

What lives here: which saved tensors may move (`eligible`), what they become (`region`, `geometry`, `tape`), who moves them
and when (`engine`, `mover`, `transfer`, `prefetch`), by which policy (`policy`), what autograd sees (`hooks`), what it cost
(`metrics`, `meter`), the checkpoint function (`checkpoint`), and all of it as a feature of a runtime (`feature`).

May import `ssdtrain.features`, `ssdtrain.storage`, `ssdtrain.codecs`, `ssdtrain.profile`, `ssdtrain.config` and
`ssdtrain.device`; knows neither `comm` nor `compact`, and no framework. It never draws from a global random generator.
"""
