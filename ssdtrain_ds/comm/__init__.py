"""DeepSpeed's messages by parallel dimension, through the engine's compressed collectives.

What lives here: the choke point that all of DeepSpeed's collectives pass, with the `Traffic` that describes what one is about
(`traffic`), and who sets it: gradients (`gradients`), weights (`weights`), pipelines (`pipeline`), tensor parallelism and experts
(`layers`). `attachment` puts it together for one engine.

What may be imported: `CommAttachment`. What it never does: touch a collective outside of a traffic scope (norms, overflow flags,
metadata, checkpoints).
"""

from ssdtrain_ds.comm.attachment import CommAttachment

__all__ = ["CommAttachment"]
