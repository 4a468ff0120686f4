"""Reads the config block from a YAML or JSON file and records duplicate keys."""

import json
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ssdtrain.config.errors import ConfigError, ConfigIssue, printable
from ssdtrain.config.schema import Config
from ssdtrain.config.similar import resembles

KEY = "ssdtrain"
"""The key of the block in a framework's config, and the first part of every full key."""

LARGEST_FILE = 64 * 1024
"""Maximum size of a file, in bytes."""
_FILE_ALLOWED = "a YAML or JSON file"
_DEEPEST = 16  # levels of sections that are searched for a misplaced block


def read_block(file: str | Path, *, path: str = KEY) -> dict[str, Any]:
    """Read the block of a YAML or JSON file: the value of the key "ssdtrain" if present, else the whole file.

    Raises:
        ConfigError: the file cannot be read, is neither YAML nor JSON, is larger than `LARGEST_FILE`, or holds no block.
    """
    written = str(file)
    if Path(file).suffix not in {".json", ".yaml", ".yml"}:
        raise ConfigError.of(path, written, "has no known suffix", "a .yaml, .yml or .json file")
    name = Path(file)
    try:
        name = name.expanduser()
        text = _text_of(name)
    # UnicodeError: the name or the content; RuntimeError: a ~ that leads to no home; other ValueErrors: a NUL in the name.
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError.of(path, written, f"cannot be read ({error})", _FILE_ALLOWED) from error
    try:
        content = (
            json.loads(text, object_pairs_hook=_Mapping.of_pairs)
            if name.suffix == ".json"
            else yaml.load(text, Loader=_Loader)
        )
    except Exception as error:
        # Where a value is not what its tag says, PyYAML raises ValueError, KeyError, AttributeError and more.
        message = " ".join(str(error).split())
        why = f"is not readable as {name.suffix[1:]} ({printable(message[:500])})"
        raise ConfigError.of(path, written, why, _FILE_ALLOWED) from error
    return _block_of(content, printable(written), path)


def _text_of(name: Path) -> str:
    if name.exists() and not stat.S_ISREG(name.stat().st_mode):
        raise OSError("it is a directory, a pipe or a device, not a regular file")
    with name.open("rb") as file:
        content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise OSError(f"it is larger than the {LARGEST_FILE // 1024} KiB that a config may have")
    return content.decode("utf-8-sig")


def blocks_inside(section: Any, path: str, depth: int = 1) -> Iterator[ConfigIssue]:
    """Find blocks inside of another section of a framework's config, where they are not read.

    Args:
        path: full key of `section`.
    """
    if not isinstance(section, Mapping) or depth > _DEEPEST:
        return
    for key, value in section.items():
        full = f"{path}.{key}"
        named = isinstance(key, str) and (key == KEY or resembles(key, KEY))
        if named and isinstance(value, Mapping):
            why = f"is inside of {path}, where it is not read"
            yield ConfigIssue(full, value, why, f"the key {KEY!r} at the top level of the config")
        else:
            yield from blocks_inside(value, full, depth + 1)


def _block_of(content: Any, file: str, path: str) -> dict[str, Any]:
    block, where = content, f"all of {file}"
    problems: list[ConfigIssue] = []
    if isinstance(content, dict) and KEY in content:
        block, where = content[KEY], f'the key "{KEY}" of {file}'
        beside = [key for key in Config.model_fields if key in content and key != "checkpoint"]
        problems += [
            ConfigIssue(f"{path}.{key}", content[key], f'stands beside the key "{KEY}"', f'inside "{KEY}"')
            for key in beside
        ]
        if KEY in getattr(content, "repeated", ()):
            problems.append(
                ConfigIssue(KEY, block, "is the last of several values of this key", "each key once")
            )
    elif isinstance(content, dict):
        problems += [
            ConfigIssue(
                key, content[key], f"is under an unknown key (did you mean {KEY}?)", f'the key "{KEY}"'
            )
            for key in content
            if isinstance(key, str) and resembles(key, KEY)
        ][:1]
        inside = ((key, value) for key, value in content.items() if key not in Config.model_fields)
        problems += [problem for key, value in inside for problem in blocks_inside(value, str(key))]
    if problems:
        raise ConfigError(problems, file)
    if not isinstance(block, dict):
        raise ConfigError.of(path, block, f"is {where}", "a mapping of keys to values")
    return block


class _Mapping(dict[Any, Any]):
    """A dict that records the duplicate keys of its source, of which JSON and YAML readers silently keep the last."""

    repeated: tuple[Any, ...] = ()

    @classmethod
    def of_pairs(cls, pairs: list[tuple[Any, Any]]) -> "_Mapping":
        return cls(pairs).with_repeated([key for key, _ in pairs])

    def with_repeated(self, written: list[Any]) -> "_Mapping":
        counts = Counter(written)
        self.repeated = tuple(key for key in self if counts[key] > 1)
        return self


class _Loader(yaml.SafeLoader):
    """PyYAML's SafeLoader, but creates `_Mapping`. Not libyaml's, which overflows the C stack on deep nesting."""

    def construct_recorded(self, node: yaml.MappingNode) -> _Mapping:
        # Keys of merges (<<) come first, and are overridden by those written in the mapping itself.
        written = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != _MERGE]
        return _Mapping(self.construct_mapping(node, deep=True)).with_repeated(written)


_MERGE = "tag:yaml.org,2002:merge"
_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_recorded)
