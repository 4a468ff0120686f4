"""Command-line flags generated from the schema, and the config of parsed flags.

The default of every flag is None, meaning not given: defaults are in the schema, and a given flag takes precedence over the
file of --ssdtrain-config.
"""

import argparse
import functools
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ssdtrain.config.codecs import AUTO
from ssdtrain.config.errors import InvalidValue
from ssdtrain.config.files import KEY, read_block
from ssdtrain.config.kinds import ValueKind, kind_of
from ssdtrain.config.load import config_from_dict, section_of
from ssdtrain.config.schema import Config
from ssdtrain.config.section import Section
from ssdtrain.config.similar import closest, resembles

logger = logging.getLogger("ssdtrain")

FILE_FLAG = f"--{KEY}-config"
FILE_DEST = f"{KEY}_config"


@dataclass(frozen=True)
class Flag:
    """The flag of one key. A boolean key has a second flag, --no-..., for false."""

    name: str
    """Name, for example "--ssdtrain-offload-directories"."""
    dest: str
    """Attribute of the namespace, for example "ssdtrain_offload_directories"."""
    keys: tuple[str, ...]
    """Path in the block, for example ("offload", "directories")."""
    kind: ValueKind
    boolean: bool
    help: str

    @property
    def names(self) -> tuple[str, ...]:
        """The flag, and its opposite if it is a boolean."""
        return (self.name, self.name.replace("--", "--no-", 1)) if self.boolean else (self.name,)

    @property
    def path(self) -> str:
        """The full key, for example "ssdtrain.offload.directories"."""
        return ".".join((KEY, *self.keys))

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Add the flag to a parser or argument group."""
        # argparse formats help texts with %.
        common: dict[str, Any] = {"dest": self.dest, "default": None, "help": self.help.replace("%", "%%")}
        if self.boolean:
            parser.add_argument(self.name, action=argparse.BooleanOptionalAction, **common)
            return
        if self.kind.choices:
            common["choices"] = tuple(dict.fromkeys((*self.kind.choices, AUTO)))
        else:
            common["metavar"] = self.kind.name.upper()
        if self.kind.many:
            common.update(nargs="+", action=_LastList)
        parser.add_argument(self.name, type=self._read, **common)

    def _read(self, text: str) -> Any:
        """Validate a value while argparse can still name the flag. Returns a plain value.

        Frameworks print their namespace and save it in checkpoints, so it contains strings and numbers only.
        """
        if text == AUTO:
            return text
        try:
            value = self.kind.text(text)
            self.kind.parse([value] if self.kind.many else value)
        except InvalidValue as error:
            raise argparse.ArgumentTypeError(f"{text!r} {error}") from None
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is invalid; allowed: {self.kind.allowed}") from None
        return value


class _LastList(argparse.Action):
    """Stores a list. Of several, the last is taken, as argparse does by itself, and a warning says so."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        earlier = getattr(namespace, self.dest, None)
        if earlier is not None and earlier != values:
            logger.warning(
                "%s is given more than once, and the last list replaces the others: %s is dropped, %s is taken; give one list "
                "of all",
                option_string,
                earlier,
                values,
            )
        setattr(namespace, self.dest, values)


def flags(section: type[Section] = Config, keys: tuple[str, ...] = ()) -> Iterator[Flag]:
    """The flags of all keys, in the order of the schema."""
    for name, field in section.model_fields.items():
        path = (*keys, name)
        inner = section_of(field)
        if inner is not None:
            yield from flags(inner, path)
            continue
        words = [KEY, *(keys if name == section.shorthand else path)]
        kind = kind_of(field)
        yield Flag(
            name="--" + "-".join(words).replace("_", "-"),
            dest="_".join(words),
            keys=path,
            kind=kind,
            boolean=field.annotation is bool,
            help=" ".join((field.description or "").split()),
        )


def check_unknown_flags(parser: argparse.ArgumentParser) -> None:
    """Make `parse_known_args`, which ignores unknown flags, report misspelled SSDTrain flags as errors with a suggestion."""
    known = [FILE_FLAG, *(name for flag in flags() for name in flag.names)]
    plain = parser.parse_known_args

    @functools.wraps(plain)
    def parse_known_args(*args: Any, **kwargs: Any) -> Any:
        namespace, unknown = plain(*args, **kwargs)
        for argument in unknown:
            name = argument.partition("=")[0]
            if _is_meant_for(name):
                near = closest(name, known)
                parser.error(
                    f"unrecognized arguments: {name[:80]}" + (f" (did you mean {near}?)" if near else "")
                )
        return namespace, unknown

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def _is_meant_for(name: str) -> bool:
    """Whether the first word of a flag (after "--" or "--no-") is the plugin's name or a misspelling of it."""
    if not name.startswith("-"):
        return False
    word = name.lstrip("-").replace("_", "-").removeprefix("no-").partition("-")[0]
    return word == KEY or resembles(word, KEY)


def add_flags(parser: argparse._ActionsContainer) -> None:
    """Add --ssdtrain-config and the flags of all keys to a parser or argument group."""
    parser.add_argument(
        FILE_FLAG,
        dest=FILE_DEST,
        default=None,
        metavar="FILE",
        help="A YAML or JSON file with the SSDTrain config. Given flags take precedence over it.",
    )
    for flag in flags():
        flag.add_to(parser)


def from_namespace(args: argparse.Namespace) -> dict[str, Any] | None:
    """The block of parsed flags, merged over the file; None if neither was given.

    Attributes missing from the namespace (restored from a checkpoint of a run without SSDTrain) count as not given.

    Raises:
        ConfigError: the file cannot be read or holds no block.
    """
    file = getattr(args, FILE_DEST, None)
    given = [(flag, getattr(args, flag.dest, None)) for flag in flags()]
    given = [(flag, value) for flag, value in given if value is not None]
    if file is None and not given:
        return None
    block = {} if file is None else read_block(file)
    for flag, value in given:
        place = block
        section: type[Section] | None = Config
        for key in flag.keys[:-1]:
            section = section_of(section.model_fields[key]) if section is not None else None
            word = section.shorthand if section is not None else None
            if word is not None and isinstance(place, dict) and isinstance(place.get(key), str | bool):
                place[key] = {word: place[key]}
            # config_from_dict reports a section that is not a mapping in the file.
            place = place.setdefault(key, {}) if isinstance(place, dict) else place
        if isinstance(place, dict):
            # A flag that takes several values gives a list.
            place[flag.keys[-1]] = AUTO if value == [AUTO] else value
    return block


def config_from_namespace(args: argparse.Namespace) -> Config | None:
    """The config of parsed flags; None if neither a flag nor a file was given.

    Raises:
        ConfigError: as `load_config`; flags and the file together are one config.
    """
    block = from_namespace(args)
    if block is None:
        return None
    return config_from_dict(block, source=getattr(args, FILE_DEST, None))


def to_arguments(config: Config) -> list[str]:
    """The command line equivalent to `config`, without keys at their defaults."""
    block = config.to_dict()
    found: list[str] = []
    for flag in flags():
        value: Any = block
        for key in flag.keys:
            value = value.get(key) if isinstance(value, dict) else None
        if value is None:
            continue
        if flag.boolean:
            found.append(flag.names[0 if value else 1])
        else:
            found += [flag.name, *map(_text, value if flag.kind.many else [value])]
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
