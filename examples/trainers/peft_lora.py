"""LoRA of PEFT in Hugging Face's Trainer: the callback attaches to the model with its adapters."""

from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from examples.trainers.tiny import QUICK, SPILL, model, tokens
from ssdtrain.hf import SSDTrainCallback

lora = LoraConfig(target_modules=["q_proj", "v_proj"], r=8, task_type="CAUSAL_LM")
rows = [{"input_ids": row, "labels": row} for row in tokens()]
trainer = Trainer(
    model=get_peft_model(model(), lora),
    args=TrainingArguments("out", **QUICK),
    train_dataset=rows,
    callbacks=[SSDTrainCallback(SPILL)],
)
trainer.train()
