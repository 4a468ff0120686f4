"""Generates docs/config.md from the schema: `python -m ssdtrain.config.document docs/config.md`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from ssdtrain.config.files import KEY
from ssdtrain.config.flags import FILE_FLAG, flags, to_arguments
from ssdtrain.config.kinds import kind_of
from ssdtrain.config.load import load_config, section_of
from ssdtrain.config.paths import PLACEHOLDERS
from ssdtrain.config.schema import Config
from ssdtrain.config.section import Section
from ssdtrain.config.units import DURATION_UNITS, SIZE_UNITS, exact_size, format_duration

EXAMPLE: dict[str, Any] = {
    "offload": {
        "directories": ["/nvme0/{user}/ssdtrain", "/nvme1/{user}/ssdtrain"],
        "host": "4GiB",
        "amount": 0.8,
    },
    "report": {"interval": 20},
}
"""Documented as JSON, YAML and flags."""

_INTRODUCTION = """\
# Configuration

This page is generated from the schema by `make docs`; edit `ssdtrain/config/schema.py`.

The same schema applies to the `"ssdtrain"` block of a DeepSpeed JSON, a YAML or JSON file, a Python dict and
command-line flags. An omitted key has its default, and so has a key with the value `"auto"`, except
`offload.amount` (for accelerate see deepspeed.md). A feature is disabled if its section is absent.
Unknown keys, invalid values and conflicting values are
reported together when the config is read:

```
{error}
```
"""


def document() -> str:
    """The content of docs/config.md."""
    parts = [_introduction(), _examples(), _values(), *_sections(Config, ())]
    return "\n".join(part for part in parts if part)


def _introduction() -> str:
    rejected = {"offload": {"directories": "/nvme0", "treads": 8, "host": "4G"}}
    try:
        load_config(rejected)
    except ValueError as error:
        return _INTRODUCTION.format(error=error)
    raise AssertionError(f"the example of an invalid config was accepted: {rejected}")


def _examples() -> str:
    config = load_config(EXAMPLE)
    block = config.to_dict()
    as_json = json.dumps({"train_micro_batch_size_per_gpu": 4, KEY: block}, indent=2)
    as_yaml = yaml.safe_dump(block, sort_keys=False)
    as_flags = " \\\n    ".join(_flag_lines(to_arguments(config)))
    return f"""\
## The same config in three formats

In a DeepSpeed JSON, next to DeepSpeed's own keys:

```json
{as_json}
```

In a YAML or JSON file (optionally under a key `{KEY}`), for plain PyTorch and for `{FILE_FLAG}`:

```yaml
{as_yaml}```

As flags of Megatron-LM, which take precedence over the file of `{FILE_FLAG} FILE`:

```
    {as_flags}
```
"""


def _flag_lines(arguments: list[str]) -> Iterator[str]:
    line: list[str] = []
    for argument in arguments:
        if argument.startswith("--") and line:
            yield " ".join(line)
            line = []
        line.append(f"'{argument}'" if "{" in argument else argument)
    yield " ".join(line)


def _values() -> str:
    sizes, durations = ", ".join(SIZE_UNITS), ", ".join(DURATION_UNITS)
    places = ", ".join(f"`{{{name}}}`" for name in PLACEHOLDERS)
    return f"""\
## Values

- **size**: bytes as a whole number, or a number and a unit: `"64MiB"`, `"0.5TB"`.
  Units: {sizes}; those with an i are powers of 1024. `64M` is ambiguous and invalid.
- **seconds**: a number, or a number and a unit: `10`, `"500ms"`, at most a day. Units: {durations}.
- **amount**: `"auto"`; `"all"`; a fraction such as `0.6` or `"60%"`; or a size with its unit, the bytes that are not offloaded.
- **directories**: one or a list. {places} and `~` are expanded on each rank,
  relative paths start at the working directory. Environment variables (`$`) and URLs are not supported.
"""


def _sections(section: type[Section], keys: tuple[str, ...]) -> Iterator[str]:
    title = ".".join((KEY, *keys))
    about = [line.strip() for line in (section.__doc__ or "").strip().splitlines()]
    lines = [f"## {title}", "", *about, ""]
    inner: list[tuple[type[Section], str]] = []
    rows: list[str] = []
    names = {flag.keys: flag for flag in flags()}
    for name, field in section.model_fields.items():
        below = section_of(field)
        if below is not None:
            inner.append((below, name))
            continue
        path = (*keys, name)
        flag = names[path]
        given = ", ".join(f"`{each}`" for each in flag.names)
        meaning = " ".join((field.description or "").split())
        row = [f"`{name}`", _type(field), _default(field), meaning, given]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    lines += ["| key | type | default | meaning | flag |", "|---|---|---|---|---|", *rows, ""]
    yield "\n".join(lines)
    for below, name in inner:
        yield from _sections(below, (*keys, name))


def _type(field: FieldInfo) -> str:
    kind = kind_of(field)
    if kind.choices:
        return ", ".join(f'`"{choice}"`' for choice in kind.choices)
    return kind.allowed if kind.name == "number" else kind.name


def _default(field: FieldInfo) -> str:
    value, kind = field.default, kind_of(field)
    if value is None or value == ():
        return "-"
    if kind.name == "seconds":
        return f'`"{format_duration(value)}"`'
    if kind.name == "size":
        return f'`"{exact_size(value)}"`' if value else "`0`"
    return f"`{json.dumps(kind.plain(value))}`"


def main(arguments: list[str]) -> int:
    """Write the page to the given file or to standard output."""
    if len(arguments) > 1:
        print("usage: python -m ssdtrain.config.document [FILE]", file=sys.stderr)
        return 2
    if arguments:
        Path(arguments[0]).write_text(document(), encoding="utf-8")
    else:
        print(document(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
