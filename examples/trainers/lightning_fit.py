"""Lightning's Trainer."""

import lightning
import torch

from examples.trainers.tiny import SPILL, model, tokens
from ssdtrain.lightning import SSDTrainLightningCallback


class Llama(lightning.LightningModule):
    """The model, its loss and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model()

    def training_step(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        loss: torch.Tensor = self.model(input_ids=rows, labels=rows).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make the optimizer."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


trainer = lightning.Trainer(
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    callbacks=[SSDTrainLightningCallback(SPILL)],
)
trainer.fit(Llama(), torch.utils.data.DataLoader(tokens(), batch_size=8))
