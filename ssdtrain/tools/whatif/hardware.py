"""Published figures of GPUs and drives, for plans of machines that are not at hand.

Every rate is per direction and in bytes per second, every FLOP rate is dense (without structured sparsity) bfloat16 with float32
accumulation. Vendors publish peaks; `MATMUL_EFFICIENCY` and `LINK_EFFICIENCY` say which part of them a plan counts on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ssdtrain.config.errors import InvalidValue
from ssdtrain.config.similar import closest
from ssdtrain.config.units import GiB, parse_size

__all__ = [
    "GPUS",
    "HOP_BETWEEN_NODES",
    "HOP_IN_NODE",
    "LINK_EFFICIENCY",
    "MATMUL_EFFICIENCY",
    "Gpu",
    "Ssds",
    "find_gpu",
    "parse_rate",
    "parse_ssds",
]

MATMUL_EFFICIENCY = 0.5
"""Achieved part of the peak FLOP rate in a whole training step. Published: 0.47 to 0.52 for dense GPT on A100 (arXiv 2104.04473),
Llama 3 0.38 to 0.43 on 16 thousand H100 (arXiv 2407.21783)."""

LINK_EFFICIENCY = 0.8
"""Achieved part of a link's raw rate in large copies: pinned copies over PCIe 4.0 x16 reach about 26 of 32 GB/s."""

HOP_IN_NODE, HOP_BETWEEN_NODES = 3.4e-6, 14e-6
"""Seconds until a rank of a ring hands on what it got, over NVLink and over the network: NCCL's own figures, for rings with large
messages (`hwLatencies` of the ring with the protocol "Simple" in its src/graph/tuning.cc)."""

PCIE3, PCIE4, PCIE5 = 16e9, 32e9, 64e9
"""Bytes per second of sixteen lanes, per direction."""


@dataclass(frozen=True)
class Gpu:
    """What a plan needs to know of a GPU.

    Attributes:
        name: as `find_gpu` takes it.
        flops: dense bfloat16 FLOP per second (float16 where there is no bfloat16).
        memory: bytes that the device has.
        memory_rate: of device memory, bytes per second.
        host_rate: between host and device, bytes per second and direction: PCIe or NVLink-C2C.
        peer_rate: to other GPUs of the node (NVLink, else PCIe), bytes per second and direction.
        source: the vendor's document.
    """

    name: str
    flops: float
    memory: int
    memory_rate: float
    host_rate: float
    peer_rate: float
    source: str


def _gpu(
    name: str, tflops: float, gigabytes: float, memory_rate: float, host: float, peer: float, source: str
) -> Gpu:
    return Gpu(name, tflops * 1e12, int(gigabytes * GiB), memory_rate * 1e9, host, peer * 1e9, source)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("v100", 125, 32, 900, PCIE3, 150, "NVIDIA V100 datasheet, SXM2 32 GB; float16"),
        _gpu("a100-40gb", 312, 40, 1555, PCIE4, 300, "NVIDIA A100 datasheet, SXM4 40 GB"),
        _gpu("a100", 312, 80, 2039, PCIE4, 300, "NVIDIA A100 datasheet, SXM4 80 GB"),
        _gpu(
            "a100-pcie", 312, 80, 1935, PCIE4, 32, "NVIDIA A100 datasheet, PCIe 80 GB, without NVLink bridge"
        ),
        _gpu("h100", 989.4, 80, 3350, PCIE5, 450, "NVIDIA H100 datasheet, SXM5"),
        _gpu("h100-pcie", 756, 80, 2000, PCIE5, 64, "NVIDIA H100 datasheet, PCIe, without NVLink bridge"),
        _gpu(
            "h100-nvl", 835.5, 94e9 / GiB, 3900, PCIE5, 300, "NVIDIA H100 datasheet, NVL, with NVLink bridge"
        ),
        _gpu(
            "gh200",
            989.4,
            96,
            4000,
            450e9,
            450,
            "NVIDIA GH200 datasheet, HBM3; NVLink-C2C 900 GB/s both ways",
        ),
        _gpu("h200", 989.4, 141e9 / GiB, 4800, PCIE5, 450, "NVIDIA H200 datasheet, SXM"),
        _gpu("b200", 2250, 180e9 / GiB, 7700, PCIE5, 900, "NVIDIA HGX B200 figures, 1000 W; 180 GB usable"),
        _gpu(
            "gb200",
            2500,
            186e9 / GiB,
            8000,
            225e9,
            900,
            "NVIDIA GB200 NVL72 datasheet; two GPUs share one Grace and its NVLink-C2C of 900 GB/s both ways",
        ),
        _gpu("rtx3090", 71, 24, 936, PCIE4, 32, "NVIDIA GA102 whitepaper; peers over PCIe"),
        _gpu("rtx4090", 165.2, 24, 1008, PCIE4, 32, "NVIDIA Ada whitepaper; peers over PCIe"),
        _gpu("rtx5090", 209.5, 32, 1792, PCIE5, 64, "NVIDIA RTX Blackwell whitepaper; peers over PCIe"),
        _gpu("l40s", 362, 48, 864, PCIE4, 32, "NVIDIA L40S datasheet; peers over PCIe"),
        _gpu(
            "a6000",
            154.8,
            48,
            768,
            PCIE4,
            32,
            "NVIDIA RTX A6000 datasheet, GA102 whitepaper; peers over PCIe",
        ),
    )
}
"""GPUs by name. `find_gpu` also takes "A100-80GB", "RTX 4090", "4090"."""

_OTHER_NAMES = {
    "a10080gb": "a100",
    "h10080gb": "h100",
    "h100sxm": "h100",
    "a100sxm": "a100",
    "v10032gb": "v100",
}


def find_gpu(name: str) -> Gpu:
    """The GPU of that name; letter case, spaces and hyphens do not matter.

    Raises:
        InvalidValue: unknown; says which are known.
    """
    plain = _plain(name)
    plain = _plain(_OTHER_NAMES.get(plain, plain))
    for known, gpu in GPUS.items():
        if plain in {_plain(known), _plain(known).removeprefix("rtx")}:
            return gpu
    near = closest(name.lower(), GPUS)
    hint = f' (did you mean "{near}"?)' if near else ""
    raise InvalidValue(f"is not a known GPU{hint}", ", ".join(GPUS))


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower()).removeprefix("nvidia")


@dataclass(frozen=True)
class Ssds:
    """The drives of one node.

    Attributes:
        count: how many, striped.
        read, write: of one drive, bytes per second.
        capacity: of one drive, bytes; 0: unknown.
        endurance: bytes that one drive may take in its life; 0: unknown.
    """

    count: int
    read: float
    write: float
    capacity: int = 0
    endurance: float = 0.0

    @property
    def read_rate(self) -> float:
        """Bandwidth of all drives, in bytes per second."""
        return self.count * self.read

    @property
    def write_rate(self) -> float:
        """Bandwidth of all drives, in bytes per second."""
        return self.count * self.write

    def faster(self, factor: float) -> Ssds:
        """The same drives, each `factor` times as fast."""
        return replace(self, read=self.read * factor, write=self.write * factor)


SSDS_ALLOWED = (
    'a count, a rate, and what else is known: "4 x 7GB/s", "4 x 7GB/s, write 5GB/s", '
    '"2 x 14GB/s, 3.84TB, 1 DWPD" (drive writes per day over 5 years), "8 x 7GB/s, 7PB written"'
)

_COUNT = re.compile(r"(\d+)\s*[xX*]\s*(.+)")
_DWPD = re.compile(r"([\d.]+)\s*dwpd", re.IGNORECASE)
_WARRANTY_DAYS = 5 * 365


def parse_rate(text: str) -> float:
    """Bytes per second of "7GB/s" or "400 Gbit/s".

    Raises:
        InvalidValue: without "/s", or no size in front of it.
    """
    allowed = 'bytes or bits a second such as "7GB/s" or "400Gbit/s"'
    amount, slash, second = text.strip().rpartition("/")
    if not slash or second.strip().lower() != "s":
        raise InvalidValue('is not a rate: "/s" is missing at its end', allowed)
    bits = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?)bits?\s*", amount, re.IGNORECASE)
    try:
        if bits is not None:
            return parse_size(f"{bits[1]}{bits[2].upper()}B") / 8
        return float(parse_size(amount))
    except InvalidValue as refusal:
        raise InvalidValue(refusal.why, allowed) from None


def parse_ssds(text: str) -> Ssds:
    """The drives of a node, from a text such as "4 x 7GB/s" or "2 x 14GB/s, write 10GB/s, 3.84TB, 1 DWPD".

    Args:
        text: parts separated by commas. The first is a rate (read, and write where that is not given), with a count in front of
            it where there are several. Then in any order: "write RATE", the capacity of one drive, "N DWPD" (over 5 years; needs
            the capacity), "SIZE written" (what one drive may take in its life).

    Raises:
        InvalidValue: a part is none of these, or a rate is 0.
    """
    first, *others = [part.strip() for part in text.split(",")]
    counted = _COUNT.fullmatch(first)
    count, rate = (int(counted[1]), counted[2]) if counted else (1, first)
    read = write = parse_rate(rate)
    capacity, endurance, daily = 0, 0.0, 0.0
    for part in others:
        per_day = _DWPD.fullmatch(part)
        try:
            if per_day:
                daily = float(per_day[1])
            elif part.lower().startswith("write "):
                write = parse_rate(part[len("write ") :])
            elif part.lower().endswith("written"):
                endurance = float(parse_size(part[: -len("written")]))
            else:
                capacity = parse_size(part)
        except (InvalidValue, ValueError):
            raise InvalidValue(f'has the part "{part}", which is not understood', SSDS_ALLOWED) from None
    if not count or not read or not write:
        raise InvalidValue("has no drive, or a drive with the rate 0", SSDS_ALLOWED)
    if daily and not capacity:
        raise InvalidValue("has drive writes per day but no capacity", SSDS_ALLOWED)
    return Ssds(count, read, write, capacity, endurance or daily * capacity * _WARRANTY_DAYS)
