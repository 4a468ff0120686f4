"""Megatron-LM's command line: the --ssdtrain-* flags and the config they ask for."""

import argparse

from ssdtrain.config import DIMENSIONS, Config, ConfigError, Problem
from ssdtrain.config.flags import add_flags, check_unknown_flags, config_from_namespace, from_namespace


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the group "ssdtrain" to `parser` and returns it, as Megatron's `extra_args_provider` does.

    A misspelled --ssdtrain flag is an error from then on, also with Megatron's --ignore-unknown-args.
    """
    add_flags(parser.add_argument_group(title="ssdtrain"))
    check_unknown_flags(parser)
    return parser


def config_from_args(args: argparse.Namespace) -> Config | None:
    """The config that the parsed flags ask for; None where no --ssdtrain-* flag was given.

    Raises:
        ConfigError: keys or values are invalid, in the flags or in the file of --ssdtrain-config, a report is to be written
            and nothing is enabled that it would be about, keys of comm are given and nothing that compresses, or a plan is to
            compress inputs of linear layers.
    """
    plan = (from_namespace(args) or {}).get("plan")
    if isinstance(plan, dict) and plan.get("compress") is True:
        why = (
            "cannot work under Megatron: a plan compresses inputs of linear layers with ssdtrain.attach only"
        )
        allowed = (
            "leaving it out: what --ssdtrain-compact-* says is compressed in every layer, without this key"
        )
        raise ConfigError([Problem("ssdtrain.plan.compress (--ssdtrain-plan-compress)", True, why, allowed)])
    config = config_from_namespace(args)
    comm = config.comm if config is not None and config.enabled else None
    if comm is not None and comm.model_fields_set.isdisjoint(("preset", *DIMENSIONS)):
        why = "would compress nothing: neither a preset nor a codec is chosen"
        allowed = "together with --ssdtrain-comm-preset, or a codec such as --ssdtrain-comm-dp int8, or leaving it out"
        given = {key: getattr(comm, key) for key in comm.model_fields_set}
        raise ConfigError([Problem("ssdtrain.comm", given, why, allowed)])
    if config is not None and config.enabled and not config.active:
        why = "would get no report: neither offloading nor compression is enabled"
        allowed = "together with --ssdtrain-offload-directories or --ssdtrain-comm-preset, or leaving it out"
        given = {
            key: value
            for key in ("path", "tensorboard")
            if (value := getattr(config.report, key)) is not None
        }
        if given:
            raise ConfigError(
                [
                    Problem(f"ssdtrain.report.{key} (--ssdtrain-report-{key})", value, why, allowed)
                    for key, value in given.items()
                ]
            )
    return config


def keys_without_effect(config: Config) -> str:
    """What a config that is enabled has and nothing in it uses, as a line for the log; "" where there is no such thing."""
    if not config.enabled:
        return ""
    given = ", ".join(f"ssdtrain.{name}" for name in sorted(config.model_fields_set - {"enabled"}))
    if not config.active:
        return f"nothing is enabled (no offload, comm, compact or plan), so {given or 'the config'} is without effect"
    if "checkpoint" in config.model_fields_set and config.offload is None and not config.plans:
        return "ssdtrain.checkpoint is without effect: only offload and plan replace Megatron's checkpoint function"
    return ""
