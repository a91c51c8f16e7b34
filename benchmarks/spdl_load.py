"""Read pictures with SPDL's DataLoader, written as in SPDL's documentation.

    python spdl_load.py --dataset DATASET

FFmpeg's filters resize each picture and crop its center; SPDL applies the same filter to all. It
takes loader.py's options, without --samples, --split, --pair and --cold; --workers counts
threads.
"""

import random

import spdl.io
import spdl.io.utils
import torch
from spdl.dataloader import DataLoader

import common
import loader


def main():
    parser = loader.build_parser()
    args = parser.parse_args()
    try:
        spdl.io.utils.get_ffmpeg_versions()
    except RuntimeError as error:
        parser.error(f"SPDL needs FFmpeg's libraries: {str(error).splitlines()[0]:.200}")
    samples = loader.open_images(parser, args, None).samples
    resize = f"scale={args.resize}:{args.resize}:force_original_aspect_ratio=increase,"
    filters = (
        f"{resize if args.resize else ''}crop={args.image_size}:{args.image_size},format=rgb24"
    )

    def decode(sample):
        path, label = sample
        return spdl.io.decode_packets(spdl.io.demux_image(path), filter_desc=filters), label

    def collate(decoded):
        frames, labels = zip(*decoded)
        return spdl.io.convert_frames(list(frames)), torch.tensor(labels)

    def transfer(batch):
        pictures, labels = batch
        if common.ON_GPU:
            pictures = spdl.io.transfer_buffer(
                pictures,
                device_config=spdl.io.cuda_config(
                    device_index=0,
                    allocator=(
                        torch.cuda.caching_allocator_alloc,
                        torch.cuda.caching_allocator_delete,
                    ),
                ),
            )
        return spdl.io.to_torch(pictures).permute(0, 3, 1, 2), labels

    def batches():
        random.shuffle(samples)
        return DataLoader(
            samples,
            preprocessor=decode,
            batch_size=args.batch_size,
            aggregator=collate,
            transfer_fn=transfer,
            num_threads=max(1, args.workers),
        )

    common.time_reading(args, batches, len(samples))


if __name__ == "__main__":
    main()
