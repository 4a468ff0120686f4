"""How long a drive lasts under a training run.

Activations are written in large sequential pieces and kept for seconds, so a drive takes far more of them than its rating,
which is measured with small random writes and a year's retention (SSDTrain, arXiv 2408.10013). The figures here
are by the rating, and so on the safe side.
"""

SECONDS_PER_YEAR = 365 * 86400


def rated_bytes(size: int, *, writes_per_day: float = 1.0, years: float = 5.0) -> float:
    """TBW in bytes, where the vendor's figure is not known: capacity x drive writes per day x warranty."""
    return size * writes_per_day * 365 * years


def projected_life(rated: float, bytes_per_step: float, step_seconds: float) -> float:
    """Seconds until `rated` bytes are written, by a run that writes `bytes_per_step` every `step_seconds`.

    Infinite where nothing is written.
    """
    if bytes_per_step <= 0:
        return float("inf")
    if step_seconds <= 0:
        raise ValueError(f"a step takes time, got {step_seconds} seconds")
    return rated / bytes_per_step * step_seconds
