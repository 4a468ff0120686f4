"""Reads the config block from a YAML or JSON file and records duplicate keys.

The file may be malicious or not a config at all: its size, its nesting and the expansion of anchors and merges are bounded, so
that reading takes less than a second.
"""

import json
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ssdtrain.config.errors import ConfigError, ConfigIssue, printable
from ssdtrain.config.schema import Config
from ssdtrain.config.similar import resembles

KEY = "ssdtrain"
"""The key of the block in a framework's config, and the first part of every full key."""

LARGEST_FILE = 64 * 1024
"""Bytes."""
LARGEST_YAML = 10_000
"""Maximum nodes of a YAML file, and maximum keys from its merges (<<)."""
DEEPEST = 64
"""Maximum nesting in a YAML file."""
_FILE_ALLOWED = "a YAML or JSON file"


def read_block(file: str | Path, *, path: str = KEY) -> dict[str, Any]:
    """Read the block of a YAML or JSON file: the value of the key "ssdtrain" if present, else the whole file.

    Raises:
        ConfigError: the file cannot be read, is neither YAML nor JSON, is larger than `LARGEST_FILE`, or holds no block.
    """
    written = str(file)
    if Path(file).suffix not in {".json", ".yaml", ".yml"}:
        raise ConfigError([ConfigIssue(path, written, "has no known suffix", "a .yaml, .yml or .json file")])
    name = Path(file)
    try:
        name = name.expanduser()
        text = _text_of(name)
    # UnicodeError: the name or the content; RuntimeError: a ~ that leads to no home; other ValueErrors: a NUL in the name.
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError([ConfigIssue(path, written, f"cannot be read ({error})", _FILE_ALLOWED)]) from error
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
        raise ConfigError([ConfigIssue(path, written, why, _FILE_ALLOWED)]) from error
    return _block_of(content, printable(written), path)


def _text_of(name: Path) -> str:
    if name.exists() and not stat.S_ISREG(name.stat().st_mode):
        raise OSError("it is a directory, a pipe or a device, not a regular file")
    with name.open("rb") as file:
        content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise OSError(f"it is larger than the {LARGEST_FILE // 1024} KiB that a config may have")
    return content.decode("utf-8-sig")


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
    if problems:
        raise ConfigError(problems, file)
    if not isinstance(block, dict):
        raise ConfigError([ConfigIssue(path, block, f"is {where}", "a mapping of keys to values")])
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
    """PyYAML's SafeLoader, but creates `_Mapping` and enforces size limits.

    Not based on libyaml's loader, which overflows the C stack on deep nesting.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._nodes = 0
        self._depth = 0
        self._merged_keys = 0
        # Keys written in each mapping itself, without those of merges, which it may override.
        self._own: dict[yaml.MappingNode, list[yaml.Node]] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes += 1
        self._depth += 1
        if self._nodes > LARGEST_YAML:
            raise yaml.YAMLError(f"more than {LARGEST_YAML} values and keys")
        if self._depth > DEEPEST:
            raise yaml.YAMLError(_TOO_DEEP)
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def fetch_flow_collection_start(self, token_class: type[yaml.Token]) -> None:
        # The scanner reads ahead of `compose_node`, in time that grows with the square of the nesting.
        if self.flow_level >= DEEPEST:
            raise yaml.YAMLError(_TOO_DEEP)
        super().fetch_flow_collection_start(token_class)

    def construct_checked(self, node: yaml.MappingNode) -> _Mapping:
        self.flatten_mapping(node)
        written = [self.construct_object(key, deep=True) for key in self._own[node]]
        return _Mapping(self.construct_mapping(node, deep=True)).with_repeated(written)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put the keys of merges (<<) before the mapping's own, which take precedence."""
        if node in self._own:
            return
        own = [(key, value) for key, value in node.value if key.tag != _MERGE]
        self._own[node] = [key for key, _ in own]
        merged: list[tuple[yaml.Node, yaml.Node]] = []
        for key, value in node.value:
            if key.tag == _MERGE:
                for source in reversed(list(_sources(value))):
                    self.flatten_mapping(source)
                    self._merged_keys += len(source.value)
                    if self._merged_keys > LARGEST_YAML:
                        raise yaml.YAMLError(f"merges (<<) that make more than {LARGEST_YAML} keys")
                    merged += source.value
        node.value = merged + own


_TOO_DEEP = f"more than {DEEPEST} levels of nesting"
_MERGE = "tag:yaml.org,2002:merge"


def _sources(value: yaml.Node) -> Iterator[yaml.MappingNode]:
    """The mappings of a merge: one, or a sequence in which earlier ones take precedence."""
    for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
        if not isinstance(source, yaml.MappingNode):
            raise yaml.constructor.ConstructorError(
                None, None, "a merge (<<) names something other than mappings", source.start_mark
            )
        yield source


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_checked)
