"""DeepSpeed's messages by parallel dimension, through the engine's compressed collectives.

What lives here: which parameters are in a bucket of gradients (`gradients`) and of weights (`weights`), and `attachment`, which
replaces what has to be replaced for one engine.

What may be imported: `CommAttachment`. What it never does: compress a collective outside of a traffic scope (norms, overflow
flags, metadata, checkpoints).
"""

from ssdtrain_ds.comm.attachment import CommAttachment

__all__ = ["CommAttachment"]
