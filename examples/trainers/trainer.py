"""Hugging Face's Trainer."""

import torch
from transformers import Trainer, TrainingArguments

from examples.trainers.tiny import QUICK, SPILL, model
from ssdtrain.hf import SSDTrainCallback

rows = [{"input_ids": row, "labels": row} for row in torch.randint(64, (64, 128))]
trainer = Trainer(
    model=model(),
    args=TrainingArguments("out", **QUICK),
    train_dataset=rows,
    callbacks=[SSDTrainCallback(SPILL)],
)
trainer.train()
