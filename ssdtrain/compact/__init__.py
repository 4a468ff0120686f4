"""Linear layers that save a compressed input for the gradient of their weight (CompAct, arXiv 2410.15352).

What lives here: random projections (`projection`), compressed inputs (`saved`), the linear function and the replacement of a
layer's forward (`linear`), low-rank layers (`lowrank`), saved tensors that backward recomputes (`recompute`),
selection of layers (`layers`), and the feature of the runtime (`feature`).

What may be imported: config, codecs, profile, features, and of offload `counters` alone. Adapters register the classes of their
framework's layers with `register_kind`.

What it never does: draw from a global random generator, change a `state_dict`, change the gradient of a layer's input.
"""

from ssdtrain.compact.linear import Communication, LinearKind, register_kind
from ssdtrain.compact.recompute import register_passing

__all__ = ["Communication", "LinearKind", "register_kind", "register_passing"]
