"""The section `state` of the schema."""

from ssdtrain.config.kinds import Patterns, PositiveSize, Size
from ssdtrain.config.storage import StorageSection
from ssdtrain.config.units import KiB

__all__ = ["StateConfig"]


class StateConfig(StorageSection):
    """Parameters, gradients and optimizer state of a model of plain PyTorch in chunks, on SSD or in host memory while they are
    not needed (docs/state.md)."""

    key = "state"
    purpose = "for the model's state"

    device_limit: PositiveSize | None = None
    """Bytes of parameters, gradients and optimizer state on the device at most. As many of the first chunks as fit stay on the
    device. A limit that is too small is an error at start. Default: what two chunks take, beside all that is in no chunk."""

    blocks: Patterns = ()
    """The modules whose parameters are a chunk each: patterns of qualified names, such as "layers.*". Default: the children of
    the longest ModuleList and of all others of the same class."""

    min_bytes: Size = 64 * KiB
    """Smaller parameters, with their gradients and optimizer state, stay on the device."""
