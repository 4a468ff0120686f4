from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from ssdtrain.profile.modules import ModuleNames, Running, matches


class Seen(nn.Module):
    def __init__(self, names: ModuleNames, fails: bool = False) -> None:
        super().__init__()
        self.names, self.fails = names, fails
        self.stacks: list[tuple[Running, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.stacks.append(self.names.stack)
        if self.fails:
            raise ValueError("no forward")
        return x


def test_the_stack_has_the_modules_that_run_outermost_first() -> None:
    names = ModuleNames()
    seen = Seen(names)
    model = nn.Sequential(nn.Sequential(seen))
    names.watch(model)
    model(torch.zeros(1))
    assert [module.name for module in seen.stacks[0]] == ["", "0", "0.0"]
    assert seen.stacks[0][-1].kind == "Seen"
    assert names.stack == ()


def test_wrappers_are_left_out_of_names() -> None:
    names = ModuleNames()
    seen = Seen(names)

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

    model = Wrapper(Wrapper(nn.Sequential(seen)))
    names.watch(model)
    model(torch.zeros(1))
    assert seen.stacks[0][-1].name == "0"


def test_a_forward_that_raises_leaves_the_stack() -> None:
    names = ModuleNames()
    model = nn.Sequential(Seen(names, fails=True))
    names.watch(model)
    with pytest.raises(ValueError, match="no forward"):
        model(torch.zeros(1))
    assert names.stack == ()


def test_close_takes_the_hooks_away() -> None:
    names = ModuleNames()
    seen = Seen(names)
    names.watch(seen)
    names.close()
    seen(torch.zeros(1))
    assert seen.stacks == [()]
    assert not seen._forward_pre_hooks and not seen._forward_hooks


def test_the_hooks_go_with_the_last_owner() -> None:
    names = ModuleNames()
    seen = Seen(names)
    for owner in ("one", "other"):
        names.watch(seen, owner=owner)
    seen(torch.zeros(1))
    names.close("one")
    seen(torch.zeros(1))
    assert [len(stack) for stack in seen.stacks] == [1, 1]
    names.close("other")
    assert not names.watching
    assert not any(hooks for name, hooks in vars(seen).items() if "hook" in name and isinstance(hooks, dict))


def test_a_file_of_a_watched_model_needs_nothing_of_this_package() -> None:
    names = ModuleNames()
    model = nn.Sequential(nn.Linear(2, 2))
    names.watch(model)
    assert b"ssdtrain" not in pickle.dumps(model)


def test_a_copy_and_a_pickle_of_a_watched_model_know_nothing_of_it() -> None:
    names = ModuleNames()
    model = nn.Sequential(nn.Linear(2, 2))
    names.watch(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    stacks: list[tuple[Running, ...]] = []
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other[0].register_forward_hook(lambda *_: stacks.append(names.stack))
        other(torch.zeros(2))
    assert stacks == [(), ()]


@pytest.mark.parametrize(
    ("patterns", "matched"),
    [
        (("*.mlp",), True),
        (("layers.0.*",), True),
        (("Linear",), True),
        (("mlp",), False),
        (("*.attention", "layers.1.*"), False),
        ((), False),
    ],
)
def test_a_pattern_is_of_names_or_classes_of_any_running_module(
    patterns: tuple[str, ...], matched: bool
) -> None:
    stack = (Running("", "GPT"), Running("layers.0.mlp", "MLP"), Running("layers.0.mlp.fc", "Linear"))
    assert matches(stack, patterns) is matched


def test_an_interrupted_forward_leaves_no_names_to_the_next_one() -> None:
    names = ModuleNames()
    seen = Seen(names)
    interrupting = nn.Identity()
    model = nn.Sequential(nn.Sequential(interrupting), seen)
    names.watch(model)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = interrupting.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(torch.zeros(1))
    hook.remove()
    model(torch.zeros(1))
    assert [module.name for module in seen.stacks[0]] == ["", "1"]
    assert names.stack == ()
