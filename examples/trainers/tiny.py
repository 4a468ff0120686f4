"""A model, a tokenizer and rows that are made here, in the place of your own."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["QUICK", "SPILL", "model", "text", "tokenizer", "tokens"]

SPILL = {"offload": {"directories": "./spill"}}
"""What SSDTrain is given: a directory on a local SSD."""

QUICK: dict[str, Any] = {
    "max_steps": 6,
    "per_device_train_batch_size": 8,
    "logging_steps": 3,
    "gradient_checkpointing": False,
    "bf16": torch.cuda.is_available(),
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}
"""Arguments of a trainer for a run of seconds."""

_WORDS = [f"w{number}" for number in range(60)]
_SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def model(hidden: int = 256, layers: int = 4) -> LlamaForCausalLM:
    """Make a Llama with random weights, the same in each call."""
    shape = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=256, **shape))


def tokens() -> Any:
    """Make a tensor of 64 rows of 128 tokens, which is a dataset as well."""
    return torch.randint(64, (64, 128), generator=torch.Generator().manual_seed(0))


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of sixty words."""
    words = {word: number for number, word in enumerate([*_SPECIAL, *_WORDS])}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    pad, begin, end, unknown = _SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token=pad, bos_token=begin, eos_token=end, unk_token=unknown
    )


def text(seed: int, words: int) -> str:
    """Return so many words."""
    return " ".join(_WORDS[(7 * seed + 3 * number) % len(_WORDS)] for number in range(words))
