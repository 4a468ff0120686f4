"""What the published figures are about: what is assumed, why the planner differs, and what is left out."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FAMILIES", "LEFT_OUT", "Family"]


@dataclass(frozen=True)
class Family:
    """Figures of one kind.

    Attributes:
        title: of their table, with the paper.
        assumed: what the paper does not say.
        why: where the planner differs, and what it leaves out.
        bounds: of the ratios, which a test checks.
    """

    title: str
    assumed: str
    why: str
    bounds: tuple[float, float]


FAMILIES = {
    "rate": Family(
        "FLOP rate of GPT with 3D parallelism on A100 (Megatron-LM, arXiv 2104.04473, measured runs of the kind that "
        "SSDTrain's estimates rest on)",
        "microbatches of 1 where the table has none (Table 1), no interleaved stages, 25 GB/s of network per GPU.",
        "The planner counts on half of the peak at every width, where the measured part grows with it. It does not "
        "overlap tensor-parallel all-reduces with computation, and interleaved stages were used in the runs: it is too "
        "slow for long pipelines. What ZeRO-3 gathers and scatters overlaps with computation but for one block's, at the full "
        "rate of the network and with NCCL's own latency of a ring: it is too fast where the network is the limit.",
        (0.75, 1.3),
    ),
    "bandwidth": Family(
        "SSD writes of one GPU where all activations are offloaded (SSDTrain, arXiv 2408.10013)",
        "the configurations of Megatron-LM's Table 2 at their measured FLOP rates (SSDTrain takes measured runs of "
        "Megatron-LM; which ones could not be read); four Samsung 980 PRO of 1 TB per GPU, rated for 600 TB each, times "
        "2.5 for sequential writes and 86 for short retention, as SSDTrain counts.",
        "Where everything that is saved is split over the tensor-parallel ranks (sequence parallelism), or nothing is, "
        "the planner is within the published bound. Without sequence parallelism each rank saves norms and residuals "
        "whole; the planner counts them, so that it needs 2 to 2.8 times the published bound.",
        (0.95, 2.8),
    ),
    "memory": Family(
        "Memory on 2 x A100-40GB, TP 2, sequence 1024, seven P5800X (SSDTrain, arXiv 2408.10013)",
        "batches of 16; half of the peak FLOP rate; three drives for each GPU (by the configuration in SSDTrain's repository one "
        "rank has four and the other three, and tensor-parallel ranks wait for each other); as there, attention and MLP of each "
        "block leave one by one, the last MLP stays, tensors go from the device to the drives without a stage in host memory and "
        "are counted until they are written, and two modules are read ahead.",
        "No waits are predicted, as published. Which of the published reductions belongs to which model could not be read. The "
        "plan that this planner itself would choose moves parts of blocks through pinned host memory: its peak is 41 to 63% "
        "lower in at most 1% more time (0 to 36% where blocks moved as wholes).",
        (0.9, 1.25),
    ),
    "speed": Family(
        "Throughput over other systems (ProTrain, arXiv 2406.08334)",
        "4 x A100-80GB, ZeRO-3, 64 sequences of 1024 a step, microbatches of 4, optimizer state off the device; the other "
        "system recomputes every block; the widths of GPT-2 10B and 20B.",
        "The planner compares with recomputing every block, which takes at most a third longer. Where other systems keep "
        "model state, their waits for it and their optimizers on the CPU are left out, so that no gain above 4/3 is "
        "possible.",
        (0.45, 1.05),
    ),
    "size": Family(
        "Largest model on one GPU (ProTrain, arXiv 2406.08334)",
        "GPT of width 4096, one sequence of 1024; model state (16 bytes per parameter) in host memory, of which the machines "
        "have 384 GiB and 1 TiB (which could not be read); the optimizer on the CPU.",
        "Host memory bounds both sizes, not the device: at 16 bytes for each parameter 34 and 75 billion take 544 GB and "
        "1.2 TB, less what stays on the device. What ProTrain keeps for a parameter was not read; with 14 bytes (gradients "
        "in the place of parameters) host memory would hold a seventh more.",
        (0.65, 1.0),
    ),
    "ideal": Family(
        "Against unlimited memory, 2 x H100 NVL (TERAIO, arXiv 2506.06472)",
        "two pipeline stages, drives that reach 16 GB/s per GPU; microbatches of 1; batches of 128 with sequences of "
        "4096, for Llama 3 70B 256 with 2048 (its state on SSD, microbatches of 8, the largest power of two that fits); "
        "bfloat16, where the paper has full precision: twice the bytes at half of the FLOP rate, which need the same "
        "bandwidth.",
        "TERAIO moves weights, gradients and optimizer state of every model. Here state is on the device where it fits, and "
        "the model runs at full speed, above the measured mean; only that of 70 billion parameters passes through the "
        "device. The computed bandwidth is that of all activations at half of the peak FLOP rate, the "
        "published one that of what has to leave in a run whose rate was not read; a slower run needs less in proportion.",
        (0.9, 1.9),
    ),
}
"""By the name that a row gives."""

LEFT_OUT = (
    "SSDTrain: its Table III (bytes offloaded against its own estimate, and the bandwidth of three models), single "
    "values of Figures 5 to 8, and T5 of three layers, whose encoder and decoder differ in depth",
    "ProTrain: tokens per second of each model, and sizes on an RTX 4090 (what could be read is about an RTX 3090). "
    "What is here of its Tables 2 and 3 is second-hand, from the notes of a public re-implementation",
    'TERAIO: the bars of Figures 7 to 9, "near-ideal" without a number, GPT-2 40B (without its shape) and T5-11B (its '
    "heads are wider than `ssdtrain plan` can say)",
)
"""Figures whose value, or setting, is not known with certainty."""
