"""One schema for what is asked of SSDTrain, read from a block of a framework's JSON config, YAML, Python and
command-line flags.

Lives here: the schema (`schema`), the units people write (`units`, `amount`, `paths`, `kinds`), reading and
refusing (`load`, `errors`), and what is generated from the schema: flags (`flags`) and docs/config.md
(`document`). Import from this package: what `__all__` names. Nothing here imports torch or any other room of
ssdtrain, makes a directory, or knows what the engine does with a value.
"""

from ssdtrain.config.amount import Amount, parse_amount
from ssdtrain.config.errors import ConfigError, Problem, Refusal
from ssdtrain.config.load import load_config
from ssdtrain.config.schema import (
    DIMENSIONS,
    CheckpointConfig,
    CommConfig,
    CompactConfig,
    Config,
    OffloadConfig,
    ReportConfig,
)
from ssdtrain.config.units import (
    exact_size,
    format_duration,
    format_size,
    parse_duration,
    parse_fraction,
    parse_size,
)

__all__ = [
    "DIMENSIONS",
    "Amount",
    "CheckpointConfig",
    "CommConfig",
    "CompactConfig",
    "Config",
    "ConfigError",
    "OffloadConfig",
    "Problem",
    "Refusal",
    "ReportConfig",
    "exact_size",
    "format_duration",
    "format_size",
    "load_config",
    "parse_amount",
    "parse_duration",
    "parse_fraction",
    "parse_size",
]
