"""Megatron-LM's command line: the --ssdtrain-* flags and the config they ask for."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ssdtrain.config import DIMENSIONS, Config, ConfigError
from ssdtrain.config.flags import add_flags, check_unknown_flags, config_from_namespace, from_namespace
from ssdtrain.integration.patching import Patches
from ssdtrain_megatron.planned_state import refuse_state_limit


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the group "ssdtrain" to `parser` and returns it, as Megatron's `extra_args_provider` does.

    A misspelled --ssdtrain flag is an error from then on, also with Megatron's --ignore-unknown-args.
    """
    add_flags(parser.add_argument_group(title="ssdtrain"))
    check_unknown_flags(parser)
    return parser


def given_flags(arguments: Sequence[str]) -> list[str]:
    """The flags of ours in a command line, as they are written there."""
    return [argument for argument in arguments if argument.startswith(("--ssdtrain-", "--no-ssdtrain-"))]


class UnusedFlags:
    """Flags of the command line that nobody has asked for by `config_from_args`. Where a schedule of megatron-core trains before
    that, they are an error."""

    def __init__(self) -> None:
        self._flags: list[str] = []
        self._patches = Patches()

    def expect(self, arguments: Sequence[str]) -> None:
        """Take the flags in a command line for unused ones, if they enable anything and it does not only ask for help.

        Raises:
            SystemExit: a flag is misspelled, or its value is invalid.
            ConfigError: as `config_from_args`.
        """
        self._flags = [] if {"-h", "--help"}.intersection(arguments) else given_flags(arguments)
        if self._flags:
            usage = "SCRIPT [its arguments and --ssdtrain-* flags]"
            parser = argparse.ArgumentParser(usage=usage, add_help=False, allow_abbrev=False)
            config = _config_of(add_arguments(parser).parse_known_args(list(arguments))[0])
            if config is None or not config.active:
                self._flags.clear()

    def watch(self, forward_step: Sequence[tuple[Any, str]]) -> None:
        """Call `check` in the places of the schedules' `forward_step`, where it runs with gradients."""
        if self._flags:
            self._patches.replace_all({"forward_step": forward_step}, {"forward_step": self._checked})

    def _checked(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                self.check("this script trains by Megatron's schedules, and nothing is attached to its model")
            return plain(*args, **kwargs)

        return forward_step

    def used(self) -> None:
        """The flags are known to whoever attaches."""
        self._flags.clear()
        self._patches.undo()

    def check(self, why: str) -> None:
        """Raise ConfigError if there are flags; `why` says how it is known that they are not used."""
        if self._flags:
            allowed = (
                "a script that calls Megatron's pretrain, or in a loop of its own ssdtrain_megatron.attach(model, "
                "ssdtrain_megatron.config_from_args(get_args()), optimizer=optimizer), or no such flags"
            )
            flags = ", ".join(self._flags)
            raise ConfigError.of("the command line", flags, f"is without effect: {why}", allowed)


unused_flags = UnusedFlags()
"""The ones of this process."""


def config_from_args(args: argparse.Namespace) -> Config | None:
    """The config that the parsed flags ask for; None where no --ssdtrain-* flag was given.

    Raises:
        ConfigError: keys or values are invalid, in the flags or in the file of --ssdtrain-config, keys of comm are given and
            nothing that compresses, or a plan is to compress inputs of linear layers.
    """
    unused_flags.used()
    return _config_of(args)


def _config_of(args: argparse.Namespace) -> Config | None:
    plan = (from_namespace(args) or {}).get("plan")
    if isinstance(plan, dict) and plan.get("compress") is True:
        why = (
            "cannot work under Megatron: a plan compresses inputs of linear layers with ssdtrain.attach only"
        )
        allowed = (
            "leaving it out: what --ssdtrain-compact-* says is compressed in every layer, without this key"
        )
        raise ConfigError.of("ssdtrain.plan.compress (--ssdtrain-plan-compress)", True, why, allowed)
    if isinstance(plan, dict):
        refuse_state_limit(plan.get("state_limit"))
    config = config_from_namespace(args)
    comm = config.comm if config is not None and config.enabled else None
    if comm is not None and comm.model_fields_set.isdisjoint(("preset", *DIMENSIONS)):
        why = "would compress nothing: neither a preset nor a codec is chosen"
        allowed = "together with --ssdtrain-comm-preset, or a codec such as --ssdtrain-comm-dp int8, or leaving it out"
        given = {key: getattr(comm, key) for key in comm.model_fields_set}
        raise ConfigError.of("ssdtrain.comm", given, why, allowed)
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
