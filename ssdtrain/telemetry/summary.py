"""The line at the start of a run, and the table at its end."""

from __future__ import annotations

from ssdtrain.comm import Policy
from ssdtrain.config import Config
from ssdtrain.storage import SpillStore
from ssdtrain.telemetry.text import size_text
from ssdtrain.telemetry.totals import RuntimeMetrics

__all__ = ["end_of_run", "start_of_run"]


def start_of_run(config: Config, store: SpillStore | None, policy: Policy | None) -> str:
    """Where saved tensors go and how much of them, and which collectives are compressed: one line."""
    parts = []
    if store is not None and config.offload is not None:
        offload, metrics = config.offload, store.stats
        tiers = [f"host memory ({size_text(metrics.host.capacity)})"] if metrics.host is not None else []
        tiers += [f"{drive.path} ({size_text(drive.capacity)})" for drive in metrics.drives]
        parts.append(f"offload: {offload.amount} of what is saved, to {', then '.join(tiers)}")
        parts.append(f"codec: {offload.codec or 'none'}")
    if policy is not None:
        rules = [
            f"{name} {rule.inside if rule.inside == rule.between else f'{rule.inside}/{rule.between}'}"
            for name, rule in policy.rules.items()
            if not rule.off
        ]
        parts.append(f"compressed collectives: {', '.join(rules) or 'none'}")
    return " | ".join(parts)


def end_of_run(metrics: RuntimeMetrics) -> str:
    """What the run moved, waited for and saved, once at its end."""
    return f"summary of {metrics.steps} steps\n{metrics}"
