"""Bytes to host memory and drives, and back: the I/O pool, the arena, the spill files, their tiers, drives
and budgets.

Knows bytes, addresses and file descriptors, nothing of tensors or torch. May import `ssdtrain.config`. It
never reads back bytes that it did not write, never turns a failed transfer into data, and leaves no name and
no space on a drive after its process ends.
"""

from ssdtrain.storage.arena import Arena, Lease
from ssdtrain.storage.budget import HostBudget, check_host_budget
from ssdtrain.storage.drive import Drive, SmartLog, drive_of
from ssdtrain.storage.endurance import Endurance, projected_life, rated_bytes
from ssdtrain.storage.errors import (
    HostBudgetExceeded,
    IOCancelled,
    IOFailure,
    SourceChanged,
    StoreClosed,
    StoreFull,
)
from ssdtrain.storage.faults import Faults
from ssdtrain.storage.memory import ALIGNMENT
from ssdtrain.storage.metrics import EnduranceMetrics, StoreMetrics, TierMetrics
from ssdtrain.storage.pool import Operation, Pool, make_pool
from ssdtrain.storage.section import Section, defer_signals, inside_section, make_section
from ssdtrain.storage.slot import Slot
from ssdtrain.storage.store import SpillStore

__all__ = [
    "ALIGNMENT",
    "Arena",
    "Drive",
    "Endurance",
    "EnduranceMetrics",
    "Faults",
    "HostBudget",
    "HostBudgetExceeded",
    "IOCancelled",
    "IOFailure",
    "Lease",
    "Operation",
    "Pool",
    "Section",
    "Slot",
    "SmartLog",
    "SourceChanged",
    "SpillStore",
    "StoreClosed",
    "StoreFull",
    "StoreMetrics",
    "TierMetrics",
    "check_host_budget",
    "defer_signals",
    "drive_of",
    "inside_section",
    "make_pool",
    "make_section",
    "projected_life",
    "rated_bytes",
]
