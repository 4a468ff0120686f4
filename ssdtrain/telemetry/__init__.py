"""What a run writes about itself; nothing here affects training.

`journal` (a JSON line per step and rank, log lines), `tensorboard`, `trace` (chosen steps for a trace viewer), `module_bytes`
(bytes by module in chosen steps), `totals` (all metrics of a runtime, over intervals and ranks), `lines` (JSON lines). Metrics
are declared in `ssdtrain.metrics`, by the features that have them.
"""
