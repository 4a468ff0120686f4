"""Trainers of other projects, with an attached model: bits as without, and something is offloaded.

Models and tokenizers are made here, and written to a directory from which a trainer reads its reference model.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from examples.trainers.tiny import text, tokenizer
from ssdtrain.config import ConfigError
from ssdtrain.runtime import Runtime
from tests.support.tensors import equal_by_name

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "ACCELERATE_USE_CPU": "true",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def fresh_accelerator() -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def config_of(directory: Path) -> dict[str, Any]:
    section = {"directories": str(directory), "min_bytes": 1, "amount": "all"}
    return {"offload": section, "report": {"interval": 0}}


@contextmanager
def attached(model: nn.Module, directory: Path) -> Iterator[Runtime]:
    with ssdtrain.attach(model, config_of(directory)) as runtime:
        yield runtime


def offloaded(runtime: Runtime) -> int:
    """Bytes that were written, or would have been if backward had come later."""
    metrics = runtime.statistics()
    return metrics.offload.offloaded_bytes + metrics.offload.avoided_write_bytes


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def sft(options: dict[str, Any], **given: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"text": text(number, 24)} for number in range(12)]
    return SFTTrainer(
        args=SFTConfig(max_length=32, **options), train_dataset=Dataset.from_list(rows), **given
    )


def dpo(options: dict[str, Any], **given: Any) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = [
        {"prompt": text(number, 8), "chosen": text(number + 1, 8), "rejected": text(number + 2, 8)}
        for number in range(12)
    ]
    return DPOTrainer(
        args=DPOConfig(max_length=32, **options), train_dataset=Dataset.from_list(rows), **given
    )


def grpo(options: dict[str, Any], **given: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(completion.split()))) for completion in completions]

    rows = [{"prompt": text(number, 8)} for number in range(12)]
    arguments = GRPOConfig(num_generations=2, max_completion_length=8, beta=0.1, **options)
    return GRPOTrainer(reward_funcs=reward, args=arguments, train_dataset=Dataset.from_list(rows), **given)


@pytest.mark.parametrize("adapter", [False, True], ids=["attached whole model", "callback and peft_config"])
@pytest.mark.parametrize("make", [sft, dpo, grpo])
def test_trl(make: Callable[..., Any], adapter: bool, tmp_path: Path) -> None:
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer

    from ssdtrain.hf import SSDTrainCallback

    plain_log = Trainer.log

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=128, **shape)).save_pretrained(
        tmp_path / "model"
    )

    def trained(attach: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
        options = {
            "output_dir": str(tmp_path / "out"),
            "max_steps": 3,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_steps": 1,
        }
        peft = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, task_type="CAUSAL_LM")
        given = {"model": model, "processing_class": tokenizer(), "peft_config": peft if adapter else None}
        if not attach:
            trainer = make(options, **given)
            trainer.train()
            return weights(trainer.model)
        if adapter:
            callback = SSDTrainCallback(config_of(tmp_path / "spill"))
            trainer = make(options, callbacks=[callback], **given)
            trainer.train()
            assert callback.runtime is not None and offloaded(callback.runtime) > 0
            assert callback.runtime.steps == 3 and Trainer.log is plain_log
            logged = [entry for entry in trainer.state.log_history if "loss" in entry]
            assert len(logged) == 3 and all(entry["ssdtrain/saved_bytes"] > 0 for entry in logged)
            return weights(trainer.model)
        with attached(model, tmp_path / "spill") as runtime:
            trainer = make(options, **given)
            trainer.train()
            assert offloaded(runtime) > 0
        return weights(trainer.model)

    assert equal_by_name(trained(True), trained(False))


def test_the_journal_has_the_loss_of_each_step(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from ssdtrain.hf import SSDTrainCallback

    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape))
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(16 * 8).remainder(64).view(16, 8)]
    for every in (1, 2):
        path = tmp_path / str(every)
        callback = SSDTrainCallback(config_of(tmp_path / "spill") | {"report": {"path": str(path)}})
        arguments = TrainingArguments(
            str(tmp_path / "out"),
            max_steps=4,
            per_device_train_batch_size=2,
            logging_steps=every,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback])
        trainer.train()
        logged = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
        lines = [json.loads(line) for line in (path / "rank-0.jsonl").read_text().splitlines()]
        found = {line["step"]: line.get("loss") for line in lines if "step" in line}
        assert found == {step: logged.get(step) for step in range(1, 5)}
        assert len(logged) == 4 // every


def test_a_callback_that_would_do_nothing_is_an_error(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from ssdtrain.hf import SSDTrainCallback

    callback = SSDTrainCallback(config_of(tmp_path))
    for arguments, why in (
        ({"deepspeed": "ds.json", "n_gpu": 1}, 'the block "ssdtrain" of DeepSpeed'),
        ({"deepspeed": None, "n_gpu": 2}, "start by torchrun --nproc_per_node 2"),
    ):
        with pytest.raises(ValueError, match=why):
            callback.on_train_begin(SimpleNamespace(**arguments), None, None, model=Net())
    with pytest.raises(ConfigError, match=r"ssdtrain\.state: .* cannot have this section"):
        SSDTrainCallback({"state": {"host": "64MiB"}}).on_train_begin(
            SimpleNamespace(deepspeed=None, n_gpu=1), None, None, model=Net()
        )
    assert callback.runtime is None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.GELU())
        self.head = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(x))
        return found


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 32 * 64).reshape(32, 64).sin()


@pytest.mark.parametrize("when", ["before prepare", "by the plugin"])
def test_accelerate(when: str, tmp_path: Path) -> None:
    """Also `unwrap_model`, which takes the forward that prepare had wrapped for the model's own."""
    from accelerate import Accelerator

    from ssdtrain.hf import SSDTrainPlugin

    net = Net()

    def trained(attach: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        accelerator, mine = Accelerator(cpu=True, mixed_precision="bf16"), copy.deepcopy(net)
        optimizer = torch.optim.SGD(mine.parameters(), 0.1)
        with ExitStack() as closing:
            runtimes = []
            if attach and when == "before prepare":
                runtimes.append(closing.enter_context(attached(mine, tmp_path)))
            if attach and when == "by the plugin":
                plugin = SSDTrainPlugin(config_of(tmp_path))
                mine, optimizer = plugin.prepare(accelerator, mine, optimizer)
                assert plugin.runtime is not None
                runtimes.append(plugin.runtime)
            else:
                mine, optimizer = accelerator.prepare(mine, optimizer)
            for _ in range(3):
                optimizer.zero_grad()
                accelerator.backward(mine(batch()).square().mean())
                optimizer.step()
            unwrapped = accelerator.unwrap_model(mine, keep_fp32_wrapper=False)
            unwrapped(batch()).square().mean().backward()
            assert all(offloaded(runtime) > 0 for runtime in runtimes)
            accelerator.end_training()  # closes that of the plugin
        return weights(mine), unwrapped(batch()).detach()

    (one, output), (other, expected) = trained(True), trained(False)
    assert equal_by_name(one, other) and torch.equal(output, expected)


@pytest.mark.parametrize("when", ["before setup", "after setup"])
def test_fabric(when: str, tmp_path: Path) -> None:
    from lightning import Fabric

    net = Net()

    def trained(attach: bool) -> dict[str, torch.Tensor]:
        fabric, mine = Fabric(accelerator="cpu", devices=1), copy.deepcopy(net)
        model, optimizer = fabric.setup(mine, torch.optim.SGD(mine.parameters(), 0.1))

        def train() -> None:
            for _ in range(3):
                optimizer.zero_grad()
                fabric.backward(model(batch()).square().mean())
                optimizer.step()

        if not attach:
            train()
        else:
            with attached(mine if when == "before setup" else model, tmp_path) as runtime:
                train()
                assert offloaded(runtime) > 0
        model(batch())
        return weights(mine)

    assert equal_by_name(trained(True), trained(False))


def test_lightning_with_a_step_that_calls_parts(tmp_path: Path) -> None:
    import lightning
    from lightning.pytorch.loggers.logger import Logger

    from ssdtrain.lightning import SSDTrainLightningCallback

    class Rows(Logger):
        name, version = "rows", 0

        def __init__(self) -> None:
            super().__init__()
            self.rows: list[tuple[int | None, dict[str, float]]] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.rows.append((step, metrics))

        def log_hyperparams(self, *_: Any, **__: Any) -> None:
            pass

    class Module(lightning.LightningModule):
        def __init__(self, net: Net) -> None:
            super().__init__()
            self.body, self.head = net.body, net.head

        def training_step(self, rows: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.head(self.body(rows)).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    net = Net()

    def trained(attach: bool) -> dict[str, torch.Tensor]:
        module = Module(copy.deepcopy(net))
        callback, loggers = SSDTrainLightningCallback(config_of(tmp_path / "spill")), [Rows(), Rows()]
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            devices=1,
            logger=loggers,
            log_every_n_steps=1,
            accumulate_grad_batches=2,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(tmp_path),
            callbacks=[callback] if attach else [],
        )
        trainer.fit(module, torch.utils.data.DataLoader(batch(), batch_size=8))
        if attach:
            assert callback.runtime is not None and offloaded(callback.runtime) > 0
            assert callback.runtime.steps == 4
            assert [step for step, _ in loggers[0].rows] == [1, 2, 3, 4]
            assert loggers[0].rows == loggers[1].rows
        return weights(module)

    assert equal_by_name(trained(True), trained(False))
