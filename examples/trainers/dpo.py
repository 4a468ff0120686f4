"""TRL's DPOTrainer. With adapters (`peft_config`) the reference is the model without them, and nothing else is loaded."""

from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

from examples.trainers.tiny import QUICK, SPILL, model, text, tokenizer
from ssdtrain.hf import SSDTrainCallback

rows = [
    {"prompt": text(number, 16), "chosen": text(number + 1, 48), "rejected": text(number + 2, 48)}
    for number in range(64)
]
trainer = DPOTrainer(
    model=model(),
    args=DPOConfig("out", max_length=64, **QUICK),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer(),
    peft_config=LoraConfig(target_modules=["q_proj", "v_proj"], r=8, task_type="CAUSAL_LM"),
    callbacks=[SSDTrainCallback(SPILL)],
)
trainer.train()
