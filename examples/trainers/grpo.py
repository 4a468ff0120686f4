"""TRL's GRPOTrainer: what it generates is not recorded, what it trains on is."""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from examples.trainers.tiny import QUICK, SPILL, model, text, tokenizer
from ssdtrain.hf import SSDTrainCallback


def different_words(completions: list[str], **_: object) -> list[float]:
    """Reward each completion by how many words it has."""
    return [float(len(set(completion.split()))) for completion in completions]


trainer = GRPOTrainer(
    model=model(),
    reward_funcs=different_words,
    args=GRPOConfig("out", num_generations=4, max_completion_length=24, **QUICK),
    train_dataset=Dataset.from_list([{"prompt": text(number, 16)} for number in range(64)]),
    processing_class=tokenizer(),
    callbacks=[SSDTrainCallback(SPILL)],
)
trainer.train()
