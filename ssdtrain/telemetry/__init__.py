"""Metrics: declaration, collection and output.

Contains `text` (formatting), `registry` (declaration of metrics), `totals` (all metrics of a runtime), `journal` (JSON lines per
rank, log lines) and `lines` (reading and writing JSON lines).

`text` and `registry` import `ssdtrain.config` only, so that every feature can declare metrics; the other modules may import the
features. Nothing here affects training.
"""
