"""Reads the block out of a YAML or JSON file, remembering keys that the file wrote twice."""

import json
from pathlib import Path
from typing import Any

import yaml

from ssdtrain.config.errors import ConfigError, Problem
from ssdtrain.config.schema import LATER, Config

KEY = "ssdtrain"
"""The key of the block in a DeepSpeed config, and the first part of every key that an error names."""


def read_block(file: str | Path, *, path: str = KEY) -> dict[str, Any]:
    """The block in a YAML or JSON file: what stands under the key "ssdtrain" if there is one, else the whole
    file.

    Raises:
        ConfigError: the file cannot be read, is neither YAML nor JSON, or holds no block.
    """
    name = Path(file).expanduser()
    try:
        text = name.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            [Problem(path, str(file), f"cannot be read ({error})", "a YAML or JSON file")]
        ) from error
    if name.suffix not in {".json", ".yaml", ".yml"}:
        raise ConfigError([Problem(path, str(file), "has no known suffix", "a .yaml, .yml or .json file")])
    try:
        content = (
            json.loads(text, object_pairs_hook=_Mapping.of_pairs)
            if name.suffix == ".json"
            else yaml.load(text, Loader=_Loader)
        )
    except Exception as error:
        # Where a value is not what its tag says, PyYAML raises ValueError, KeyError, AttributeError and more.
        why = f"is not readable as {name.suffix[1:]} ({' '.join(str(error).split())})"
        raise ConfigError([Problem(path, str(file), why, "a YAML or JSON file")]) from error
    return _block_of(content, str(file), path)


def _block_of(content: Any, file: str, path: str) -> dict[str, Any]:
    block, where = content, f"all of {file}"
    if isinstance(content, dict) and KEY in content:
        block, where = content[KEY], f'the key "{KEY}" of {file}'
        beside = [key for key in (*Config.model_fields, *LATER) if key in content and key != "checkpoint"]
        problems = [
            Problem(f"{path}.{key}", content[key], f'stands beside the key "{KEY}"', f'inside "{KEY}"')
            for key in beside
        ]
        if KEY in getattr(content, "repeated", ()):
            problems.append(Problem(KEY, block, "is the last of several values of this key", "each key once"))
        if problems:
            raise ConfigError(problems, file)
    if not isinstance(block, dict):
        raise ConfigError([Problem(path, block, f"is {where}", "a mapping of keys to values")])
    return block


class _Mapping(dict[Any, Any]):
    """A dict that remembers which keys its source wrote more than once; JSON and YAML readers keep the last
    in silence."""

    repeated: tuple[Any, ...] = ()

    @classmethod
    def of_pairs(cls, pairs: list[tuple[Any, Any]]) -> "_Mapping":
        mapping = cls(pairs)
        keys = [key for key, _ in pairs]
        mapping.repeated = tuple(key for key in mapping if keys.count(key) > 1)
        return mapping


class _Loader(yaml.SafeLoader):
    """PyYAML's SafeLoader, except that it builds `_Mapping`."""

    def construct_checked(self, node: yaml.MappingNode) -> _Mapping:
        # A merge (<<) brings keys that the mapping may repeat on purpose: only those written here are counted.
        own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        written = [self.construct_object(key, deep=True) for key in own]
        self.flatten_mapping(node)
        mapping = _Mapping(self.construct_mapping(node, deep=True))
        mapping.repeated = tuple(key for key in mapping if written.count(key) > 1)
        return mapping


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_checked)
