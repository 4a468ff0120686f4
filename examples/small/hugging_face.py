"""Hugging Face's Trainer with SSDTrain as a callback."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainingArguments, set_seed

from examples.small.command import compare, parse
from ssdtrain.hf import SSDTrainCallback

STEPS = 3
SHAPE = transformers.LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 256, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def train_model(model: torch.nn.Module, directory: str | None) -> list[float]:
    """The losses that the Trainer logs."""
    callbacks = []
    if directory is not None:
        config = {"offload": {"directories": directory, "amount": "all", "min_bytes": "4KiB"}}
        callbacks.append(SSDTrainCallback(config))
    with tempfile.TemporaryDirectory() as output:
        arguments: dict[str, Any] = {
            "use_cpu": True,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        chosen = TrainingArguments(
            output, max_steps=STEPS, logging_steps=1, per_device_train_batch_size=4, **arguments
        )
        trainer = Trainer(model=model, args=chosen, train_dataset=Tokens(), callbacks=callbacks)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train(directory: str | None) -> list[float]:
    set_seed(0)
    return train_model(transformers.LlamaForCausalLM(SHAPE), directory)


def main(arguments: Sequence[str] | None = None) -> int:
    return compare(train, parse(arguments).directory)


if __name__ == "__main__":
    sys.exit(main())
