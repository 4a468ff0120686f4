"""DeepSpeed's messages by parallel dimension, through the engine's compressed collectives.

What lives here: the choke point that all of DeepSpeed's collectives pass, with the role that says what one is about (`roles`),
and who takes which role: gradients (`gradients`), weights (`weights`), pipelines (`pipeline`), tensor parallelism and experts
(`layers`). `attachment` puts it together for one engine.

What may be imported: `CommAttachment`. What it never does: touch a collective whose role nobody has taken (norms, overflow flags,
metadata, checkpoints).
"""

from ssdtrain_ds.comm.attachment import CommAttachment

__all__ = ["CommAttachment"]
