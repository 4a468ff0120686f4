"""How much of a microbatch's saved tensors is offloaded: everything, a fraction, all but some bytes, or as much as can be
hidden."""

from dataclasses import dataclass
from typing import Any, Literal

from ssdtrain.config.errors import InvalidValue
from ssdtrain.config.units import exact_size, parse_fraction, parse_size

AMOUNT_ALLOWED = (
    '"all", "auto", a fraction of the saved bytes such as 0.6 or "60%", '
    'or a size with its unit such as "512MiB" (bytes that are kept, the last saved)'
)


@dataclass(frozen=True)
class Amount:
    """Value of `offload.amount`.

    Tensors that are not offloaded are the last ones saved, because backward needs them first, which leaves the least time to
    read them back (arXiv 2408.10013).
    """

    kind: Literal["all", "auto", "fraction", "keep"]
    value: float | int = 1.0
    """all, auto: 1.0. fraction: the share of a tape's bytes that is offloaded, 0 <= value < 1. keep: bytes of a
    tape that stay."""

    def __post_init__(self) -> None:
        whole = self.value == 1
        fits = {"all": whole, "auto": whole, "fraction": 0 <= self.value < 1, "keep": self.value >= 0}
        if self.kind not in fits:
            raise InvalidValue(f'has the unknown kind "{self.kind}"', '"all", "auto", "fraction", "keep"')
        if not fits[self.kind]:
            raise InvalidValue(
                f"has the value {self.value}, which the kind {self.kind} cannot have", AMOUNT_ALLOWED
            )

    def __str__(self) -> str:
        return str(self.plain())

    @property
    def is_nothing(self) -> bool:
        """Whether nothing is offloaded, whatever is saved."""
        return self.kind == "fraction" and not self.value

    def plain(self) -> str | float:
        """The same amount as a config file writes it."""
        if self.kind in ("all", "auto"):
            return self.kind
        return float(self.value) if self.kind == "fraction" else exact_size(int(self.value))


def parse_amount(value: Any) -> Amount:
    """Reads "all", "auto", a fraction (0.6, "0.6", "60%") or the bytes to keep ("512MiB").

    A bare number above 1 is rejected: 60 may mean a percentage or bytes. 1 and "100%" are "all".

    Raises:
        InvalidValue: none of these.
    """
    if isinstance(value, Amount):
        return value
    try:
        if isinstance(value, str):
            text = value.strip()
            if text.lower() == "all":
                return Amount("all")
            if text.lower() == "auto":
                return Amount("auto")
            if text[-1:].isalpha():
                return Amount("keep", parse_size(text))
        fraction = parse_fraction(value)
    except InvalidValue as error:
        bare = error.why == "is more than 1" and not (isinstance(value, str) and "%" in value)
        raise InvalidValue(f"{error.why} and has no unit" if bare else error.why, AMOUNT_ALLOWED) from None
    return Amount("all") if fraction == 1 else Amount("fraction", fraction)
