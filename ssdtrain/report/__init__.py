"""What a run did, measured and shown: statistics as text, tables, JSON lines and plots, and the independent meters.

What lives here: `text` (bytes and seconds for people), `result` (one measured run), `table` (runs side by side),
`plot` (activation memory over one step; needs the extra `plot`), `lines` (JSON lines), `process_memory` (peaks of the
process and the device) and `activation_meter` (what autograd keeps alive, counted without the engine).

May import `ssdtrain.offload`, `ssdtrain.storage`, `ssdtrain.config` and what stands below them. It observes and
never changes what training does; nothing here imports matplotlib before a plot is asked for.
"""
