"""The section `offload`."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from ssdtrain.config.amount import Amount
from ssdtrain.config.codecs import AUTO, CODEC_KINDS, OFF, parse_codec
from ssdtrain.config.kinds import (
    AmountField,
    CodecName,
    MemorySize,
    ModuleRules,
    Patterns,
    Positive,
    PositiveSize,
    Seconds,
    Size,
    Switch,
)
from ssdtrain.config.section import Section, ValueConflict
from ssdtrain.config.storage import StorageSection
from ssdtrain.config.units import KiB, exact_size


class EnduranceConfig(Section):
    """How long the drives should live at the rate of this run, day and night. With `amount: "auto"` no more is written than they
    bear; with another amount a warning says how much that is (docs/endurance.md)."""

    years: Positive = 5.0
    """Wanted life of the drives from now on, in years."""

    dwpd: Positive | None = None
    """The rating of the drives: writes of their capacity per day, over a warranty of 5 years. Default: 1, unless `tbw` is
    given."""

    tbw: PositiveSize | None = None
    """The rating of each drive in bytes written, such as "1200TB", in place of `dwpd`."""

    def conflicts(self) -> Iterator[ValueConflict]:
        if self.dwpd is not None and self.tbw is not None:
            why = "is a rating, and tbw gives another"
            yield "dwpd", self.dwpd, why, "leaving one of them out"


class OffloadConfig(StorageSection):
    """Offloading of activations to SSD or host memory in forward, and prefetching before backward needs them."""

    key = "offload"
    purpose = "to offload to"

    amount: AmountField = Amount("auto")
    """How much of what a microbatch saves is offloaded: "auto", as much as transfers can be hidden for, measured in the first
    steps and again when something changes (docs/policy.md); "all"; a fraction such as 0.6 or "60%"; or the bytes that stay such
    as "512MiB" (those saved last, because backward needs them first). 0 measures and moves nothing: a baseline, without a place.
    With a lossy `codec` the default is "all": what is decoded is not what was saved, and must not depend on times that were
    measured."""

    device_budget: MemorySize | None = None
    """Maximum bytes of activations on the device, at the least waiting, with `amount: "auto"` (default). By
    default as few as transfers can be hidden for."""

    include: Patterns = ()
    """Offload only tensors saved by these modules and their submodules: patterns of qualified names or class names, such as
    "*.mlp" or "LayerNorm". Default: all modules."""

    exclude: Patterns = ()
    """Do not offload tensors saved by these modules: patterns as in `include`, over which they take precedence. Default: none."""

    codec: CodecName = "auto"
    """Codec of offloaded floating-point tensors. With "exact" and "lossless" gradients are bit-identical, with "int8" and others
    they are not (docs/codecs.md). "auto": "exact", a quarter fewer bytes of bfloat16, where a trial in the first steps shows that
    these are shorter with it, at no higher peak; not with `amount: "auto"` or under a plan, where nothing is waited for
    (docs/gpu.md). "off": tensors are stored unchanged. Boolean masks are always packed to bits."""

    modules: ModuleRules = ()
    """Where saved tensors go, by patterns of modules as in `include`, such as {"*.self_attn": "keep", "*.mlp": "ssd"}: "keep",
    "offload" (as `amount` says), "host" or "ssd" (all of them, to that tier). The first pattern counts that fits the running
    module or one around it; one with "=" in front, such as "=*.experts", is of what the module saves itself, without modules
    inside of it. An adapter may know names of its framework for modules as well, and its page has them.
    With a tier the default of `amount` is "all". Default: none."""

    min_bytes: Size = 256 * KiB
    """Saved tensors smaller than this are not offloaded."""

    buffer: PositiveSize | None = None
    """Bytes of the rank's arena of reusable transfer buffers (pinned host memory with a GPU). Default: sized by the tensors that
    the engine sees; on a GPU 1GiB at least, and at most this rank's share of half of the node's free memory. A larger arena
    allows more transfers in flight; a smaller one saves host memory."""

    in_flight: PositiveSize | None = None
    """Maximum bytes of stores in flight: saving another tensor waits (at most `deadline`). They also have to fit in `buffer`.
    What a GPU copies to a pinned host tier itself does not count. Default: on a GPU half of the arena; on the CPU 256MiB, which
    is a part of the peak there; with GPUDirect Storage that or what two operators save, whichever is more."""

    prefetch: Size | None = None
    """Bytes of loads issued ahead of backward; 0: load on demand. Default: a fixed rule that does not depend on the measured
    bandwidth. On a GPU: half of the arena. On the CPU: the larger of 24MiB and three of the largest loaded tensors, but at most
    an eighth of what one forward offloads, and at most half of `buffer` if that is given, else 1GiB. More hides a slower drive
    and takes memory that offloading saves."""

    deadline: Seconds = 10.0
    """Maximum time that saving a tensor waits for stores in flight before it uses the next tier or keeps the tensor."""

    gpudirect: Switch = "auto"
    """GPUDirect Storage (kvikio), between GPU and drives without host memory. Default: used if it works here and is faster than
    host memory in a probe at start, else the log says why not; "on" makes it an error if it does not work. It needs
    `verify: "off"`, because no thread of the host sees the bytes, and takes more device memory (docs/gpu.md)."""

    on_full: Literal["keep", "raise"] = "keep"
    """When every tier is full: keep the tensor on its device with one warning, or raise."""

    prove_steps: Annotated[int, Field(ge=0)] = 0
    """Number of first steps in which a copy of every saved tensor is kept in host memory, to compare what backward gets with it,
    to the bit: an error names the first tensor that differs, and its module (docs/equality.md). Takes host memory for all that is
    saved between forward and backward."""

    endurance: EnduranceConfig | None = None
    """The wear of the drives. Without this section it is only reported."""

    @model_validator(mode="after")
    def _losses_depend_on_no_times(self) -> Self:
        if self._all_by_default and not {"amount", "device_budget"} & self.model_fields_set:
            object.__setattr__(self, "amount", Amount("all"))
        return self

    @property
    def lossy(self) -> bool:
        """What comes back is not what was saved."""
        return self.codec not in (AUTO, OFF) and not CODEC_KINDS[parse_codec(self.codec).name].lossless

    @property
    def moves(self) -> bool:
        """Whether anything may leave: with an amount of 0 steps are only measured."""
        return not self.amount.is_nothing or bool(self._tiers_of_modules)

    @property
    def _tiers_of_modules(self) -> list[str]:
        """Tiers that `modules` names."""
        return [place for _, place in self.modules if place in ("host", "ssd")]

    @property
    def _all_by_default(self) -> bool:
        return self.lossy or bool(self._tiers_of_modules)

    def to_dict(self) -> dict[str, Any]:
        written = super().to_dict()
        if self._all_by_default and self.amount.kind == "auto":
            written["amount"] = "auto"  # not the default there
        return written

    def conflicts(self) -> Iterator[ValueConflict]:
        yield from super().conflicts()
        for tier, key in (("ssd", "directories"), ("host", "host")):
            if tier in self._tiers_of_modules and not getattr(self, key):
                why = f'names the tier "{tier}", and {key} gives none'
                yield "modules", dict(self.modules), why, f'"{key}", or "offload" in its place'
        auto = self.amount.kind == "auto" and {"amount", "device_budget"} & self.model_fields_set
        if self._tiers_of_modules and auto:
            why = 'names a tier, which amount "auto" chooses'
            yield "modules", dict(self.modules), why, '"keep" and "offload" only, or "amount": "all"'
        if self.prove_steps and self.lossy:
            why = f'compares bits, but codec "{self.codec}" changes them'
            yield "prove_steps", self.prove_steps, why, 'leaving it out, or "codec": "exact"'
        if self.gpudirect == "on" and self.verify == "all":
            why = 'keeps tensors out of host memory, where verify "all" (default) compares them'
            yield "gpudirect", "on", why, '"auto" or "off", or "verify": "off"'
        if self.device_budget is not None and self.amount.kind != "auto":
            why = f'needs amount: "auto", but amount is {self.amount}'
            yield "device_budget", exact_size(self.device_budget), why, 'leaving it out, or "amount": "auto"'
        yield from self._too_large("min_bytes", "capacity", "so nothing would be offloaded")
        yield from self._too_large("min_bytes", "buffer", "so nothing would fit through it")
        if self.host:
            yield from self._too_large("min_bytes", "host", "so nothing would fit in it")
        yield from self._too_large("prefetch", "buffer", "which loads pass through")
        yield from self._too_large("in_flight", "buffer", "which stores pass through")

    def _too_large(self, key: str, bound: str, consequence: str) -> Iterator[ValueConflict]:
        value, limit = getattr(self, key), getattr(self, bound)
        if value is not None and limit is not None and value > limit:
            why = f"is more than {bound} ({exact_size(limit)}), {consequence}"
            yield key, exact_size(value), why, f"at most {bound}"
