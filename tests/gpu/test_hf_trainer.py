"""Hugging Face's Trainer on the device, with an attached model: the bits of a run without."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import ssdtrain

transformers = pytest.importorskip("transformers", reason="of requirements-cuda.txt")

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu", "late")]

SIZE = {"vocab_size": 64, "num_hidden_layers": 2}
LLAMA = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2, **SIZE
)
T5 = transformers.T5Config(
    vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
)
MODELS: dict[str, tuple[type[Any], Any, dict[str, Any]]] = {
    "gpt2": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64),
        {},
    ),
    "t5 in bf16": (transformers.T5ForConditionalGeneration, T5, {"bf16": True}),
    "llama, recomputed": (transformers.LlamaForCausalLM, LLAMA, {"gradient_checkpointing": True}),
    "llama, recomputed from host memory": (
        transformers.LlamaForCausalLM,
        LLAMA,
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}},
    ),
}


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(1, 64, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def trained(name: str, directory: Path, attach: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of four steps of two microbatches, and the weights after them."""
    make, config, options = MODELS[name]
    transformers.set_seed(0)
    model = make(config)
    arguments = transformers.TrainingArguments(
        output_dir=str(directory / "output"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=4,
        logging_steps=1,
        learning_rate=1e-3,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    arguments._n_gpu = 1  # else DataParallel, where there are several devices
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Tokens())
    assert next(trainer.model.parameters()).device.type == "cuda"
    section = {"directories": str(directory / "spill"), "amount": "all", "min_bytes": 1}
    config = {"offload": section, "report": {"interval": 0}}
    with ssdtrain.attach(trainer.model, config) if attach else nullcontext() as runtime:
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if runtime is not None:
            statistics = runtime.statistics()
            assert statistics.offload.offloaded_bytes + statistics.offload.avoided_write_bytes > 0
    return losses, [parameter.detach().cpu() for parameter in trainer.model.parameters()]


@pytest.mark.parametrize("name", MODELS)
def test_the_trainer_gets_the_same_losses_and_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.state import AcceleratorState

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    AcceleratorState._reset_state(reset_partial_state=True)
    losses, weights = trained(name, tmp_path, attach=False)
    found, others = trained(name, tmp_path, attach=True)
    assert len(set(losses)) == 4
    assert found == losses
    assert all(map(torch.equal, others, weights))
