"""TRL's SFTTrainer and Lightning on the device, with SSDTrain's callbacks: the bits of a run without, and bytes that left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ssdtrain.runtime import Runtime

lightning = pytest.importorskip("lightning", reason="of requirements-cuda.txt")

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu", "late")]


def config_of(directory: Path) -> dict[str, Any]:
    section = {"directories": str(directory / "spill"), "amount": "all", "min_bytes": 1}
    return {"offload": section, "report": {"interval": 0}}


def weights_of(trained: nn.Module, runtime: Runtime | None) -> list[torch.Tensor]:
    if runtime is not None:
        metrics = runtime.statistics()
        assert metrics.offload.offloaded_bytes > 0
    return [parameter.detach().cpu() for parameter in trained.parameters()]


def sft(directory: Path, attach: bool, **options: Any) -> list[torch.Tensor]:
    import datasets
    from trl import SFTConfig, SFTTrainer

    from examples.trainers.tiny import model, text, tokenizer
    from ssdtrain.hf import SSDTrainCallback

    arguments = SFTConfig(
        output_dir=str(directory / "output"),
        max_steps=3,
        max_length=32,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    arguments._n_gpu = 1  # else DataParallel, where there are several devices
    callback = SSDTrainCallback(config_of(directory))
    trainer = SFTTrainer(
        model=model(64, 2),
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"text": text(number, 24)} for number in range(12)]),
        processing_class=tokenizer(),
        callbacks=[callback] if attach else [],
    )
    trainer.train()
    assert trainer.model.device.type == "cuda"
    return weights_of(trainer.model, callback.runtime)


@pytest.mark.parametrize("offloading", [False, True], ids=["plain", "activation_offloading"])
def test_sft(offloading: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in ("trl", "datasets"):
        pytest.importorskip(needed, reason="of requirements-cuda.txt")
    from accelerate.state import AcceleratorState

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # Its loss in plain torch: no Triton kernel runs on the emulated device.
    monkeypatch.setattr("trl.kernels.chunked_logprob._TRITON_AVAILABLE", False)
    found = []
    for attach in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        found.append(sft(tmp_path, attach, activation_offloading=offloading))
    assert all(map(torch.equal, *found))


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))

    def training_step(self, rows: torch.Tensor) -> torch.Tensor:
        assert rows.is_cuda  # after training Lightning moves the module back
        loss: torch.Tensor = self.body(rows).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def test_lightning(tmp_path: Path) -> None:
    from ssdtrain.lightning import SSDTrainLightningCallback

    rows = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))

    def trained(attach: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module, callback = Module(), SSDTrainLightningCallback(config_of(tmp_path))
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="gpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(tmp_path),
            callbacks=[callback] if attach else [],
        )
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=8))
        return weights_of(trainer.strategy.model, callback.runtime)

    assert all(map(torch.equal, trained(True), trained(False)))
