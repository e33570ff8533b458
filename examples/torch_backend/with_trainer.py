"""Learns handwritten digits with transformers' Trainer, which takes the process group that it finds.

The model is a small vision transformer, made from its configuration: nothing is loaded.
"""

import tempfile

import torch
import torch.distributed as dist
from learning import digits, options, tell
from torch import nn
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification


class Logits(nn.Module):
    """Calls a model of transformers, and returns its logits as a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(images).logits
        return logits


def main() -> None:
    parser = options(__doc__)
    parser.set_defaults(epochs=20)
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    size = dist.get_world_size()
    torch.manual_seed(1)
    model = ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            num_labels=10,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
        )
    )
    learn, _, _ = digits()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=args.batch // size,
            num_train_epochs=args.epochs,
            learning_rate=args.lr,
            ddp_find_unused_parameters=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        rows = [{"pixel_values": image, "labels": label} for image, label in learn]
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
    assert arguments.world_size == size
    tell(Logits(model.eval()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
