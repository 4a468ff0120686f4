"""Hugging Face's Trainer."""

from transformers import Trainer, TrainingArguments

from examples.trainers.tiny import QUICK, SPILL, model, tokens
from ssdtrain.hf import SSDTrainCallback

rows = [{"input_ids": row, "labels": row} for row in tokens()]
trainer = Trainer(
    model=model(),
    args=TrainingArguments("out", **QUICK),
    train_dataset=rows,
    callbacks=[SSDTrainCallback(SPILL)],
)
trainer.train()
