"""Storage: moves bytes between host memory and drives.

Contains the I/O pool, the arena of host buffers, the spill files, the tiers, drive information and budgets.

Works on addresses and file descriptors, independently of tensors and torch. May import `ssdtrain.config` and the metric
registry. Guarantees: only written bytes are read back, a failed transfer is always an error, and no file or space is left on a
drive when the process ends.
"""

from ssdtrain.storage.arena import Arena, Lease
from ssdtrain.storage.budget import HostBudget, check_host_budget
from ssdtrain.storage.drive import Drive, SmartLog, drive_of
from ssdtrain.storage.endurance import Endurance, Rating, projected_life, rated_bytes
from ssdtrain.storage.errors import (
    CorruptedData,
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
from ssdtrain.storage.records import record
from ssdtrain.storage.signal_safe_lock import (
    SignalSafeLock,
    defer_signals,
    holds_signal_safe_lock,
    make_signal_safe_lock,
    signals_deferred,
)
from ssdtrain.storage.slot import Slot
from ssdtrain.storage.store import SpillStore

__all__ = [
    "ALIGNMENT",
    "Arena",
    "CorruptedData",
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
    "Rating",
    "SignalSafeLock",
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
    "holds_signal_safe_lock",
    "make_pool",
    "make_signal_safe_lock",
    "projected_life",
    "rated_bytes",
    "record",
    "signals_deferred",
]
