"""Activations: saved tensors leave memory during forward and come back before backward needs them.

What lives here: which saved tensors may move (`eligible`), what they become (`region`, `geometry`, `tape`), who moves them
and when (`engine`, `transfer`, `prefetch`, `amount`), what autograd sees (`hooks`), whose forwards are recorded (`claims`),
what it cost (`statistics`, `meter`), and the checkpoint function (`checkpoint`).

May import `ssdtrain.storage`, `ssdtrain.codecs`, `ssdtrain.config` and `ssdtrain.device`; knows neither `comm` nor
`compact`, no framework and no module names. It never draws from a global random generator.
"""
