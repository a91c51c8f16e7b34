"""Read pictures with DALI's plain pipeline, written as in DALI's ImageNet example.

    python dali_plain.py --dataset DATASET [--random_crop]

The pipeline does the work of loader.py: resize, random crop, flip, bytes. With --random_crop it is
the example's own for training: it decodes a random part of each picture and normalizes to floats.
It takes loader.py's options, without --samples, --split, --pair and --cold; --workers counts
threads.
"""

from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIClassificationIterator, LastBatchPolicy

import common
import loader


@pipeline_def
def training_pipeline(root, args, decoder):
    encoded, labels = fn.readers.file(
        file_root=root, random_shuffle=True, pad_last_batch=True, name="Reader"
    )
    crop = dict(
        crop=[args.image_size, args.image_size], output_layout="CHW", mirror=fn.random.coin_flip()
    )
    if args.random_crop:
        images = fn.decoders.image_random_crop(
            encoded,
            device=decoder,
            random_aspect_ratio=[0.8, 1.25],
            random_area=[0.1, 1.0],
            num_attempts=100,
        )
        images = fn.resize(images, size=[args.image_size, args.image_size])
        images = fn.crop_mirror_normalize(
            images,
            dtype=types.FLOAT,
            mean=[0.485 * 255, 0.456 * 255, 0.406 * 255],
            std=[0.229 * 255, 0.224 * 255, 0.225 * 255],
            **crop,
        )
    else:
        images = fn.decoders.image(encoded, device=decoder)
        if args.resize:
            images = fn.resize(images, size=args.resize, mode="not_smaller")
        images = fn.crop_mirror_normalize(
            images,
            dtype=types.UINT8,
            crop_pos_x=fn.random.uniform(range=[0, 1]),
            crop_pos_y=fn.random.uniform(range=[0, 1]),
            **crop,
        )
    return images, labels


def main():
    parser = loader.build_parser()
    parser.add_argument("--random_crop", action="store_true", help="DALI's own training pipeline")
    args = parser.parse_args()
    dataset = loader.open_images(parser, args, None)
    pipeline = training_pipeline(
        dataset.root,
        args,
        "mixed" if common.ON_GPU else "cpu",
        batch_size=args.batch_size,
        num_threads=max(1, args.workers),
        device_id=0 if common.ON_GPU else None,
        seed=args.seed,
    )
    batches = DALIClassificationIterator(
        pipeline, reader_name="Reader", auto_reset=True, last_batch_policy=LastBatchPolicy.PARTIAL
    )
    common.time_reading(
        args, lambda: ((batch[0]["data"], batch[0]["label"]) for batch in batches), len(dataset)
    )


if __name__ == "__main__":
    main()
