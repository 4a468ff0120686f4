"""TRL's SFTTrainer."""

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from examples.trainers.tiny import QUICK, SPILL, model, text, tokenizer
from ssdtrain.hf import SSDTrainCallback

trainer = SFTTrainer(
    model=model(),
    args=SFTConfig("out", max_length=128, **QUICK),
    train_dataset=Dataset.from_list([{"text": text(number, 120)} for number in range(64)]),
    processing_class=tokenizer(),
    callbacks=[SSDTrainCallback(SPILL)],
)
trainer.train()
