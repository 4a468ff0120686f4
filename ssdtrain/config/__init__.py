"""The configuration of SSDTrain: one schema for a framework's JSON config, YAML, Python dicts and command-line flags.

Contains the schema (`schema`, with the sections `offload`, `state`, `comm` and `plan`), parsers of values (`units`, `amount`,
`paths`, `codecs`, `kinds`), loading and validation (`load`, `files`, `errors`), and what is generated from the schema: flags
(`flags`) and docs/config.md (`document`). The public names are in `__all__`. Imports neither torch nor any other package of
ssdtrain, and creates no directory.
"""

from ssdtrain.config.amount import Amount, parse_amount
from ssdtrain.config.comm import DIMENSIONS, CommConfig
from ssdtrain.config.errors import ConfigError, ConfigIssue, InvalidValue
from ssdtrain.config.load import load_config
from ssdtrain.config.offload import EnduranceConfig, OffloadConfig
from ssdtrain.config.plan import PlanConfig
from ssdtrain.config.schema import CheckpointConfig, CompactConfig, Config, ReportConfig
from ssdtrain.config.state import StateConfig
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
    "ConfigIssue",
    "EnduranceConfig",
    "InvalidValue",
    "OffloadConfig",
    "PlanConfig",
    "ReportConfig",
    "StateConfig",
    "exact_size",
    "format_duration",
    "format_size",
    "load_config",
    "parse_amount",
    "parse_duration",
    "parse_fraction",
    "parse_size",
]
