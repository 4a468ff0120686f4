"""What a job costs: hours of GPUs, and the life of drives that writes use up."""

from __future__ import annotations

from dataclasses import dataclass

from ssdtrain.config.errors import InvalidValue
from ssdtrain.planner.plans import Objective
from ssdtrain.tools.whatif.cluster_job import ClusterJob
from ssdtrain.tools.whatif.cluster_plan import ClusterPlan

__all__ = ["Prices"]


@dataclass(frozen=True)
class Prices:
    """Prices in dollars, or any other currency.

    Attributes:
        gpu_hour: of one GPU, with its part of the node and the network.
        drive: of a new drive, which is used up by its endurance; 0: writes cost nothing.
    """

    gpu_hour: float
    drive: float = 0.0

    def objective(self, job: ClusterJob) -> Objective:
        """The cheapest step, for each GPU.

        Raises:
            InvalidValue: drives have a price and no endurance.
        """
        return Objective(self.gpu_hour / 3600, 0.0, self._per_byte(job))

    def of_step(self, plan: ClusterPlan) -> float:
        """Cost of all GPUs, and of what they write; the busiest pipeline stage stands for the others."""
        ranks = plan.job.layout.ranks
        written = plan.written_per_step() * self._per_byte(plan.job)
        return ranks * (plan.step_seconds * self.gpu_hour / 3600 + written)

    def tokens_per_dollar(self, plan: ClusterPlan) -> float:
        return plan.tokens_per_second * plan.step_seconds / self.of_step(plan)

    def figures(self, plan: ClusterPlan) -> dict[str, float]:
        """Return plain data."""
        return {
            "dollars_per_step": self.of_step(plan),
            "dollars_per_billion_tokens": 1e9 / self.tokens_per_dollar(plan),
        }

    def _per_byte(self, job: ClusterJob) -> float:
        if job.ssds is None or not self.drive:
            return 0.0
        if not job.ssds.endurance:
            raise InvalidValue(
                "has drives with a price and no endurance", 'as in "4 x 7GB/s, 3.84TB, 1 DWPD"'
            )
        return self.drive / job.ssds.endurance
