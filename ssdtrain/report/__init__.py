"""What a run reports while it goes on.

What lives here: `text` (bytes and seconds for people), `lines` (JSON lines), `journal` (a line per step) and `totals`.

May import `ssdtrain.offload`, `ssdtrain.storage`, `ssdtrain.config` and what stands below them. It observes and
never changes what training does.
"""
