"""The model that a command is given: a function of the user's, or the config.json of a model of the transformers library."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ssdtrain.config.similar import closest

BuildModel = Callable[[int], Any]
"""Takes a number of sequences; returns the model, and a function without arguments that runs its forward and returns the loss."""

RETURNS = "(model, step), where step takes no arguments, runs the model's forward and returns the loss"

ON_FAKE_TENSORS = (
    "it runs on fake tensors, which have shapes and no values: leave out what reads values (.item(), .tolist(), .numpy(), "
    "`if tensor`, an index that is a mask), what loads weights, and extensions without a fake implementation; or measure "
    "real steps with ssdtrain.tools.model_profile.profile_blocks"
)


def is_config(name: str) -> bool:
    """Whether a model is named by its configuration."""
    return name.endswith(".json")


def factory(name: str) -> BuildModel:
    """The function that `module:function` or `file.py:function` names; modules of the working directory are found.

    Raises:
        ValueError: there is none, or importing it fails.
    """
    module, colon, function = name.partition(":")
    if not module or not colon or not function:
        inside = Path(name, "config.json")
        hint = f' (did you mean "{inside}"?)' if inside.is_file() else ""
        raise ValueError(
            f'is named "{name}"{hint}; allowed: module:function, file.py:function (the function takes a number of sequences and '
            f"returns {RETURNS}), or the path of the config.json of a model of the transformers library"
        )
    found = _file(Path(module), name) if module.endswith(".py") else _module(module, function, name)
    build = getattr(found, function, None)
    if build is None:
        known = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
        near = closest(function, known)
        hint = f' (did you mean "{near}"?)' if near else ""
        raise ValueError(f'is named "{name}", and {module} has no {function}{hint}')
    if not callable(build):
        raise ValueError(f'is named "{name}", which is not a function; allowed: one that returns {RETURNS}')
    made: BuildModel = build
    return made


def _module(module: str, function: str, name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ValueError(f'is named "{name}", which imports what is not installed: {error}') from error
        raise ValueError(
            f'is named "{name}", and there is no module {error.name} here: start in the directory that holds it, or name its '
            f'file as in "path/{module.rpartition(".")[2]}.py:{function}"'
        ) from error
    except Exception as error:
        raise ValueError(f'is named "{name}", and importing it failed: {_text(error)}') from error


def _file(file: Path, name: str) -> ModuleType:
    """A script, which is run as a module: not as `__main__`."""
    if not file.is_file():
        raise ValueError(f'is named "{name}", and there is no file {file} in {Path.cwd()}')
    sys.path.insert(0, str(file.resolve().parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f'is named "{name}", and running {file} failed: {_text(error)}') from error
    return module


def from_config(file: Path, sequence: int) -> BuildModel:
    """Builds the model that a `config.json` of the transformers library describes, and a step on tokens and labels.

    The class is the first of its "architectures", else a causal language model; weights are bfloat16.

    Raises:
        ValueError: there is no such file or class, or the library is not installed.
    """
    if not file.is_file():
        raise ValueError(
            f"is {file}, and there is no such file in {Path.cwd()}: copy the config.json of the model, or write it with "
            'transformers.AutoConfig.from_pretrained("NAME").save_pretrained("FOLDER")'
        )
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError(
            f"is {file}, and the transformers library is not installed ({error}): install it (pip install transformers), or name "
            f"a function that returns {RETURNS}"
        ) from error
    try:
        config = library.AutoConfig.from_pretrained(file)
    except Exception as error:
        raise ValueError(
            f"is {file}, which this version of the transformers library ({library.__version__}) cannot read: {error}; use the "
            "version that the model needs, or name a function in its place (module:function)"
        ) from error
    names = getattr(config, "architectures", None) or ["AutoModelForCausalLM"]
    kind = getattr(library, names[0], None)
    if kind is None:
        raise ValueError(
            f"is {file}, whose architecture {names[0]} transformers {library.__version__} does not have: use the version that "
            "the model needs, or name a function in its place (module:function)"
        )
    if not hasattr(config, "vocab_size"):
        raise ValueError(
            f"is {file}, which has no vocabulary; only language models are built from a config.json: name a function in its "
            "place (module:function)"
        )
    config.use_cache = False

    def build(batch: int) -> Any:
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
        finally:
            torch.set_default_dtype(default)
        model.train()
        tokens = torch.randint(config.vocab_size, (batch, sequence))
        return model, lambda: model(input_ids=tokens, labels=tokens).loss

    return build


def checked(build: BuildModel, name: str) -> BuildModel:
    """`build`, whose errors under fake tensors say what to change, and so those of the step that it returns.

    Raises:
        ValueError: from the function or its step: it fails, or does not return what it should.
    """

    def built(batch: int) -> Any:
        try:
            made = build(batch)
        except Exception as error:
            raise ValueError(
                f"{name} is not built for {batch} sequences: {_text(error)}; {ON_FAKE_TENSORS}"
            ) from error
        if not (
            isinstance(made, tuple)
            and len(made) == 2
            and isinstance(made[0], torch.nn.Module)
            and callable(made[1])
        ):
            raise ValueError(f"{name} returns a {type(made).__name__}; allowed: {RETURNS}")
        model, step = made

        def checked_step() -> torch.Tensor:
            try:
                loss = step()
            except Exception as error:
                raise ValueError(f"{name} does not run: {_text(error)}; {ON_FAKE_TENSORS}") from error
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                what = (
                    f"a tensor of shape {tuple(loss.shape)}"
                    if isinstance(loss, torch.Tensor)
                    else f"a {type(loss).__name__}"
                )
                raise ValueError(
                    f"{name} has a step that returns {what}; allowed: the loss, one number with a gradient"
                )
            return loss

        return model, checked_step

    return built


def _text(error: Exception) -> str:
    """The error, and the line that led to it: the last one of neither this package nor an installed one, else the last."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parents[2])
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(ours)]
    place = "".join(f" ({frame.filename}, line {frame.lineno})" for frame in (own or frames)[-1:])
    return f"{type(error).__name__}: {error}{place}"
