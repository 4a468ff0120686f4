"""Metrics: where they are declared, and where they are written.

What lives here: `text` (bytes and seconds for people), `registry` (how a metric is declared), and above the features
`totals` (all metrics of a runtime), `journal` (JSON lines per rank, log lines) and `lines` (reading and writing JSON lines).

`text` and `registry` import `ssdtrain.config` only, so that storage, offload, comm and any other feature can declare
metrics; the rest may import the features. Nothing here changes what training does.
"""
