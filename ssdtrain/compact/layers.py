"""Which layers of a model are compressed, and what they share.

Note: [One input, one z]
    Layers that read the same tensor (q, k and v; gate and up) save one compressed input. It is found by the tensor itself, and
    not by names: the layer that reads an input first compresses it, with its own key, and the next ones take what it made as
    long as the tensor is the same part of the same storage with the same version counter at the same count: a wrapper may pass
    each layer a tensor object of its own, and `.data` is one whose counter does not see the writes of others. A recomputation
    that begins between two such layers compresses for itself.
    With "lowrank" a layer has one projection for several steps, and so it takes what another made only with the key that it
    took in its first forward.
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

from ssdtrain.codecs import FixedSizeCodec, Key, make_fixed_size_codec
from ssdtrain.compact.linear import (
    Communication,
    LinearKind,
    compact_linear,
    kind_of,
)
from ssdtrain.compact.projection import Layout, Projections, layer_key, layout_of
from ssdtrain.compact.recompute import kept_by_producer, release_copies
from ssdtrain.compact.saved import Projected, Quantised, SavedInput
from ssdtrain.config import CompactConfig, ConfigError, Problem
from ssdtrain.offload.counters import same_counter
from ssdtrain.profile.modules import Running, matches
from ssdtrain.telemetry.registry import MetricSet, Unit, counter

__all__ = ["CODECS", "CompactLayer", "CompactMetrics", "Compression", "Found", "find_layers"]

CODECS = {
    "int8": "int8:block=128,round=stochastic",
    "int4": "int4:block=64,round=stochastic,asymmetric",
    "int2": "int2:block=32,round=stochastic,asymmetric",
}
"""Of `compact.codec`: 8.125, 4.5 and 3 bits for a value."""

_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
"""What data parallelism, mixed precision and torch.compile put into a model's own names."""


@dataclass
class CompactMetrics(MetricSet):
    """Counters since the start, of inputs that linear layers would have saved."""

    input_bytes: int = counter(Unit.BYTES, "inputs of linear layers")
    """Bytes of the inputs that were compressed, each once."""
    saved_bytes: int = counter(Unit.BYTES, "saved in their place")
    """Bytes of what was saved in their place."""
    released_bytes: int = counter(Unit.BYTES, "copies released")
    """Bytes of copies that norms and activation functions let go of."""
    shared_inputs: int = counter(Unit.COUNT)
    """Layers' inputs that another layer had compressed."""
    skipped_inputs: int = counter(Unit.COUNT)
    """Inputs left as they are, because what made them keeps them anyway."""


class Found(NamedTuple):
    """A layer of the model that is to be compressed."""

    name: str
    """Qualified, without what wrappers add."""
    module: nn.Module
    kind: LinearKind
    layout: Layout | None
    """None with quantisation."""


def find_layers(
    model: nn.Module, config: CompactConfig, rename: Callable[[str, nn.Module], str] | None = None
) -> list[Found]:
    """The linear layers of `model` that the config names.

    Args:
        rename: turns a module's name into one that does not depend on how the model is divided among ranks.

    Raises:
        ConfigError: none is found, or one has a width that the projection does not fit.
    """
    stacks: dict[str, tuple[Running, ...]] = {}
    found: list[Found] = []
    linear = 0
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
        if config.mode == "quant":
            found.append(Found(name, module, kind, None))
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
            raise ConfigError(
                [Problem("ssdtrain.compact.projection", config.projection, why, allowed)]
            ) from None
        found.append(Found(name, module, kind, layout))
    if not found:
        key, value = _that_leaves_nothing(config)
        why = f"leaves no layer to compress: of {type(model).__name__}, {linear} modules are linear layers that are known"
        allowed = "patterns of their names or classes (torch.nn.Linear, Conv1D, and those of an adapter)"
        raise ConfigError([Problem(f"ssdtrain.compact.{key}", value, why, allowed)])
    return found


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
    """The input that was compressed last on this thread. See Note: [One input, one z]."""

    def __init__(self) -> None:
        self.storage: StorageWeakRef | None = None
        self.probe: Tensor | None = None
        """Without storage; shares the version counter of the input."""
        self.tensor: weakref.ref[Tensor] | None = None
        self.geometry: tuple[Any, ...] = ()
        self.layout: Layout | None = None
        self.layer = 0
        self.dtype = torch.float32
        self.saved_input: SavedInput | None = None
        self.saved: Tensor | None = None

    def remember(self, x: Tensor) -> None:
        self.storage, self.geometry = StorageWeakRef(x.untyped_storage()), _geometry(x)
        self.tensor, self.probe = weakref.ref(x), x.detach()
        self.probe.data = x.new_empty(0)

    def is_of(self, x: Tensor) -> bool:
        return (
            self.storage is not None
            and self.probe is not None
            and self.tensor is not None
            and (self.tensor() is x or same_counter(self.probe, x))
            and not self.storage.expired()
            and self.geometry == _geometry(x)
            and self.probe._version == x._version
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
    """

    def __init__(self, config: CompactConfig, rank: int = 0) -> None:
        self.config = config
        self.rank = rank
        self.step: Callable[[], int] = lambda: 0
        self.counted = CompactMetrics()
        self.codec: FixedSizeCodec | None = None
        if config.mode == "quant":
            self.codec = make_fixed_size_codec(CODECS[config.codec])
        self.projections = Projections(config.projection, config.seed, config.steps_per_projection)
        self._shared = _Shared()
        self._encoded = 0
        self._encoded_at = -1

    def forget(self) -> None:
        """Hold no input's compressed form any longer than the graph does."""
        self._shared.forget()

    def compressed(
        self, original: Tensor, x: Tensor, layout: Layout | None, layer: int
    ) -> tuple[SavedInput, Tensor]:
        """How the input of a layer is compressed, and what is saved of it.

        Args:
            original: the tensor that layers share.
            x: the same, in the dtype to compute in.
            layer: key of the layer that asks.
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

    def _is_shared(self, original: Tensor, layout: Layout | None) -> bool:
        shared = self._shared
        return shared.layout == layout and shared.is_of(original)

    def key_for(self, original: Tensor, layout: Layout | None, layer: int) -> int:
        """The key of the layer that compressed `original` already, or else `layer`."""
        return self._shared.layer if self._is_shared(original, layout) else layer

    def _saved_input(self, x: Tensor, layout: Layout | None, layer: int) -> SavedInput:
        step = self.step()
        if layout is not None:
            return Projected(self.projections.block(layout, layer, step, x))
        assert self.codec is not None
        if step != self._encoded_at:
            self._encoded, self._encoded_at = 0, step
        # Counted within a step, so that no two inputs round alike; the same in a run with the same schedule.
        self._encoded += 1
        seed = self.config.seed << 32 ^ layer
        return Quantised(self.codec, Key(seed, step, self._encoded, self.rank), x.shape, x.dtype)


class CompactLayer:
    """The forward of one layer with a compressed input."""

    def __init__(self, found: Found, compression: Compression) -> None:
        self.name = found.name
        self.layout = found.layout
        self.transposed = found.kind.transposed
        self.key = layer_key(found.name)
        self.compression = compression

    def reads(self, x: Tensor) -> None:
        if self.compression.config.recompute:
            self.compression.counted.released_bytes += release_copies(x)

    def compresses(self, x: Tensor) -> bool:
        """False where `x` is saved anyway, or is nothing that a gradient comes from."""
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
            x,
            weight,
            bias,
            saved_input,
            saved,
            transposed=self.transposed,
            communication=communication,
        )
