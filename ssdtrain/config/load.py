"""Creates a config from a dict or a file, and reports all its errors together."""

import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import psutil
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ssdtrain import ranks
from ssdtrain.config.codecs import AUTO
from ssdtrain.config.errors import ConfigError, ConfigIssue, ConflictingValues, InvalidValue, shown_key
from ssdtrain.config.files import KEY, read_block
from ssdtrain.config.kinds import kind_of
from ssdtrain.config.offload import OffloadConfig
from ssdtrain.config.paths import DIRECTORY_ALLOWED, expand_path, has_placeholder, problem_with_directory
from ssdtrain.config.schema import Config
from ssdtrain.config.section import Section
from ssdtrain.config.similar import closest, resembles
from ssdtrain.config.units import MiB

LISTED = 20
"""Maximum unknown keys of a section that are reported individually."""

HOST_SHARE = 0.25
"""Part of the node's free memory that the ranks of a node take together for `"offload": "auto"`."""

Source = Mapping[str, Any] | Path | str | Config | None


def load_config(source: Source, *, path: str = KEY) -> Config:
    """Load and validate a config.

    Args:
        source: the block as a mapping; the path of a YAML or JSON file; a Config, which is returned unchanged; or None, which
            enables nothing.
        path: prefix of full keys in errors.

    Raises:
        ConfigError: the file cannot be read, or keys or values are invalid; lists all errors.
    """
    if isinstance(source, Config):
        return source
    if source is None:
        return Config()
    if isinstance(source, Mapping):
        return config_from_dict(source, path=path)
    if isinstance(source, str | Path):
        return config_from_dict(read_block(source, path=path), path=path, source=str(source))
    allowed = "a dict, the path of a YAML or JSON file, a Config or None"
    raise ConfigError.of(path, source, f"is a {type(source).__name__}", allowed)


def config_from_dict(block: Mapping[str, Any], *, path: str = KEY, source: str | None = None) -> Config:
    """`load_config` of a mapping; `source` is the file that it was read from, for errors."""
    problems: list[ConfigIssue] = []
    known = _known_part(block, Config, path, "", problems)
    config = None
    try:
        config = Config.model_validate(known)
    except ValidationError as error:
        problems += _from_pydantic(error, path)
    if config is not None:
        problems += _directory_problems(config, path)
    if problems or config is None:
        raise ConfigError(problems, source)
    if config.offload is not None and _is_auto(block.get("offload")):
        config.offload.model_fields_set.discard("host")  # nobody wrote it
        if config.state is not None:
            offload = beside_state(config.offload, config.state.host, ranks.local_world_size())
            config = config.model_copy(update={"offload": offload})
    return config


def beside_state(offload: OffloadConfig, nbytes: int, local_world_size: int) -> OffloadConfig:
    """Return the section with at most half of the host memory that model state leaves, where `host` is that of "auto".

    Args:
        nbytes: of model state in host memory, for each rank of the node.
    """
    if not offload.host or "host" in offload.model_fields_set:
        return offload
    host = max(MiB, min(offload.host, (_free_memory(local_world_size) - nbytes) // 2))
    return offload.model_copy(update={"host": host})


def _free_memory(local_world_size: int) -> int:
    """Bytes of the node's free memory for each of its ranks."""
    return int(psutil.virtual_memory().available) // local_world_size


def _known_part(
    block: Mapping[Any, Any], section: type[Section], path: str, within: str, problems: list[ConfigIssue]
) -> dict[str, Any]:
    """`block` without unknown keys, for each of which a problem is appended.

    Args:
        path: full key of the section.
        within: the same relative to the root of the schema, with a trailing dot.
    """
    known: dict[str, Any] = {}
    unknown: list[Any] = []
    for key in getattr(block, "repeated", ()):
        if key in section.model_fields:
            why = "is the last of several values of this key"
            problems.append(ConfigIssue(f"{path}.{key}", block[key], why, "each key once"))
    for key, value in block.items():
        field = section.model_fields.get(key) if isinstance(key, str) else None
        if field is None:
            unknown.append(key)
            continue
        inner = section_of(field)
        if inner is not None and inner.shorthand is not None and isinstance(value, str | bool):
            value = {inner.shorthand: value}
        elif inner is not None and issubclass(inner, OffloadConfig) and _is_auto(value):
            value = {"host": max(MiB, int(HOST_SHARE * _free_memory(ranks.local_world_size())))}
        if inner is not None and isinstance(value, Mapping):
            value = _known_part(value, inner, f"{path}.{key}", f"{key}.", problems)
        elif inner is not None and not isinstance(value, Section):
            auto = ' "auto",' if issubclass(inner, OffloadConfig) else ""
            allowed = f"a block of keys,{auto} or leaving it out"
            problems.append(ConfigIssue(f"{path}.{key}", value, "is not a block of keys", allowed))
            continue
        if inner is None and _is_auto(value):
            kind = kind_of(field)
            if AUTO not in kind.choices and not kind.accepts_auto:
                continue
        known[key] = value
    for key in unknown[:LISTED]:
        problems.append(_unknown_key(key, block[key], section, path, within))
    if len(unknown) > LISTED:
        why = f"and {len(unknown) - LISTED - 1} more are set, but there are no such keys"
        problems.append(
            ConfigIssue(path, unknown[LISTED], why, f"the keys {', '.join(section.model_fields)}")
        )
    return known


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == AUTO


def _unknown_key(key: Any, value: Any, section: type[Section], path: str, within: str) -> ConfigIssue:
    allowed = f"the keys {', '.join(section.model_fields)}"
    full = f"{path}.{shown_key(key)}"
    why = "is set, but there is no such key"
    root = path.removesuffix(f".{within}"[:-1]) if within else path
    hint = _similar(key, section, path, root) if isinstance(key, str) else None
    return ConfigIssue(full, value, f"{why} (did you mean {hint}?)" if hint else why, allowed)


def _similar(key: str, section: type[Section], path: str, root: str) -> str | None:
    """Suggest a full key: the same name in another section, the first that has it, or else a similar one in this section."""
    near = closest(key, section.model_fields)
    elsewhere = next((full for full in key_paths(Config, root) if full.rpartition(".")[2] == key), None)
    if near is not None and elsewhere is None:
        return f"{path}.{near}"
    if key == KEY or resembles(key, KEY):
        return f"{root}, which is one level up"
    return elsewhere


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section class of a field, or None if it holds a value."""
    annotation = field.annotation
    parts = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    for part in parts:
        if isinstance(part, type) and issubclass(part, Section):
            return part
    return None


def key_paths(section: type[Section], path: str) -> Iterator[str]:
    """The full paths of all keys that hold a value, in the order of the schema."""
    for name, field in section.model_fields.items():
        inner = section_of(field)
        if inner is None:
            yield f"{path}.{name}"
        else:
            yield from key_paths(inner, f"{path}.{name}")


def _from_pydantic(error: ValidationError, path: str) -> Iterator[ConfigIssue]:
    for found in error.errors(include_url=False):
        where = ".".join([path, *map(str, found["loc"])])
        cause = found.get("ctx", {}).get("error")
        if isinstance(cause, ConflictingValues):
            for key, value, why, allowed in cause.found:
                yield ConfigIssue(f"{where}.{key}", value, why, allowed)
        elif isinstance(cause, InvalidValue):
            yield ConfigIssue(where, found["input"], cause.why, cause.allowed)
        else:
            yield ConfigIssue(where, found["input"], "is invalid", _allowed_at(found["loc"]))


def _allowed_at(location: tuple[int | str, ...]) -> str:
    section: type[Section] = Config
    for name in location:
        field = section.model_fields[str(name)]
        inner = section_of(field)
        if inner is None:
            # The rest of the location is inside the value, such as a list index.
            return kind_of(field).allowed
        section = inner
    return "a block of keys"


def _directory_problems(config: Config, path: str) -> Iterator[ConfigIssue]:
    """Check directories that are the same on every rank; others are checked when a rank expands them."""
    named: list[tuple[str, str]] = []
    for key in ("path", "tensorboard"):
        if (given := getattr(config.report, key)) is not None:
            named.append((f"{path}.report.{key}", given))
    for name, section in (("offload", config.offload), ("state", config.state)):
        for index, text in enumerate(section.directories if section is not None else ()):
            named.append((f"{path}.{name}.directories[{index}]", text))
    for key, text in named:
        if not has_placeholder(text):
            why = problem_with_directory(expand_path(text, rank=0, local_rank=0))
            if why is not None:
                yield ConfigIssue(key, text, why, DIRECTORY_ALLOWED)
