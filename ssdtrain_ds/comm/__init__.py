"""DeepSpeed's messages by parallel dimension, through the engine's compressed collectives.

What lives here: which parameters are in a bucket of gradients (`gradients`) and of weights (`weights`), `attachment`, which
replaces what has to be replaced for one engine, and `shared_layers`, which warns where engines share what is replaced.

What may be imported: `CommAttachment`, `warn_of_shared_layers`. What it never does: compress a collective outside of a traffic
scope (norms, overflow flags, metadata, checkpoints).
"""

from ssdtrain_ds.comm.attachment import CommAttachment
from ssdtrain_ds.comm.shared_layers import warn_of_shared_layers

__all__ = ["CommAttachment", "warn_of_shared_layers"]
