"""What the examples and the benchmarks share.

`model` and `data` (a GPT and its text, no framework), `result` (one measured run), `table` (runs side by side), `plot`
(activation memory over one step; needs matplotlib), `process_memory` (peaks of the process and of the device) and
`activation_meter` (what autograd keeps alive, counted independently of the offload engine). Nothing here changes what training
does.
"""
