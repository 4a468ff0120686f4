"""The section `offload.endurance` of the schema."""

from collections.abc import Iterator

from ssdtrain.config.kinds import Positive, PositiveSize
from ssdtrain.config.section import Conflict, Section

__all__ = ["EnduranceConfig"]


class EnduranceConfig(Section):
    """How long the drives should live at the rate of this run, day and night. With `amount: "auto"` no more is written than they
    bear; with another amount a warning says how much that is (docs/endurance.md)."""

    years: Positive = 5.0
    """From now on."""

    dwpd: Positive | None = None
    """The rating of the drives: writes of their capacity per day, over a warranty of 5 years. Default: 1, unless `tbw` is
    given."""

    tbw: PositiveSize | None = None
    """The rating of each drive in bytes written, such as "1200TB", in place of `dwpd`."""

    def conflicts(self) -> Iterator[Conflict]:
        if self.dwpd is not None and self.tbw is not None:
            why = "is a rating, and tbw gives another"
            yield "dwpd", self.dwpd, why, "leaving one of them out"
