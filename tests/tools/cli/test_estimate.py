import json
import sys
from pathlib import Path

import pytest

from ssdtrain.tools.cli.main import main

MODEL = """
import torch
from examples.support.model import GPT, GPTConfig

def build(batch):
    model = GPT(GPTConfig(layers=4, hidden=1024, heads=8, sequence=1024))
    tokens = torch.randint(256, (batch, 1024))
    return model, lambda: model(tokens, tokens)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "its_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)


def test_a_model_of_a_factory_is_estimated_without_its_memory(
    here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["estimate", "its_model:build", "--batch", "8", "--gpu", "rtx4090", "--ssd", "4 x 7GB/s"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # float32: 16 hidden elements per token and the statistics of norms and softmax
    block = found["blocks"][0]
    assert block["saved_bytes"] == pytest.approx(8 * 1024 * 16 * 1024 * 4, rel=0.01)
    assert block["input_bytes"] == 8 * 1024 * 1024 * 4
    assert [b["name"] for b in found["blocks"]] == [f"blocks.{i}" for i in range(4)] + ["rest"]
    assert found["activation_peak_bytes"] <= found["activation_budget_bytes"]
    assert found["largest_batch"] >= 8
    flops = 2 * 12 * 1024**2 + 4 * 1024 * 1024
    assert found["seconds"] > 4 * 3 * 8 * 1024 * flops / (165.2e12 * 0.5) * 0.99


def test_the_table_names_blocks_and_the_largest_microbatch(
    here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", "its_model:build", "--gpu", "h100"]) == 0
    shown = capsys.readouterr().out
    assert "blocks.3" in shown
    assert "largest microbatch" in shown


PROBLEMS = """
import torch
from torch import nn

def scaled(batch):
    layers = nn.Sequential(nn.Linear(8, 8))
    layers.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    return layers, lambda: layers.blocks[1](layers.blocks[0](torch.ones(batch, 8))).sum()

def reads(batch):
    model, _ = scaled(batch)
    return model, lambda: model.blocks[0](torch.ones(batch, 8)).sum() * model.blocks[1].weight.sum().item()

def lone(batch):
    return scaled(batch)[0]

def loose(batch):
    model, _ = scaled(batch)
    return model, lambda: model.blocks[0](torch.ones(batch, 8))

def picky(batch, width):
    return scaled(batch)

number = 3
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("its_model", "allowed: module:function, file.py:function"),
        ("its_model:biuld", 'did you mean "build"?'),
        ("its_model.py:biuld", 'did you mean "build"?'),
        ("no_such_module:build", "start in the directory that holds it"),
        ("no_such_file.py:build", "there is no file no_such_file.py in"),
        ("needs_more:build", "imports what is not installed"),
        ("broken:build", "SyntaxError"),
        ("broken.py:build", "SyntaxError"),
        ("problems:number", "which is not a function; allowed: one that returns (model, step)"),
        ("problems:picky", "missing 1 required positional argument"),
        ("problems:lone", "returns a Sequential; allowed: (model, step)"),
        ("problems:loose", "returns a tensor of shape (1, 8); allowed: the loss"),
        ("problems:reads", "leave out what reads values (.item()"),
        ("folder", 'did you mean "folder/config.json"?'),
        ("folder/no.json", "there is no such file"),
        ("folder/config.json", "cannot read"),
    ],
)
def test_a_model_that_cannot_be_estimated_says_what_to_change(
    name: str, says: str, here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "problems.py").write_text(PROBLEMS)
    (tmp_path / "broken.py").write_text("def build(")
    (tmp_path / "needs_more.py").write_text("import no_such_package")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{")
    for module in ("its_model", "problems", "broken", "needs_more"):
        sys.modules.pop(module, None)
    if name == "folder/config.json":
        pytest.importorskip("transformers")
    assert main(["estimate", name, "--gpu", "h100"]) == 1
    shown = capsys.readouterr().err
    assert name in shown
    assert says in shown
    if name == "problems:reads":
        assert "problems.py, line 12)" in shown


def test_a_config_of_an_unknown_architecture_says_what_to_do(
    here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "architectures": ["NoSuchModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["estimate", "./config.json", "--gpu", "h100"]) == 1
    shown = capsys.readouterr().err
    assert "NoSuchModel" in shown
    assert "name a function in its place" in shown


def test_without_drives_a_microbatch_that_does_not_fit_names_them(
    here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    sys.modules.pop("its_model", None)
    assert main(["estimate", "its_model:build", "--batch", "4096", "--gpu", "rtx4090"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "no plan fits into" in shown
    assert "--ssd" in shown
    assert "a smaller --batch" in shown
    assert main(["estimate", "its_model:build", "--gpu", "rtx4090", "--state-bytes", "2000"]) == 1
    assert "--state-bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--batch", "0"),
        ("--seq", "-1"),
        ("--gpus-per-node", "0"),
        ("--efficiency", "2"),
        ("--state-bytes", "x"),
    ],
)
def test_a_number_that_cannot_be_is_an_error_of_usage(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["estimate", "its_model:build", "--gpu", "h100", option, value])
    assert caught.value.code == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert f'argument {option}: "{value}" is' in shown
    assert "allowed: " in shown
