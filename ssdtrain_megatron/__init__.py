"""SSDTrain for Megatron-LM.

Lives here: the flags (`flags`), the attachment of a runtime to model chunks (`attachment`) with the events of the
schedules (`schedule`, `installation`) and the checkpoint function (`recompute`),
the hooks into Megatron-LM's training loop (`pretrain`, `metrics`), the launcher (`run`) and compressed collectives (`comm`).
Import from this package: what `__all__` names. Importing it imports no part of megatron and changes nothing in it; it holds
no algorithm of its own. Megatron's private names are touched in `_compat` and `_compat_comm` only.
"""

from typing import Any

from ssdtrain_megatron.flags import add_arguments, config_from_args
from ssdtrain_megatron.pretrain import install_pretrain, uninstall_pretrain

__all__ = [
    "Attachment",
    "add_arguments",
    "attach",
    "config_from_args",
    "install_pretrain",
    "uninstall_pretrain",
]


def __getattr__(name: str) -> Any:
    # These need megatron, and are there when they are asked for.
    if name in {"Attachment", "attach"}:
        from ssdtrain_megatron import attachment

        return getattr(attachment, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
