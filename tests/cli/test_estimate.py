import json
from pathlib import Path

import pytest

from ssdtrain.cli.main import main

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


@pytest.mark.parametrize("name", ["its_model", "its_model:nothing", "no_such_module:build"])
def test_what_cannot_be_imported_is_an_error(
    name: str, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", name, "--gpu", "h100"]) == 1
    assert name in capsys.readouterr().err
