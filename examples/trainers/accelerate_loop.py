"""A loop with accelerate: `prepare` of the plugin in place of the accelerator's. `accelerate launch` starts it as well."""

import torch
from accelerate import Accelerator

from examples.trainers.tiny import SPILL, model, tokens
from ssdtrain.hf import SSDTrainPlugin

accelerator, plugin, llama = Accelerator(), SSDTrainPlugin(SPILL), model()
loader = torch.utils.data.DataLoader(tokens(), batch_size=8)
llama, optimizer, loader = plugin.prepare(
    accelerator, llama, torch.optim.AdamW(llama.parameters(), 1e-3), loader
)
for rows in loader:
    loss = llama(input_ids=rows, labels=rows).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")
accelerator.end_training()
