"""Activations: saved tensors leave memory during forward and come back before backward needs them.

What lives here, along a saved tensor's way: the hooks (`hooks`, `engine`), which tensors may move and what they become
(`tensors`), whether they leave (`policy`), when (`pacing`), who moves them, how bytes are copied and encoded, and how they come
back (`transfer`). Beside it: checks of that (`checks`), what it cost (`metrics`), the checkpoint function (`checkpoint`), and all
of it as a feature of a runtime (`feature`).

May import `ssdtrain.features`, `ssdtrain.storage`, `ssdtrain.codecs`, `ssdtrain.profile`, `ssdtrain.config` and
`ssdtrain.device`; knows neither `comm` nor `compact`, and no framework. It never draws from a global random generator.
"""
