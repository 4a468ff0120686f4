"""Megatron-LM's command line: the --ssdtrain-* flags and the config they ask for."""

import argparse

from ssdtrain.config import Config
from ssdtrain.config.flags import add_flags, config_from_namespace


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the group "ssdtrain" to `parser` and returns it, as Megatron's `extra_args_provider` does."""
    add_flags(parser.add_argument_group(title="ssdtrain"))
    return parser


def config_from_args(args: argparse.Namespace) -> Config | None:
    """The config that the parsed flags ask for; None where no --ssdtrain-* flag was given.

    Raises:
        ConfigError: keys or values are refused, in the flags or in the file of --ssdtrain-config.
    """
    return config_from_namespace(args)
