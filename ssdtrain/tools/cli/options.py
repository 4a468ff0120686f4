"""Types of command-line options, and the options for a machine. An invalid value is a usage error that names the option, the
value and what is allowed."""

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

from ssdtrain.config.errors import InvalidValue
from ssdtrain.config.units import GiB, parse_size
from ssdtrain.text import size_text
from ssdtrain.tools.whatif.hardware import GPUS, find_gpu, parse_rate, parse_ssds

__all__ = ["add_machine", "command_parser", "given", "number", "rate", "size", "whole"]

T = TypeVar("T")
F = TypeVar("F", int, float)


def command_parser(command: str, description: str | None, examples: str = "") -> argparse.ArgumentParser:
    """Make the parser of a command, whose description and examples are shown as they are written."""
    return argparse.ArgumentParser(
        prog=f"ssdtrain {command}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def given(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse` as an argparse type: an InvalidValue becomes an error of usage."""

    def converted(text: str) -> T:
        try:
            return parse(text)
        except InvalidValue as error:
            raise argparse.ArgumentTypeError(f'"{text}" {error}') from None

    return converted


def _figure(
    convert: Callable[[str], F], what: str, allowed: str, zero: bool, most: float
) -> Callable[[str], F]:
    def parse(text: str) -> F:
        try:
            found = convert(text)
        except ValueError:
            raise InvalidValue(f"is not {what}", allowed) from None
        if isinstance(found, float) and not math.isfinite(found):
            raise InvalidValue("is not finite", allowed)
        if found < 0:
            raise InvalidValue("is negative", allowed)
        if not found and not zero:
            raise InvalidValue("is 0", allowed)
        if found > most:
            raise InvalidValue(f"is above {most:g}", allowed)
        return found

    return given(parse)


def number(allowed: str, *, zero: bool = True, most: float = math.inf) -> Callable[[str], float]:
    """An argparse type: a finite number that is not negative.

    Args:
        allowed: ends the error, such as "dollars of one drive, such as 400".
        zero: 0 is allowed.
        most: the largest value that is allowed.
    """
    return _figure(float, "a number", allowed, zero, most)


def whole(
    allowed: str = "a whole number above 0", *, zero: bool = False, most: float = math.inf
) -> Callable[[str], int]:
    """An argparse type: a whole number above 0, or with `zero` 0 too. The arguments are those of `number`."""
    return _figure(int, "a whole number", allowed, zero, most)


def size(least: int) -> Callable[[str], int]:
    """An argparse type: bytes, of "64MiB" or a whole number, and no fewer than `least`."""

    def parse(text: str) -> int:
        found = parse_size(text)
        if found < least:
            raise InvalidValue("is too little to measure", f"{size_text(least)} and more")
        return found

    return given(parse)


def rate(text: str) -> float:
    """An argparse type: bytes per second above 0, of "50GB/s" or "400Gbit/s"."""
    found = given(parse_rate)(text)
    if not found:
        raise argparse.ArgumentTypeError(f'"{text}" is 0; allowed: above 0, such as "50GB/s" or "400Gbit/s"')
    return found


def add_machine(parser: argparse._ActionsContainer, node: int | None) -> None:
    """Add --gpu, --ssd, --gpus-per-node, --reserve, --efficiency and --json.

    Args:
        node: default of --gpus-per-node.
    """
    parser.add_argument("--gpu", type=given(find_gpu), required=True, help=", ".join(GPUS))
    parser.add_argument(
        "--ssd",
        type=given(parse_ssds),
        help='drives of a node: "4 x 7GB/s", "2 x 7GB/s, write 5GB/s, 3.84TB, 1 DWPD"',
    )
    parser.add_argument(
        "--gpus-per-node",
        type=whole(),
        default=node,
        help="GPUs of a node, which share its drives and host memory; default: 8",
    )
    parser.add_argument(
        "--reserve",
        type=given(parse_size),
        default=4 * GiB,
        help="device memory that is neither model state nor activations; default: 4GiB",
    )
    parser.add_argument(
        "--efficiency",
        type=number("above 0, at most 1", zero=False, most=1),
        default=0.5,
        help="achieved share of the GPU's peak FLOP rate; default: 0.5",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
