"""Train train.py's model with accelerate, written as in accelerate's documentation.

    python accelerate_train.py --dataset DATASET [--mixed_precision fp16]

It has all options of train.py.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.nn import functional as F

import common


def main():
    parser = common.train.build_parser()
    parser.add_argument("--mixed_precision", default="no", help="of Accelerator")
    args = parser.parse_args()
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
    )

    train_loader, val_loader, classes = common.data(args)
    steps = min(len(train_loader), args.steps or len(train_loader))
    net = common.network(args, classes)
    optimizer = common.sgd(net, args)
    scheduler = common.schedule(optimizer, args.epochs * steps)
    net, optimizer, train_loader, val_loader, scheduler = accelerator.prepare(
        net, optimizer, train_loader, val_loader, scheduler
    )

    clock, epochs = common.Clock(), []
    for _ in range(args.epochs):
        net.train()
        clock.start()
        for _, (images, labels) in zip(range(steps), train_loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
        clock.stop()

        net.eval()
        hits = torch.zeros((), device=accelerator.device)
        with torch.inference_mode():
            for images, labels in val_loader:
                guesses, labels = accelerator.gather_for_metrics((net(images).argmax(1), labels))
                hits += (guesses == labels).sum()
        epochs.append(dict(loss=loss.item(), val_top1=hits.item() / len(val_loader.dataset)))
    common.write_record(args, clock, steps * args.batch_size, epochs)


if __name__ == "__main__":
    main()
