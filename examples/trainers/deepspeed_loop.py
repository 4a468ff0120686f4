"""A loop of DeepSpeed that names SSDTrain in the block of its config alone. Either launcher starts it:

```
deepspeed --module ssdtrain_ds -m examples.trainers.deepspeed_loop
torchrun --nproc_per_node 1 -m ssdtrain_ds -m examples.trainers.deepspeed_loop
```
"""

import deepspeed
import torch

from examples.trainers.tiny import SPILL, model

config = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "ssdtrain": SPILL,
}
llama = model()
engine, *_ = deepspeed.initialize(model=llama, model_parameters=llama.parameters(), config=config)
for rows in torch.randint(64, (8, 8, 128)):
    rows = rows.to(engine.device)
    loss = engine(input_ids=rows, labels=rows).loss
    engine.backward(loss)
    engine.step()
    print(f"loss {loss.item():.4f}")
engine.destroy()
