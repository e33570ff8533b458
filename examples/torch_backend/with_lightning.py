"""Learns handwritten digits with Lightning; only the name of the process group's backend is ddl's."""

import lightning
import torch
import torch.distributed as dist
from learning import digits, network, options, tell
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy


class Digits(lightning.LightningModule):  # type: ignore[misc]  # mypy skips its types
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.network, self.lr = network(), lr
        self.accuracy = MulticlassAccuracy(10, average="micro")  # adds up what all ranks have counted

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        images, labels = batch
        self.accuracy(self.network(images), labels)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--devices", type=int, default=2, help="ranks")
    args = parser.parse_args()
    lightning.seed_everything(1, verbose=False)
    learn, images, labels = digits()
    model = Digits(args.lr)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=DDPStrategy(process_group_backend=args.backend),
        max_epochs=args.epochs,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    test = torch.utils.data.TensorDataset(images, labels)
    batch = args.batch // args.devices
    trainer.fit(model, DataLoader(learn, batch, shuffle=True), DataLoader(test, batch))
    if trainer.is_global_zero:
        print(f"accuracy by torchmetrics {100 * float(trainer.callback_metrics['accuracy']):.1f} %")
    tell(model.network)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
