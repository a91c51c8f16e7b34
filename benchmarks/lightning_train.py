"""Train train.py's model with Lightning, written as in Lightning's documentation.

    python lightning_train.py --dataset DATASET [--precision 16-mixed] [--benchmark] [--compile]

It has all options of train.py.
"""

import lightning as L
import torch
from torch.nn import functional as F

import common


class Classifier(L.LightningModule):
    def __init__(self, args, classes):
        super().__init__()
        self.args = args
        self.net = common.network(args, classes)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val_top1", (self.net(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        optimizer = common.sgd(self, self.args)
        schedule = common.schedule(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Timer(L.Callback):
    """Time each epoch from its start to its last step; validation comes after that."""

    def __init__(self):
        self.clock, self.epochs = common.Clock(), []

    def on_train_epoch_start(self, trainer, module):
        self.clock.start()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx + 1 == trainer.num_training_batches:
            self.clock.stop()

    def on_train_epoch_end(self, trainer, module):
        self.epochs.append(
            {name: trainer.callback_metrics[name].item() for name in ("loss", "val_top1")}
        )


def main():
    parser = common.train.build_parser()
    parser.add_argument("--precision", default="32-true", help="of Lightning's Trainer")
    parser.add_argument("--benchmark", action="store_true", help="cuDNN tries its algorithms")
    parser.add_argument("--compile", action="store_true", help="torch.compile the module")
    parser.add_argument("--compile_mode", default="default", help="of torch.compile")
    args = parser.parse_args()
    train_loader, val_loader, classes = common.data(args)
    module = Classifier(args, classes)
    if args.compile:
        module = torch.compile(module, mode=args.compile_mode)
    timer = Timer()

    # without progress bar and logger, which take time in each step
    trainer = L.Trainer(
        max_epochs=args.epochs,
        devices=1,
        precision=args.precision,
        benchmark=args.benchmark,
        limit_train_batches=args.steps or 1.0,
        callbacks=[timer],
        logger=False,
        enable_progress_bar=False,
        default_root_dir=args.result_dir,
    )
    trainer.fit(module, train_loader, val_loader)
    common.write_record(
        args, timer.clock, trainer.num_training_batches * args.batch_size, timer.epochs
    )


if __name__ == "__main__":
    main()
