"""Activations: saved tensors leave memory during forward and come back before backward needs them.

What lives here, along a saved tensor's way: the hooks (`hooks`, `engine`), which tensors may move (`eligible`), what they become
(`region`, `sharing`, `geometry`, `tape`), whether they leave (`policy`), when (`starter`, `prefetch`, `departures`), who moves
them and keeps the state of that (`mover`, `loads`, `transfer_state`), how bytes are copied and encoded (`transfer`, `coding`,
`targets`, `buffers`), and how they come back (`restore`). Beside it: what it cost (`metrics`, `meter`), the checkpoint function
(`checkpoint`), and all of it as a feature of a runtime (`feature`).

May import `ssdtrain.features`, `ssdtrain.storage`, `ssdtrain.codecs`, `ssdtrain.profile`, `ssdtrain.config` and
`ssdtrain.device`; knows neither `comm` nor `compact`, and no framework. It never draws from a global random generator.
"""
