"""Selection of the layers to compress, and the state they share.

Note: [One input, one z]
    Layers that read the same tensor (q, k and v; gate and up) save one compressed input. It is identified by the tensor, not by
    layer names: the first layer that reads an input compresses it with its own key, and the next layers reuse the result while
    storage, geometry, version counter and version are the same. Object identity is not enough, because a wrapper may pass each
    layer its own tensor object, nor is the storage, because `.data` has a version counter that other writes do not increment.
    A recomputation that begins between two such layers compresses its input again.
    With "lowrank" a projection lasts for several steps, so a layer reuses a result only if it has the key of its first forward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ssdtrain.codecs import FixedSizeCodec, Key, make_fixed_size_codec
from ssdtrain.compact.autograd_nodes import missing_names
from ssdtrain.compact.linear import Communication, LinearKind, compact_linear, kind_of
from ssdtrain.compact.projection import ProjectionLayout, Projections, layer_key, layout_of
from ssdtrain.compact.recompute import kept_by_producer, release_copies
from ssdtrain.compact.saved import Projected, Quantised, SavedInput
from ssdtrain.config import CompactConfig, ConfigError
from ssdtrain.metrics import MetricSet, Unit, counter
from ssdtrain.profile.modules import Running, matches
from ssdtrain.versions import VersionProbe

QUANTISERS = {
    "int8": "int8:block=128,round=stochastic",
    "int4": "int4:block=32,round=stochastic,asymmetric",
    "int2": "int2:block=32,round=stochastic,asymmetric",
    "int4_rotated": "int4:block=32,round=stochastic,asymmetric,hadamard=32",
    "int2_rotated": "int2:block=32,round=stochastic,asymmetric,hadamard=32",
}
"""Codecs of `compact.codec`: 8.125, 5, 3, 5 and 3 bits for a value. A rotation spreads large values over
their block: it makes the error of silu(gate) * up smaller, and that of inputs with one sign or little spread much larger
(docs/compact.md)."""

_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
"""Prefixes that wrappers for data parallelism, mixed precision and torch.compile add to module names."""


@dataclass
class CompactMetrics(MetricSet):
    """Counters, since the start, of inputs of linear layers."""

    input_bytes: int = counter(Unit.BYTES, "inputs of linear layers")
    """Bytes of the inputs that were compressed, each once."""
    saved_bytes: int = counter(Unit.BYTES, "saved in their place")
    """Bytes saved in their place."""
    released_bytes: int = counter(Unit.BYTES, "copies released")
    """Bytes of saved copies of norms and activation functions that were released."""
    shared_inputs: int = counter(Unit.COUNT)
    """Inputs of layers that another layer had compressed already."""
    skipped_inputs: int = counter(Unit.COUNT)
    """Inputs saved uncompressed, because the operation that produced them saves them anyway."""


class LayerToCompress(NamedTuple):
    """A layer to compress."""

    name: str
    """Qualified, without the prefixes of wrappers."""
    module: nn.Module
    kind: LinearKind
    layout: ProjectionLayout | None
    """None with quantisation."""


def find_layers(
    model: nn.Module,
    config: CompactConfig,
    rename: Callable[[str, nn.Module], str] | None = None,
    *,
    required: bool = True,
) -> list[LayerToCompress]:
    """The linear layers of `model` that the config names.

    Args:
        rename: maps a module's name to one that does not depend on how the model is divided among ranks.
        required: False: there may be none.

    Raises:
        ConfigError: none is found, one has a width that the projection does not fit, or trains a weight of a class that computes
            in its own way (quantised weights).
    """
    stacks: dict[str, tuple[Running, ...]] = {}
    layers: list[LayerToCompress] = []
    linear = 0
    wrapped: dict[str, str] = {}  # name of a layer -> class of its weight
    projections = Projections(config.projection, config.seed)
    for path, module in model.named_modules():
        name = _plain_name(path if rename is None else rename(path, module))
        parent = stacks.get(path.rpartition(".")[0], ()) if path else ()
        stack = stacks[path] = (*parent, Running(name, type(module).__name__))
        kind = kind_of(module)
        if kind is None:
            continue
        linear += 1
        if (config.include and not matches(stack, config.include)) or matches(stack, config.exclude):
            continue
        if _computes_in_its_own_way(module.weight):
            wrapped[name] = type(module.weight).__name__
            continue
        if config.mode == "quant":
            layers.append(LayerToCompress(name, module, kind, None))
            continue
        ratio = next((ratio for pattern, ratio in config.ratio if fnmatchcase(name, pattern)), None)
        if ratio is None:
            continue
        layout = layout_of(kind.width(module), ratio)
        try:
            projections.check(layout)
        except ValueError as error:
            allowed = '"orthonormal", or an exclude that has this layer'
            why = f"does not fit the layer {name}: {error}"
            raise ConfigError.of("ssdtrain.compact.projection", config.projection, why, allowed) from None
        layers.append(LayerToCompress(name, module, kind, layout))
    if wrapped:
        kinds, names = ", ".join(sorted(set(wrapped.values()))), ", ".join(list(wrapped)[:4])
        why = f"has {len(wrapped)} layers whose weights, which are trained, are of the class {kinds}: {names}"
        allowed = "an exclude that has them, or freezing them"
        raise ConfigError.of("ssdtrain.compact.exclude", list(config.exclude), why, allowed)
    if required and not layers:
        key, value = _that_leaves_nothing(config)
        why = f"leaves no layer to compress: of {type(model).__name__}, {linear} modules are linear layers that are known"
        allowed = "patterns of their names or classes (torch.nn.Linear, Conv1D, and those of an adapter)"
        raise ConfigError.of(f"ssdtrain.compact.{key}", value, why, allowed)
    return layers


def _computes_in_its_own_way(weight: object) -> bool:
    """Whether a trained weight is of a wrapper class, such as quantised ones: a product with it is what its class makes of
    `linear`. A DTensor is a plain weight where it is gathered for the forward. With a frozen weight the layer's own forward runs.
    """
    return (
        isinstance(weight, Tensor)
        and weight.requires_grad
        and type(weight).__torch_dispatch__ is not Tensor.__torch_dispatch__
        and not hasattr(weight, "device_mesh")
    )


def _that_leaves_nothing(config: CompactConfig) -> tuple[str, object]:
    if config.include:
        return "include", list(config.include)
    if "ratio" in config.model_fields_set:
        return "ratio", dict(config.ratio)
    return "exclude", list(config.exclude)


def _plain_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        while name.startswith(wrapper):
            name = name[len(wrapper) :]
        name = name.replace(f".{wrapper}", ".")
    return name


class _Shared(threading.local):
    """The most recently compressed input of this thread. See Note: [One input, one z]."""

    def __init__(self) -> None:
        self.storage: StorageWeakRef | None = None
        self.probe: VersionProbe | None = None
        self.tensor: weakref.ref[Tensor] | None = None
        self.geometry: tuple[Any, ...] = ()
        self.layout: ProjectionLayout | None = None
        self.layer = 0
        self.dtype = torch.float32
        self.saved_input: SavedInput | None = None
        self.saved: Tensor | None = None

    def remember(self, x: Tensor) -> None:
        self.storage, self.geometry = StorageWeakRef(x.untyped_storage()), _geometry(x)
        self.tensor, self.probe = weakref.ref(x), VersionProbe(x)

    def matches(self, x: Tensor) -> bool:
        return (
            self.storage is not None
            and self.probe is not None
            and self.tensor is not None
            and (self.tensor() is x or self.probe.watches(x))
            and not self.storage.expired()
            and self.geometry == _geometry(x)
            and self.probe.now == x._version
        )

    def forget(self) -> None:
        self.storage = self.tensor = self.probe = self.saved_input = self.saved = None


def _geometry(x: Tensor) -> tuple[Any, ...]:
    return x.untyped_storage()._cdata, x.dtype, x.storage_offset(), x.shape, x.stride(), x._version


class Compression:
    """Compresses the inputs of all layers of a rank.

    Args:
        config: the `compact` section.
        rank: the rounding of different ranks is independent; projections are the same on all.

    Raises:
        ConfigError: `recompute` is on, and this torch's autograd lacks private names that it reads.
    """

    def __init__(self, config: CompactConfig, rank: int = 0) -> None:
        if config.recompute and (missing := missing_names()):
            why = f"reads private names of autograd that torch {torch.__version__} does not have: {', '.join(missing)}"
            allowed = "false, or a version of torch that docs/versions.md lists"
            raise ConfigError.of("ssdtrain.compact.recompute", True, why, allowed)
        self.config = config
        self.rank = rank
        self.step: Callable[[], int] = lambda: 0
        self.counted = CompactMetrics()
        self.codec: FixedSizeCodec | None = None
        if config.mode == "quant":
            self.codec = make_fixed_size_codec(QUANTISERS[config.codec])
        self.projections = Projections(config.projection, config.seed, config.steps_per_projection)
        self._shared = _Shared()
        self._encoded = 0
        self._encoded_at = -1

    def forget(self) -> None:
        """Drop the reference to the last compressed input; the graph alone keeps it alive."""
        self._shared.forget()

    def compressed(
        self, original: Tensor, x: Tensor, layout: ProjectionLayout | None, layer: int
    ) -> tuple[SavedInput, Tensor]:
        """The compression of a layer's input, and the compressed tensor to save.

        Args:
            original: the input, which several layers may share.
            x: the same values in the compute dtype.
            layer: key of the calling layer.
        """
        shared = self._shared
        if (
            self._is_shared(original, layout)
            and shared.dtype == x.dtype
            and (self.config.mode != "lowrank" or shared.layer == layer)
            and shared.saved_input is not None
            and shared.saved is not None
        ):
            self.counted.shared_inputs += 1
            return shared.saved_input, shared.saved
        if self.config.recompute:
            self.counted.released_bytes += release_copies(original)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            detached = x.detach()
            saved_input = self._saved_input(detached, layout, layer)
            saved = saved_input.compress(detached)
        self.counted.input_bytes += x.nbytes
        self.counted.saved_bytes += saved.nbytes
        shared.remember(original)
        shared.layout, shared.layer, shared.dtype = layout, layer, x.dtype
        shared.saved_input, shared.saved = saved_input, saved
        return saved_input, saved

    def _is_shared(self, original: Tensor, layout: ProjectionLayout | None) -> bool:
        shared = self._shared
        return shared.layout == layout and shared.matches(original)

    def key_for(self, original: Tensor, layout: ProjectionLayout | None, layer: int) -> int:
        """The key of the layer that compressed `original` already, or else `layer`."""
        return self._shared.layer if self._is_shared(original, layout) else layer

    def _saved_input(self, x: Tensor, layout: ProjectionLayout | None, layer: int) -> SavedInput:
        step = self.step()
        if layout is not None:
            return Projected(self.projections.block(layout, layer, step, x))
        assert self.codec is not None
        if step != self._encoded_at:
            self._encoded, self._encoded_at = 0, step
        # Counted within a step: each input has its own random numbers, the same in every run with this schedule.
        self._encoded += 1
        seed = self.config.seed << 32 ^ layer
        return Quantised(self.codec, Key(seed, step, self._encoded, self.rank), x.shape, x.dtype)


class CompactLayer:
    """The forward of one layer with a compressed input."""

    def __init__(self, layer: LayerToCompress, compression: Compression) -> None:
        self.name = layer.name
        self.layout = layer.layout
        self.transposed = layer.kind.transposed
        self.key = layer_key(layer.name)
        self.compression = compression

    def reads(self, x: Tensor) -> None:
        if self.compression.config.recompute:
            self.compression.counted.released_bytes += release_copies(x)

    def compresses(self, x: Tensor) -> bool:
        """False if `x` is saved by its producer anyway, or cannot contribute to a gradient.

        Raises:
            RuntimeError: `x` has no memory of its own (tensor parallelism of torch, nested tensors).
        """
        if is_traceable_wrapper_subclass(x):
            raise RuntimeError(
                f"compact cannot compress the input of {self.name}, a {type(x).__name__}: name this layer in compact.exclude"
            )
        if not x.is_floating_point() or not x.numel() or x.is_inference():
            return False
        if kept_by_producer(x):
            self.compression.counted.skipped_inputs += 1
            return False
        return True

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, communication: Communication | None = None
    ) -> Tensor:
        original = x
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        saved_input, saved = self.compression.compressed(original, x, self.layout, self.key)
        return compact_linear(
            x, weight, bias, saved_input, saved, transposed=self.transposed, communication=communication
        )
