// made by `python tools/site.py` from src/ and results/
const DATA = {
"families": {
"train": {
"base": [
"# /// script",
"# requires-python = \">=3.10\"",
"# dependencies = [",
"#     \"pillow\", \"torch>=2.11\", \"torchvision>=0.26\", \"tqdm\",",
"# ]",
"# ///",
"\"\"\"Train an image classifier on DATASET/train/<class>/* and validate it on DATASET/val/<class>/*.",
"",
"    python train.py --dataset DATASET --epochs 5",
"",
"Each epoch prints loss, accuracy and images/s, and saves RESULT_DIR/<script name>.pt for --resume.",
"After the last epoch it writes a record, RESULT_DIR/<script name>.json.",
"\"\"\"",
"",
"import argparse",
"import io",
"import json",
"import os",
"import statistics",
"import sys",
"import time",
"import warnings",
"import zipfile",
"from pathlib import Path",
"",
"import torch",
"from PIL import Image, ImageOps",
"from torch import nn",
"from torch.utils.data import DataLoader, RandomSampler",
"from torchvision import datasets, models",
"from torchvision.transforms import v2 as transforms",
"from tqdm import tqdm",
"",
"warnings.filterwarnings(\"ignore\", module=\"PIL\")  # its warnings name no file and are harmless",
"",
"",
"def fail(message):",
"    \"\"\"Print one line on stderr and exit with status 2, which means wrong usage.\"\"\"",
"    print(f\"{Path(__file__).name}: error: {message}\", file=sys.stderr)",
"    sys.exit(2)",
"",
"",
"def count(text):",
"    \"\"\"Return an option's whole number, which is 1 or more. Raises ArgumentTypeError.\"\"\"",
"    if not text.isdecimal() or int(text) < 1:",
"        raise argparse.ArgumentTypeError(f\"{text!r} is not a whole number from 1 up\")",
"    return int(text)",
"",
"",
"def build_parser():",
"    \"\"\"Return the parser of the options. They have the same defaults in every script.\"\"\"",
"    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)",
"    parser.error = fail",
"    add = parser.add_argument",
"    places = [folder / \"data\" / \"digits\" for folder in Path(__file__).resolve().parents]",
"    digits = next(filter(Path.is_dir, places), places[:2][-1])",
"    add(\"--dataset\", type=Path, default=digits, help=\"folder with train/<class>/*, val/<class>/*\")",
"    add(\"--image_size\", type=count, default=32, help=\"height and width in training, pixels\")",
"    add(\"--val_size\", type=count, help=\"height and width in validation; None: IMAGE_SIZE\")",
"    add(\"--augment\", choices=[\"none\", \"resized\", \"crop\"], default=\"none\",",
"        help=\"random flips and crops: resized as for ImageNet, or crop: padded by 1/8\")",
"    cores = len(os.sched_getaffinity(0)) if hasattr(os, \"sched_getaffinity\") else os.cpu_count()",
"    add(\"--workers\", type=int, default=min(16, cores), help=\"loading processes for training\")",
"    add(\"--width\", type=count, default=16, help=\"channels of conv11's first layer\")",
"    add(\"--model\", default=\"conv11\", help=\"conv11 or a classifier of torchvision.models\")",
"    add(\"--batch_size\", type=count, default=120, help=\"images in a step, all processes together\")",
"    add(\"--lr\", type=float, default=0.1, help=\"highest learning rate\")",
"    add(\"--epochs\", type=count, default=5, help=\"passes over the training images\")",
"    add(\"--steps\", type=count, help=\"end each epoch after this many steps; None: all\")",
"    add(\"--seed\", type=int, default=0, help=\"sets weights, image order and augmentation\")",
"    add(\"--result_dir\", type=Path, default=Path(\"runs\"), help=\"folder of record and checkpoint\")",
"    add(\"--resume\", help=\"a checkpoint, or auto: the one in RESULT_DIR if there is one\")",
"    return parser",
"",
"",
"def load_image(path):",
"    \"\"\"Return the image at `path` in RGB, turned by its EXIF. Raises OSError with the path.\"\"\"",
"    try:",
"        with Image.open(path) as image:",
"            return ImageOps.exif_transpose(image).convert(\"RGB\")",
"    except Exception as error:",
"        raise OSError(f\"cannot read {path}: {error}\") from None",
"",
"",
"def open_folder(dataset, names, transform):",
"    \"\"\"Return an ImageFolder over the first of DATASET/<names> that is there.\"\"\"",
"    root = next((dataset / name for name in names if (dataset / name).is_dir()), dataset / names[0])",
"    try:",
"        return datasets.ImageFolder(root, transform, loader=load_image, is_valid_file=lambda path: (",
"            datasets.folder.is_image_file(path) and not os.path.basename(path).startswith(\"._\")))",
"    except OSError as error:",
"        fail(f\"--dataset {dataset}: {error} (it needs {' or '.join(names)}/<class>/*; \"",
"             \"`python make_dataset.py digits` makes the default)\")",
"",
"",
"def write(path, save):",
"    \"\"\"Call save(file) on a file beside `path`, then move it there: `path` is never half a file.\"\"\"",
"    try:",
"        with open(f\"{path}.part\", \"wb\") as file:",
"            save(file)",
"    except RuntimeError as error:  # torch.save hides the OSError of a full disk",
"        raise error.__context__ or error",
"    os.replace(f\"{path}.part\", path)",
"",
"",
"def conv11(width, classes):",
"    \"\"\"Return eleven 3x3 convolutions: (N, 3, H, W) floats to (N, classes) scores.\"\"\"",
"    layers, channels = [], 3",
"    for i in range(11):",
"        wider = width * 2 ** ((i + 1) // 3)",
"        layers += [nn.Conv2d(channels, wider, 3, 2 if i % 3 == 2 else 1, 1, bias=False),",
"                   nn.BatchNorm2d(wider), nn.ReLU(inplace=True)]",
"        channels = wider",
"    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]",
"    return nn.Sequential(*layers)",
"",
"",
"def main():",
"    # --------------------------------------------------------------------------------- options",
"    started, script = time.perf_counter(), Path(__file__).stem",
"    args = build_parser().parse_args()",
"",
"    # the number of this process, the number of processes, and the device of this process",
"    rank = 0",
"    world_size = 1",
"    device = torch.device(\"cuda\" if torch.cuda.is_available() else \"cpu\")",
"",
"    on_gpu = device.type == \"cuda\"",
"    if args.batch_size % world_size:",
"        fail(f\"--batch_size {args.batch_size} is not a multiple of {world_size} processes\")",
"    if not 0 < args.lr < 3e38 or not 0 <= args.seed < 2 ** 31 or args.workers < 0:",
"        fail(\"--lr has to be above 0 and below 3e38, --seed 0 to 2147483647, --workers 0 or more\")",
"    # every process starts from the same weights",
"    torch.manual_seed(args.seed)",
"    saved = args.result_dir / f\"{script}.pt\"",
"    try:",
"        args.result_dir.mkdir(parents=True, exist_ok=True)",
"        open(f\"{saved}.part\", \"ab\").close()  # an error now, not after the first epoch",
"    except OSError as error:",
"        fail(f\"--result_dir: {error}\")",
"",
"    # ------------------------------------------------------------------------------------ data",
"    val_size = args.val_size or args.image_size",
"    val_transform = transforms.Compose([",
"        transforms.Resize(val_size), transforms.CenterCrop(val_size), transforms.PILToTensor()])",
"    center = [transforms.Resize(args.image_size), transforms.CenterCrop(args.image_size)]",
"    flip = transforms.RandomHorizontalFlip()",
"    crop = dict(none=center, resized=[transforms.RandomResizedCrop(args.image_size), flip], crop=[",
"        *center, transforms.RandomCrop(args.image_size, args.image_size // 8), flip])[args.augment]",
"    train_transform = transforms.Compose([*crop, transforms.PILToTensor()])",
"",
"    # uint8 images (3, height, width) with the number of their class",
"    train_set = open_folder(args.dataset, (\"train\", \"training\"), train_transform)",
"    val_set = open_folder(args.dataset, (\"val\", \"test\", \"testing\"), val_transform)",
"    if odd := set(train_set.classes) ^ set(val_set.classes):",
"        fail(f\"--dataset {args.dataset}: classes in only one of train and val: {sorted(odd)}\")",
"    if len(train_set) < args.batch_size:",
"        fail(f\"--batch_size {args.batch_size}: there are only {len(train_set)} training images\")",
"",
"    # epoch e (from 0) takes the images in the order of torch.randperm, seeded with --seed + e",
"    sampler = RandomSampler(train_set, generator=torch.Generator())",
"",
"    # each process has its share of the validation images, the batch and the workers",
"    val_sampler = range(rank, len(val_set), world_size)",
"    workers = -(-args.workers // world_size)",
"    loading = dict(batch_size=args.batch_size // world_size, num_workers=workers, pin_memory=on_gpu,",
"                   persistent_workers=workers > 0, generator=torch.Generator())",
"",
"    train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **loading)",
"",
"    # every validation image, in order",
"    val_loader = DataLoader(val_set, sampler=val_sampler, **loading)",
"",
"    # ----------------------------------------------------------------------------------- model",
"    # the device turns bytes into floats; mean and std are there, so that no step waits for a copy",
"    mean, std = torch.tensor([[.485, .456, .406], [.229, .224, .225]]).to(device)[..., None, None]",
"    normalize = transforms.Compose([",
"        transforms.ToDtype(torch.float32, scale=True),",
"        transforms.Lambda(lambda x: (x - mean.to(x.device)) / std.to(x.device))])  # DP: on each GPU",
"    classes = len(train_set.classes)",
"    try:",
"        if args.model == \"conv11\":",
"            model = conv11(args.width, classes)",
"        else:",
"            no_aux = {\"aux_logits\": False} if args.model in (\"googlenet\", \"inception_v3\") else {}",
"            model = models.get_model(args.model, num_classes=classes, **no_aux)",
"        [model.eval()(torch.zeros(1, 3, side, side)) for side in {args.image_size, val_size}]",
"    except Exception as error:  # some models take one size only",
"        fail(f\"--model {args.model}, image sizes {args.image_size} and {val_size}: {error}\")",
"",
"    # never wrap model itself, wrap net below: optimizer, checkpoint and validation use model",
"    model = model.to(device)",
"",
"    # ------------------------------------------------------------------------------- optimizer",
"    loss_function = nn.CrossEntropyLoss()",
"    optimizer = torch.optim.SGD(model.parameters(), args.lr, 0.9, weight_decay=5e-4, nesterov=True)",
"",
"    parameters = sum(parameter.numel() for parameter in model.parameters())",
"    print(f\"{script}: {parameters:,} parameters, {len(train_set):,} images, {device}\", flush=True)",
"",
"    # a checkpoint holds the states of these",
"    parts = {\"model\": model, \"optimizer\": optimizer}",
"",
"    # each step calls net on uint8 images; techniques wrap net, so that model stays as it is",
"    net = nn.Sequential(normalize, model)",
"",
"    # -------------------------------------------------------------------------------- training",
"    resume = (saved if saved.exists() else None) if args.resume == \"auto\" else args.resume",
"    content = Path(resume).read_bytes() if resume and rank == 0 else None",
"",
"    # continue with the states of the checkpoint and the options of this run",
"    epochs = []",
"    if content is not None:",
"        try:",
"            if damaged := zipfile.ZipFile(io.BytesIO(content)).testzip():",
"                raise ValueError(f\"{damaged} is damaged\")  # torch.load would not notice",
"            checkpoint = torch.load(io.BytesIO(content), map_location=\"cpu\", weights_only=True)",
"            states = checkpoint[\"parts\"]",
"            states[\"optimizer\"][\"param_groups\"] = optimizer.state_dict()[\"param_groups\"]",
"            for name in filter(states.get, parts):",
"                parts[name].load_state_dict(states[name])",
"            epochs = checkpoint[\"epochs\"]",
"        except Exception as error:",
"            fail(f\"--resume {resume}: damaged, or of another model: {error!r:.150}\")",
"        changed = [f\"--{name} {vars(args)[name]}, which was {old}\" for name, old in",
"                   checkpoint[\"options\"].items() if str(vars(args).get(name, old)) != old]",
"        print(f\"{script}: {len(epochs)} of {args.epochs} epochs are done\", *changed, sep=\"; \")",
"    if saved.exists() and Path(resume or \"\").resolve() != saved.resolve():",
"        print(f\"{script}: replaces {saved}; --resume auto would continue it\", flush=True)",
"",
"    steps = min(len(train_loader), args.steps or len(train_loader))",
"    # the learning rate rises for a fifth of all steps, then falls to zero",
"    done, total = len(epochs) * steps, args.epochs * steps",
"    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(",
"        1, (done + step + 1) / (0.2 * total), (total - done - step) / (0.8 * total)))",
"",
"    # the host waits for the GPU only before and after the steps of an epoch, to time them",
"    synchronize = torch.cuda.synchronize if on_gpu else lambda: None",
"    warmup_seconds, resumed = 0.0, len(epochs)",
"    for epoch in range(resumed, args.epochs):",
"        # each epoch and process has its own seed, and the same one after a resume",
"        torch.manual_seed((args.seed + epoch) * world_size + rank)",
"        loading[\"generator\"].manual_seed(torch.initial_seed())",
"",
"        # the order of the images",
"        sampler.generator.manual_seed(args.seed + epoch)",
"",
"        losses, data_wait = torch.zeros(steps, device=device), 0.0",
"        model.train()",
"        synchronize()",
"        start = tick = time.perf_counter()",
"        for step, (images, labels) in tqdm(zip(range(steps), train_loader), f\"epoch {epoch + 1}\",",
"                                           steps, leave=False, disable=None if rank == 0 else True):",
"            data_wait += time.perf_counter() - tick",
"            labels = labels.to(device, non_blocking=True)",
"            images = images.to(device, non_blocking=True)",
"",
"            output = net(images)",
"            loss = loss_function(output, labels)",
"",
"            optimizer.zero_grad()",
"            loss.backward()",
"            optimizer.step()",
"",
"            # the loss stays on the device: reading it here would make each step wait",
"            losses[step] = loss.detach()",
"            scheduler.step()",
"            tick = time.perf_counter()",
"        synchronize()",
"        seconds = time.perf_counter() - start",
"        warmup_seconds = warmup_seconds or time.perf_counter() - started",
"",
"        # validation",
"        model.eval()",
"        correct = torch.zeros(2, device=device)",
"        with torch.inference_mode():",
"            for images, labels in val_loader:",
"                output = model(normalize(images.to(device, non_blocking=True)))",
"                labels = labels.to(device, non_blocking=True)",
"                hits = output.topk(min(5, classes)).indices == labels[:, None]",
"                correct += torch.stack([hits[:, 0].sum(), hits.sum()])",
"",
"        loss = losses.mean().item()  # read once an epoch",
"        bad = (~losses.isfinite()).nonzero().flatten().tolist()",
"        if bad or not output.isfinite().all():",
"            sys.exit(f\"{script}: error: the loss is no longer finite in epoch {epoch + 1}, step \"",
"                     f\"{(bad or [steps - 1])[0] + 1}: try a lower --lr\")",
"",
"        # the epoch's line and checkpoint",
"        top1, top5 = (correct / len(val_set)).tolist()",
"        speed, wait = steps * args.batch_size / seconds, data_wait / seconds",
"        epochs.append(dict(loss=loss, val_top1=top1, val_top5=top5, seconds=seconds,",
"                           images_per_second=speed, data_wait=wait))",
"        print(f\"epoch {epoch + 1}/{args.epochs}  loss {loss:.4f}  top-1 {top1:.2%}  \"",
"              f\"top-5 {top5:.2%}  {speed:,.0f} images/s  data wait {wait:.0%}\", flush=True)",
"        if rank == 0:",
"            states = {name: part.state_dict() for name, part in parts.items()}",
"            options = {name: str(value) for name, value in vars(args).items() if name != \"resume\"}",
"            checkpoint = dict(parts=states, epochs=epochs, options=options)",
"            write(saved, lambda file: torch.save(checkpoint, file))",
"",
"    # the record; its speed leaves out the first epoch of this run, which is the warm-up",
"    steady = epochs[resumed + 1:] or epochs[resumed:] or epochs[1:] or epochs",
"    name = torch.cuda.get_device_name(device) if on_gpu else \"cpu\"",
"    record = dict(",
"        script=script, options=vars(args), environment=dict(torch=torch.__version__, device=name),",
"        parameters=parameters, epochs=epochs, val_top1=epochs[-1][\"val_top1\"],",
"        images_per_second=statistics.median(each[\"images_per_second\"] for each in steady),",
"        train_seconds=sum(each[\"seconds\"] for each in steady), warmup_seconds=warmup_seconds,",
"        peak_memory_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None)",
"    if rank == 0:",
"        write(saved.with_suffix(\".json\"), lambda file: file.write(",
"            json.dumps(record, indent=1, default=str).encode()))",
"",
"",
"if __name__ == \"__main__\":",
"    try:",
"        main()",
"    except OSError as error:  # an unreadable image, a full disk",
"        sys.exit(f\"{Path(__file__).name}: error: {str(error).splitlines()[-1]}\")",
""
],
"variants": {
"DALI": {
"group": "Data",
"title": "decoding on the GPU or in C++ threads",
"guide": "techniques.md#train_dalipy-decoding-on-the-gpu-or-in-c-threads",
"launcher": "python ",
"added": 95,
"hunks": [
[
3,
3,
[
"#     # new #",
"#     # decodes images on the GPU or in C++ threads",
"#     \"nvidia-dali-cuda120\",",
"#"
]
],
[
24,
24,
[
"",
"# new #",
"# decodes images on the GPU or in C++ threads",
"import numpy as np",
"try:",
"    from nvidia.dali import fn, math, pipeline_def, types",
"except ImportError as error:",
"    sys.exit(f\"{Path(__file__).name}: error: {error}: pip install nvidia-dali-cuda120\")"
]
],
[
63,
63,
[
"    # new #",
"    # without a GPU the CPU decodes; --workers is the number of threads",
"    add(\"--dali_device\", choices=[\"gpu\", \"cpu\"], default=\"gpu\", help=\"what decodes; no GPU: cpu\")",
""
]
],
[
94,
94,
[
"",
"# new #",
"# does what train_transform and val_transform do: if you change those, change this too",
"@pipeline_def",
"def image_pipeline(paths, size, augment, on_gpu):",
"    \"\"\"Return a DALI pipeline: uint8 images (size, size, 3) of the files that `paths` names.\"\"\"",
"    engine = dict(device=\"mixed\", hw_decoder_load=1.0, jpeg_fancy_upsampling=True) if on_gpu else {}",
"    resize = dict(size=[size, size], antialias=True, interp_type=types.INTERP_LINEAR)",
"    encoded = fn.io.file.read(fn.external_source(paths, dtype=types.UINT8, ndim=1))",
"    # a decoder can crash on a file that is no image: peek_image_shape has to fail before that",
"    shape = fn.peek_image_shape(encoded, dtype=types.INT32)[:2]",
"    encoded = fn.reinterpret(encoded, shape=0 * shape[:1] - 1)  # -1: nothing changes",
"    images = fn.decoders.image(encoded, **engine)",
"    if augment == \"resized\":",
"        images = fn.random_resized_crop(images, **resize)",
"        return fn.flip(images, horizontal=fn.random.coin_flip())",
"    # as in torchvision: Resize rounds down, CenterCrop rounds a half to the even pixel",
"    resized = size * shape // math.min(shape[0], shape[1])",
"    margin = resized - size",
"    corner = (margin + (margin // 2 & 1)) // 2",
"    scale = shape / fn.cast(resized, dtype=types.FLOAT)",
"    images = fn.resize(images, roi_start=corner * scale, roi_end=(corner + size) * scale, **resize)",
"    if augment == \"crop\":  # the whole image, moved by up to an eighth over black",
"        pad = [*range(-(size // 8), size // 8 + 1)]",
"        corner = fn.random.uniform(values=pad, shape=2, dtype=types.INT32)",
"        images = fn.slice(images, start=corner, shape=[size, size], axes=[0, 1],",
"                          out_of_bounds_policy=\"pad\")",
"        images = fn.flip(images, horizontal=fn.random.coin_flip())",
"    return images",
"",
"# new #",
"# DALI returns whole batches, so this class replaces DataLoader",
"class DALILoader:",
"    \"\"\"Yield uint8 images (N, 3, size, size) and labels (N,) in the order of `sampler`.\"\"\"",
"    def __init__(self, dataset, sampler, size, augment, on_gpu, batch_size, num_workers,",
"                 drop_last=False, **others):",
"        self.dataset, self.on_gpu, self.pipeline = dataset, on_gpu, None",
"        self.labels = torch.tensor([*map(dataset.target_transform or int, dataset.targets)])",
"        self.order = torch.utils.data.BatchSampler(sampler, batch_size, drop_last)",
"        self.to_read, self.reading = iter(()), []",
"        self.options = dict(",
"            size=size, augment=augment, on_gpu=on_gpu, batch_size=batch_size,",
"            num_threads=max(1, num_workers), prefetch_queue_depth=3,",
"            device_id=torch.cuda.current_device() if on_gpu else None)",
"    def __len__(self):",
"        return len(self.order)",
"    def paths(self):",
"        \"\"\"Return the paths of the next batch. DALI calls this, some batches ahead of training.\"\"\"",
"        self.reading.append(next(self.to_read))",
"        return [np.frombuffer(os.fsencode(self.dataset.samples[i][0]), np.uint8)",
"                for i in self.reading[-1]]",
"    def __iter__(self):",
"        if not self.pipeline:  # its seed is that of this process's first epoch",
"            self.pipeline = image_pipeline(",
"                self.paths, seed=torch.initial_seed() % 2 ** 31, **self.options)",
"        self.to_read = iter(())",
"        while self.reading:  # --steps ended the last epoch early: drop what was read ahead",
"            self.read()",
"        self.pipeline.reset()",
"        self.to_read = iter(self.order)",
"        for _ in range(len(self)):",
"            yield self.read()",
"    def read(self):",
"        \"\"\"Return the next batch. Raise OSError if a file cannot be read.\"\"\"",
"        try:",
"            stream = torch.cuda.current_stream() if self.on_gpu else None",
"            images = self.pipeline.run(stream)[0].as_tensor()",
"        except RuntimeError as error:",
"            for i in sum(self.reading, []):  # Pillow names the file, DALI does not always",
"                load_image(self.dataset.samples[i][0])",
"            said = str(error).split(\"\\nCurrent pipeline\")[0].splitlines()[-1]",
"            raise OSError(f\"DALI cannot read the images: {said}\") from None",
"        # a copy, because DALI reuses its memory",
"        images = torch.from_dlpack(images).permute(0, 3, 1, 2).contiguous()",
"        return images, self.labels[self.reading.pop(0)]"
]
],
[
168,
169,
[
"    # new #",
"    # DALI reads the same images in the same order",
"    dali_gpu = on_gpu and args.dali_device == \"gpu\"",
"    train_loader = DALILoader(train_set, sampler, args.image_size, args.augment, dali_gpu,",
"                              drop_last=True, **loading)"
]
],
[
171,
172,
[
"    # new #",
"    # DALI reads the images of validation, too",
"    val_loader = DALILoader(val_set, val_sampler, val_size, \"none\", dali_gpu, **loading)"
]
]
]
},
"DDP": {
"group": "Several GPUs",
"title": "DistributedDataParallel",
"guide": "techniques.md#train_ddppy-distributeddataparallel",
"launcher": "torchrun --standalone --nproc_per_node=gpu ",
"added": 48,
"hunks": [
[
70,
70,
[
"    # new #",
"    # sync_bn is slow because all GPUs wait for each other in every batch norm",
"    add(\"--sync_bn\", action=\"store_true\", help=\"batch norm over all GPUs: slow\")",
"    add(\"--bucket_cap_mb\", type=count, help=\"MB of gradients that are averaged at once; None: 25\")",
"    add(\"--local-rank\", help=argparse.SUPPRESS)  # python -m torch.distributed.launch passes it",
""
]
],
[
123,
126,
[
"    # new #",
"    # torchrun starts one process for each GPU and gives each process its number",
"    if \"LOCAL_RANK\" not in os.environ:",
"        fail(f\"start it with: torchrun --standalone --nproc_per_node=gpu {script}.py \"",
"             \"(without a GPU: --nproc_per_node=2)\")",
"    dist = torch.distributed",
"    dist.init_process_group(\"nccl\" if torch.cuda.is_available() else \"gloo\")",
"    rank = dist.get_rank()",
"    world_size = dist.get_world_size()",
"    device = torch.device(\"cpu\")",
"    if torch.cuda.is_available():",
"        device = torch.device(\"cuda\", int(os.environ[\"LOCAL_RANK\"]))",
"        torch.cuda.set_device(device)",
"    sys.stdout = sys.stdout if rank == 0 else open(os.devnull, \"w\")  # only process 0 prints"
]
],
[
160,
161,
[
"    # new #",
"    # each process takes every world_size-th image of that order",
"    sampler = torch.utils.data.DistributedSampler(",
"        train_set, world_size, rank, seed=args.seed, drop_last=True)"
]
],
[
206,
206,
[
"    # new #",
"    # DDP averages the gradients of all processes while the backward pass runs",
"    net = nn.SyncBatchNorm.convert_sync_batchnorm(net) if args.sync_bn else net",
"    net = nn.parallel.DistributedDataParallel(",
"        net, device_ids=[device] if on_gpu else None, bucket_cap_mb=args.bucket_cap_mb)",
"    net.broadcast_buffers = False  # batch norm statistics are sent once an epoch, below",
""
]
],
[
209,
209,
[
"",
"    # new #",
"    # process 0 reads the checkpoint and sends it to all: other machines may not have the file",
"    contents = [content]",
"    dist.broadcast_object_list(contents, device=device)",
"    content = contents[0]"
]
],
[
245,
246,
[
"        # new #",
"        # without this line every epoch has the order of the first one",
"        sampler.set_epoch(epoch)"
]
],
[
272,
272,
[
"        # new #",
"        # average the loss over the processes; send process 0's batch norm statistics to all",
"        dist.all_reduce(losses.div_(world_size))",
"        for buffer in model.buffers():",
"            dist.broadcast(buffer, 0)",
""
]
],
[
287,
287,
[
"",
"        # new #",
"        # each process has counted its own share of the images",
"        dist.all_reduce(correct)"
]
],
[
314,
314,
[
"    # new #",
"    # PyTorch warns about a process group that stays open",
"    dist.destroy_process_group()",
""
]
]
]
},
"DP": {
"group": "Several GPUs",
"title": "DataParallel",
"guide": "techniques.md#train_dppy-dataparallel",
"launcher": "python ",
"added": 5,
"hunks": [
[
206,
206,
[
"    # new #",
"    # each step copies the weights to every GPU and gives each GPU an equal part of the batch",
"    if hasattr(net, \"_orig_mod\") and torch.cuda.device_count() > 1:  # net is compiled",
"        fail(\"DataParallel cannot copy a compiled model to several GPUs: take DDP\")",
"    net = nn.DataParallel(net)",
""
]
]
]
},
"LMDB": {
"group": "Data",
"title": "one file instead of many",
"guide": "techniques.md#train_lmdbpy-one-file-instead-of-many",
"launcher": "python ",
"added": 74,
"hunks": [
[
3,
3,
[
"#     # new #",
"#     # many files in one",
"#     \"lmdb\",",
"#"
]
],
[
24,
24,
[
"",
"# new #",
"# one LMDB file replaces many small ones",
"import fcntl",
"import functools",
"import lmdb"
]
],
[
63,
63,
[
"    # new #",
"    # loader_LMDB.py makes and reads the same files",
"    add(\"--lmdb\", type=Path, help=\"folder of the LMDB files; None: the one that DATASET is in\")",
""
]
],
[
94,
94,
[
"",
"# new #",
"# the index is written last, so a file without it is incomplete",
"def build_lmdb(path, keys, index):",
"    \"\"\"Copy the files of `keys`, {name: key}, into a new LMDB file `path`. Raises OSError.\"\"\"",
"    with open(f\"{path}.part\", \"ab\") as part:",
"        fcntl.flock(part, fcntl.LOCK_EX)  # waits for another process that builds it",
"        if os.path.exists(path):",
"            return",
"        try:",
"            part.truncate(0)  # remove what a killed process left",
"            map_size = 2 * sum(map(os.path.getsize, keys)) + 2 * len(index) + 2 ** 15 * len(keys)",
"            with lmdb.open(part.name, map_size, subdir=False, lock=False, sync=False) as store:",
"                for name, key in tqdm(keys.items(), f\"building {path}\", disable=None):",
"                    with store.begin(write=True) as transaction:",
"                        transaction.put(key, Path(name).read_bytes())",
"                with store.begin(write=True) as transaction:",
"                    transaction.put(b\"index 2\", index)",
"                store.sync(True)",
"            os.replace(part.name, path)",
"        except (OSError, lmdb.Error) as error:",
"            part.truncate(0)",
"            raise OSError(f\"cannot build {path}: {error}; --lmdb can name another disk\") from None",
"",
"# new #",
"# each process opens the file when it first reads; a forked worker has to open it again",
"@functools.cache",
"def open_lmdb(path):",
"    \"\"\"Return a transaction that reads the LMDB file `path`. Raises OSError.\"\"\"",
"    try:",
"        store = lmdb.open(path, subdir=False, readonly=True, create=False, lock=False)",
"        if os.path.getsize(path) < (store.info()[\"last_pgno\"] + 1) * store.stat()[\"psize\"]:",
"            raise lmdb.Error(\"it is cut short\")  # reading on would be a crash",
"        return store.begin()",
"    except lmdb.Error as error:",
"        raise OSError(f\"{path}: {error}; if damaged, remove it to build it again\") from None",
"os.register_at_fork(after_in_child=open_lmdb.cache_clear)",
"",
"# new #",
"# ImageFolder calls this function in place of load_image",
"def load_record(path, keys, name):",
"    \"\"\"Return the image `name` from the LMDB file `path`. Raises OSError with both.\"\"\"",
"    image = io.BytesIO(open_lmdb(path).get(keys[name]))",
"    try:",
"        return load_image(image)",
"    except OSError as error:  # name the file in place of the bytes",
"        raise OSError(str(error).replace(repr(image), f\"{name} in {path}\")) from None",
"",
"# new #",
"# names, sizes and times show whether the file was made from these images",
"def read_from_lmdb(folder, path):",
"    \"\"\"Have an ImageFolder read from the LMDB file `path`, or build it. Raises OSError.\"\"\"",
"    keys = {name: b\"%d\" % i for i, (name, _) in enumerate(folder.samples)}",
"    files = [[os.path.relpath(name, folder.root), file.st_size, file.st_mtime_ns]",
"             for name in keys for file in [os.stat(name)]]",
"    index = json.dumps(dict(classes=folder.classes, files=files)).encode()",
"    if not os.path.exists(path):",
"        build_lmdb(path, keys, index)",
"    if open_lmdb(path).get(b\"index 2\") != index:",
"        raise OSError(f\"{path} holds other files than {folder.root}: remove it to build it again\")",
"    folder.loader = functools.partial(load_record, path, keys)"
]
],
[
158,
158,
[
"",
"    # new #",
"    # a slow disk reads one file faster than many",
"    home = args.lmdb or args.dataset.resolve().parent",
"    for folder, split in (train_set, \"train\"), (val_set, \"test\"):",
"        read_from_lmdb(folder, f\"{home / args.dataset.resolve().name}_{split}.lmdb\")"
]
]
]
},
"amp": {
"group": "Computing",
"title": "automatic mixed precision",
"guide": "techniques.md#train_amppy-automatic-mixed-precision",
"launcher": "python ",
"added": 17,
"hunks": [
[
69,
69,
[
"    # new #",
"    # float16 needs a scaled loss; bfloat16, which a CPU always takes, has the range of float32",
"    add(\"--amp_dtype\", choices=[\"float16\", \"bfloat16\"], default=\"float16\", help=\"CPU: bfloat16\")",
""
]
],
[
203,
203,
[
"    # new #",
"    # the scaler multiplies the loss, because small gradients become zero in float16",
"    amp_dtype = getattr(torch, args.amp_dtype) if on_gpu else torch.bfloat16",
"    parts[\"scaler\"] = scaler = torch.amp.GradScaler(enabled=amp_dtype == torch.float16)",
""
]
],
[
257,
259,
[
"            # new #",
"            # convolutions and matrix products run in half precision, the loss in float32",
"            with torch.autocast(device.type, amp_dtype):",
"                output = net(images)",
"                loss = loss_function(output, labels)"
]
],
[
261,
263,
[
"            # new #",
"            # the scaler divides the gradients again, and skips the step if they overflowed",
"            scaler.scale(loss).backward()",
"            scaler.step(optimizer)",
"            scaler.update()"
]
]
]
},
"cache": {
"group": "Data",
"title": "the decoded images in memory",
"guide": "techniques.md#train_cachepy-the-decoded-images-in-memory",
"launcher": "python ",
"added": 86,
"hunks": [
[
63,
63,
[
"    # new #",
"    # auto is gpu if the images take at most half of the free GPU memory, else ram",
"    add(\"--cache_device\", choices=[\"auto\", \"gpu\", \"ram\"], default=\"auto\", help=\"where images stay\")",
""
]
],
[
94,
94,
[
"",
"# new #",
"# crops and flips a whole batch as RandomResizedCrop or RandomCrop and RandomHorizontalFlip do",
"def random_crops(images, size, augment):",
"    \"\"\"Return a random crop of each image: uint8 (N, 3, side, side) to (N, 3, size, size).\"\"\"",
"    count, pad = len(images), size // 8",
"    if augment == \"crop\":  # the whole image, moved by up to an eighth over black",
"        edges, centers = torch.ones(count, 2), torch.randint(-pad, pad + 1, (count, 2)) * 2 / size",
"    else:",
"        area = torch.empty(count, 10).uniform_(0.08, 1)  # ten tries; the first that fits is taken",
"        ratio = (4 / 3) ** torch.empty(count, 10).uniform_(-1, 1)",
"        edges = torch.stack([area * ratio, area / ratio], 2).sqrt()  # width and height",
"        edges = edges[torch.arange(count), (edges <= 1).all(2).int().argmax(1)].clamp(max=1)",
"        centers = (1 - edges) * torch.empty(count, 2).uniform_(-1, 1)  # coordinates from -1 to 1",
"    edges[:, 0] *= torch.randint(2, (count,)) * 2 - 1  # a negative width flips",
"    crops = torch.stack([edges, centers])",
"    crops = crops.pin_memory() if images.is_cuda else crops  # the host does not wait for the copy",
"    edges, centers = crops.to(images.device, non_blocking=True)[..., None]",
"    pixels = (2 * torch.arange(size, device=images.device) + 1) / size - 1  # from -1 to 1",
"    across, down = (edges * pixels + centers).unbind(1)",
"    grid = torch.stack(torch.broadcast_tensors(across[:, None], down[:, :, None]), 3)",
"    return nn.functional.grid_sample(images.float(), grid, align_corners=False, padding_mode=(",
"        \"zeros\" if augment == \"crop\" else \"border\")).round().byte()",
"",
"# new #",
"# all images are in one tensor, so a batch needs no loading processes",
"class CachedLoader:",
"    \"\"\"Yield uint8 images (N, 3, size, size) and labels (N,) from memory.",
"    With several processes each decodes its share of `dataset` and gets the others' shares. `place`",
"    holds the images; `crop` is None or (size, augment); random crops are made on `device`.",
"    \"\"\"",
"    def __init__(self, dataset, sampler, side, crop, place, device, rank, world_size, batch_size,",
"                 num_workers, pin_memory, drop_last=False, **others):",
"        self.dataset = dataset  # as DataLoader has it",
"        self.order = torch.utils.data.BatchSampler(sampler, batch_size, drop_last)",
"        self.crop, self.device, self.pinned = crop, device, pin_memory and place != device",
"        self.images = torch.zeros(len(dataset), 3, side, side, dtype=torch.uint8, device=place)",
"        self.labels = torch.zeros(len(dataset), dtype=torch.long, device=place)",
"        images, labels = (each[rank::world_size].split(batch_size)",
"                          for each in (self.images, self.labels))",
"        decoded = DataLoader(dataset, batch_size, sampler=range(rank, len(dataset), world_size),",
"                             num_workers=num_workers, generator=torch.Generator())",
"        for k, batch in enumerate(tqdm(decoded, f\"decoding {len(dataset)}\", leave=False,",
"                                       disable=None if rank == 0 else True)):",
"            images[k].copy_(batch[0])",
"            labels[k].copy_(batch[1])",
"        for part in [*self.images.split(1000), self.labels] if world_size > 1 else []:",
"            total = part.to(device)  # the other shares are zeros",
"            torch.distributed.all_reduce(total)",
"            part.copy_(total)",
"    def __len__(self):",
"        return len(self.order)",
"    def __iter__(self):",
"        order = torch.tensor([*self.order.sampler]).to(self.images.device)",
"        for numbers in order.split(self.order.batch_size)[:len(self)]:",
"            images = self.images.new_empty((len(numbers), *self.images.shape[1:]),",
"                                           pin_memory=self.pinned)",
"            torch.index_select(self.images, 0, numbers, out=images)",
"            images = images.to(self.device, non_blocking=True)",
"            yield random_crops(images, *self.crop) if self.crop else images, self.labels[numbers]"
]
],
[
159,
159,
[
"    # new #",
"    # the cache holds squares; resized crops are cut from squares that are a seventh larger",
"    side = -(-args.image_size * 8 // 7) if args.augment == \"resized\" else args.image_size",
"    cut = None if args.augment == \"none\" else (args.image_size, args.augment)",
"    if cut:",
"        own, at = train_transform.transforms, train_transform.transforms.index(crop[0])",
"        own[at:at + len(crop)] = transforms.Resize(side), transforms.CenterCrop(side)",
"    needed = 3 * (len(train_set) * side ** 2 + len(val_set) * val_size ** 2)",
"    place, free = device, torch.cuda.mem_get_info()[0] if on_gpu else 0",
"    is_large = needed > free / 2 and args.cache_device == \"auto\"",
"    if args.cache_device == \"ram\" or is_large or not on_gpu:",
"        place = torch.device(\"cpu\")",
"        free = 1024 * int(Path(\"/proc/meminfo\").read_text().split()[7])  # MemAvailable, in kB",
"        free //= int(os.getenv(\"LOCAL_WORLD_SIZE\", 1))  # each process holds all images",
"    size = f\"the decoded images take {needed / 1e6:,.1f} MB of {place} memory\"",
"    if needed > free:",
"        fail(f\"{size}, but {free / 1e6:,.1f} MB are free: take a smaller --image_size\")",
"    print(f\"{script}: {size}\", flush=True)",
""
]
],
[
168,
169,
[
"    # new #",
"    # this decodes all images; later a batch is a look-up in memory",
"    where = dict(place=place, device=device, rank=rank, world_size=world_size)",
"    train_loader = CachedLoader(train_set, sampler, side, cut, drop_last=True, **where, **loading)"
]
],
[
171,
172,
[
"    # new #",
"    # validation images are in memory, too",
"    val_loader = CachedLoader(val_set, val_sampler, val_size, None, **where, **loading)"
]
]
]
},
"channels_last": {
"group": "Computing",
"title": "the memory layout of tensor cores",
"guide": "techniques.md#train_channels_lastpy-the-memory-layout-of-tensor-cores",
"launcher": "python ",
"added": 6,
"hunks": [
[
193,
193,
[
"    # new #",
"    # tensor cores work on channels last; in other layouts each layer converts its input",
"    model = model.to(memory_format=torch.channels_last)",
""
]
],
[
255,
256,
[
"            # new #",
"            # images get the same layout as the weights",
"            images = images.to(device, non_blocking=True, memory_format=torch.channels_last)"
]
]
]
},
"compile": {
"group": "Computing",
"title": "torch.compile",
"guide": "techniques.md#train_compilepy-torchcompile",
"launcher": "python ",
"added": 6,
"hunks": [
[
61,
61,
[
"    # new #",
"    # reduce-overhead and max-autotune replay CUDA graphs; max-autotune also tries more kernels",
"    add(\"--compile_mode\", choices=[\"default\", \"reduce-overhead\", \"max-autotune\"], default=\"default\")",
""
]
],
[
204,
205,
[
"    # new #",
"    # compiling fuses layers into fewer kernels; it takes place in the first step of each image size",
"    net = torch.compile(nn.Sequential(normalize, model), mode=args.compile_mode, dynamic=False)"
]
]
]
},
"cudnn": {
"group": "Computing",
"title": "cuDNN chooses its kernels by measuring",
"guide": "techniques.md#train_cudnnpy-cudnn-chooses-its-kernels-by-measuring",
"launcher": "python ",
"added": 3,
"hunks": [
[
126,
126,
[
"",
"    # new #",
"    # cuDNN tries its algorithms on each new shape and keeps the fastest",
"    torch.backends.cudnn.benchmark = True"
]
]
]
},
"fused": {
"group": "Computing",
"title": "fused optimizer kernels",
"guide": "techniques.md#train_fusedpy-fused-optimizer-kernels",
"launcher": "python ",
"added": 13,
"hunks": [
[
197,
197,
[
"    # new #",
"    # one kernel updates all weights and handles amp's scale and overflows, so that no step waits",
"    for group in optimizer.param_groups if \"fused\" in optimizer.defaults else ():",
"        group[\"fused\"] = optimizer.defaults[\"fused\"] = True  # of later groups, too",
"        optimizer._step_supports_amp_scaling = True",
"        # PyTorch leaves momentum uninitialised if amp skips the first step",
"        for weights in group[\"params\"] if group.get(\"momentum\") else ():",
"            optimizer.state[weights][\"momentum_buffer\"] = torch.zeros_like(weights)",
"    @optimizer.register_load_state_dict_post_hook",
"    def lay_out(optimizer):  # the kernel needs momentum in the memory layout of the weights",
"        for weights, state in optimizer.state.items():",
"            state.update({name: torch.zeros_like(weights).copy_(value) for name, value",
"                          in state.items() if getattr(value, \"shape\", None) == weights.shape})",
""
]
]
]
},
"profile": {
"group": "A look inside",
"title": "what takes the time",
"guide": "techniques.md#train_profilepy-what-takes-the-time",
"launcher": "python ",
"added": 32,
"hunks": [
[
74,
74,
[
"",
"# new #",
"# shows the slowest kernels, and whether data, computing or the host limits the steps",
"def report(profiler, waited, on_gpu):",
"    \"\"\"Print which kernels (operators on a CPU) take most time, and what holds back the steps.\"\"\"",
"    gpu = torch.autograd.DeviceType.CUDA",
"    spent = {each.key: each.self_device_time_total if on_gpu else each.self_cpu_time_total",
"             for each in profiler.key_averages()",
"             if (each.device_type == gpu) == on_gpu and \"ProfilerStep\" not in each.key}",
"    for name in sorted(spent, key=spent.get, reverse=True)[:8]:",
"        print(f\"{spent[name] / sum(spent.values()):>6.1%}  {name:.90}\")",
"    times = [each.time_range for each in profiler.events()",
"             if each.device_type == gpu and not each.is_user_annotation]",
"    busy = 1 - waited if not times else sum(each.elapsed_us() for each in times) / (",
"        max(each.end for each in times) - min(each.start for each in times))",
"    what = (\"computing\" if busy >= 0.8 else \"loading data\" if waited > 0.2 else",
"            \"the host, which runs Python and starts kernels\")",
"    print(f\"steps wait for data {waited:.0%} of the time, the {'GPU' if on_gpu else 'CPU'} works \"",
"          f\"{busy:.0%} of it: what holds them back is {what}\", flush=True)"
]
],
[
236,
236,
[
"    # new #",
"    # profiles the last steps of the first epoch; if more follow, the record's speed excludes it",
"    marks, watched = [(time.perf_counter(), 0.0)], min(20, max(1, steps - 2))",
"    def finish(profiler):",
"        (begin, before), (end, after) = marks[-1 - watched], marks[-1]",
"        report(profiler, (after - before) / (end - begin), on_gpu)",
"        profiler.export_chrome_trace(f\"{args.result_dir}/{script}_trace{rank}.json.gz\")",
"    profiler = torch.profiler.profile(on_trace_ready=finish, schedule=torch.profiler.schedule(",
"        wait=max(0, steps - watched - 1), warmup=min(1, steps - watched), active=watched, repeat=1))",
"    profiler.start()",
""
]
],
[
263,
263,
[
"",
"            # new #",
"            # the time and the data wait after each step; the profiler counts the steps",
"            marks.append((time.perf_counter(), data_wait))",
"            profiler.step()"
]
]
]
},
"progressive": {
"group": "Computing",
"title": "small images first",
"guide": "techniques.md#train_progressivepy-small-images-first",
"launcher": "python ",
"added": 17,
"hunks": [
[
59,
59,
[
"    # new #",
"    # smaller images take less time; training starts on the smallest",
"    add(\"--small\", type=float, default=0.5, help=\"part of IMAGE_SIZE in the first epochs\")",
""
]
],
[
140,
140,
[
"",
"    # new #",
"    # half of the epochs have small images, three tenths medium ones, the last ones full size",
"    if not 0 < args.small <= 1:",
"        fail(f\"--small {args.small} has to be above 0 and at most 1\")",
"    # models halve the size several times, so smaller sizes are multiples of 32 or 8",
"    unit = 1 if args.small == 1 else 32 if args.image_size >= 128 else 8",
"    train_sizes = [min(args.image_size, unit * max(1, round(part * args.image_size / unit)))",
"                   for part in (args.small, (1 + args.small) / 2)] + [args.image_size]"
]
],
[
254,
254,
[
"            # new #",
"            # the first three steps try all sizes, to compile, or run out of memory, at the start",
"            stage = (epoch + 1 > 0.5 * args.epochs) + (epoch + 1 > 0.8 * args.epochs)",
"            train_size = train_sizes[step if epoch == 0 and step < 3 else stage]",
"            if train_size < args.image_size:",
"                images = transforms.Resize(train_size)(images.to(device, non_blocking=True))",
""
]
]
]
}
},
"choices": [
[
"amp"
],
[
"cudnn"
],
[
"channels_last"
],
[
"compile"
],
[
"fused"
],
[
"progressive"
],
[
"DALI",
"LMDB",
"cache"
],
[
"DDP",
"DP"
],
[
"profile"
]
]
},
"loader": {
"base": [
"# /// script",
"# requires-python = \">=3.10\"",
"# dependencies = [",
"#     \"pillow\",",
"#     \"torch>=2.11\",",
"#     \"torchvision>=0.26\",",
"#     \"tqdm\",",
"# ]",
"# ///",
"\"\"\"Read a dataset as training would, without training, and time it.",
"",
"    python loader.py --data_source DATASET",
"",
"DATASET holds classes, train/<class>/*, or pairs, train/blurry/** and train/sharp/** (--pair).",
"Every epoch it prints images/s and MB/s; at the end it writes RESULT_DIR/<script name>.json.",
"\"\"\"",
"",
"import argparse",
"import json",
"import os",
"import statistics",
"import sys",
"import time",
"import warnings",
"from pathlib import Path",
"",
"import torch",
"from PIL import Image, ImageOps",
"from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler",
"from torchvision import datasets",
"from torchvision.transforms import v2 as transforms",
"from tqdm import tqdm",
"",
"warnings.filterwarnings(\"ignore\", module=\"PIL\")  # these warnings name no file and are harmless",
"",
"",
"def at_least(least):",
"    \"\"\"Return the type of an option that is a whole number, `least` or more.\"\"\"",
"    def whole_number(text):",
"        if not text.isdecimal() or not least <= int(text) < 2 ** 31:",
"            raise argparse.ArgumentTypeError(f\"{text!r} is not a whole number from {least} up\")",
"        return int(text)",
"    return whole_number",
"",
"",
"def build_parser():",
"    \"\"\"Return the parser of the options; every loader has these, with the same defaults.\"\"\"",
"    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)",
"    parser.error = lambda message: parser.exit(2, f\"{parser.prog}: error: {message}\\n\")",
"    photos = Path(__file__).resolve().parent.parent / \"data\" / \"photos\"",
"    add = parser.add_argument",
"",
"    # data",
"    add(\"--data_source\", type=Path, default=photos, help=\"folder with train/ and val/ or test/\")",
"    add(\"--split\", choices=(\"train\", \"test\"), default=\"train\",",
"        help=\"train: new order, random crops and flips; test: fixed order, center crop\")",
"    add(\"--pair\", nargs=2, default=[\"blurry\", \"sharp\"], help=\"names of the two folders of pairs\")",
"    add(\"--samples\", type=at_least(1), help=\"read only this many samples, chosen by the seed\")",
"",
"    # work",
"    add(\"--batch_size\", type=at_least(1), default=64, help=\"samples per batch\")",
"    cores = len(os.sched_getaffinity(0)) if hasattr(os, \"sched_getaffinity\") else os.cpu_count()",
"    add(\"--num_workers\", type=at_least(0), default=min(16, cores), help=\"processes that decode\")",
"    add(\"--resize\", type=at_least(0), default=256, help=\"smaller edge in pixels; 0: no resize\")",
"    add(\"--crop\", type=at_least(1), default=224, help=\"edge of the square crop in pixels\")",
"",
"    # length",
"    add(\"--epochs\", type=at_least(1), default=3, help=\"passes; the first one is the warm-up\")",
"    add(\"--cold\", action=\"store_true\", help=\"drop the files from the page cache before each epoch\")",
"    add(\"--seed\", type=at_least(0), default=0, help=\"sets order, crops and flips\")",
"",
"    # files",
"    add(\"--result_dir\", type=Path, default=Path(\"runs\"), help=\"folder for the record\")",
"    return parser",
"",
"",
"def is_picture(path):",
"    \"\"\"Return whether the name is a picture's; macOS writes its own notes as ._name.\"\"\"",
"    name = os.path.basename(path).lower()",
"    return name.endswith(datasets.folder.IMG_EXTENSIONS) and not name.startswith(\"._\")",
"",
"",
"def load_image(file, name):",
"    \"\"\"Return an upright RGB picture: 16 bits scaled to 8, white where it is transparent.",
"",
"    `file` is a path or a binary file. Raises OSError with `name`.",
"    \"\"\"",
"    try:",
"        with Image.open(file) as image:",
"            image = ImageOps.exif_transpose(image)",
"            if image.mode.startswith(\"I\"):",
"                image = image.convert(\"I\").point(lambda value: value / 257 + 0.5).convert(\"L\")",
"            if image.has_transparency_data:",
"                image = image.convert(\"RGBA\")",
"                image = Image.alpha_composite(Image.new(\"RGBA\", image.size, \"white\"), image)",
"            return image.convert(\"RGB\")",
"    except Exception as error:",
"        raise OSError(f\"cannot read the picture {name}: {error}\") from None",
"",
"",
"class Pictures(Dataset):",
"    \"\"\"A folder's samples: (picture, label) of <class>/*, or the two pictures of a pair.",
"",
"    `transform` gets both parts of a sample at once, so a pair gets one crop and one flip; a label",
"    passes through. `samples` holds (path, label) or (path, path), `parts` the number of pictures",
"    in each; `classes` is None for pairs. Raises OSError if there are no pictures or a partner is",
"    missing.",
"    \"\"\"",
"",
"    def __init__(self, root, transform=None, pair=(\"blurry\", \"sharp\"), least=1):",
"        self.root, self.transform, self.least = root, transform, least",
"        folders = [os.path.join(root, name) for name in pair]",
"        if any(map(os.path.isdir, folders)):",
"            names = [{os.path.relpath(os.path.join(where, name), folder)",
"                      for where, _, files in os.walk(folder, followlinks=True) for name in files",
"                      if is_picture(name)} for folder in folders]",
"            for name in sorted(names[0] ^ names[1]):",
"                missing = os.path.join(folders[name in names[0]], name)",
"                raise OSError(f\"{missing} is missing, the other picture of its pair is there\")",
"            self.samples = [tuple(os.path.join(folder, name) for folder in folders)",
"                            for name in sorted(names[0])]",
"            self.classes, self.parts = None, 2",
"        else:",
"            found = datasets.ImageFolder(root, is_valid_file=is_picture)",
"            self.samples, self.classes, self.parts = found.samples, found.classes, 1",
"        if not self.samples:",
"            raise OSError(f\"no pictures in {' or '.join(folders)}\")",
"",
"    def __len__(self):",
"        return len(self.samples)",
"",
"    def __getitem__(self, i):",
"        names, label = self.samples[i][:self.parts], self.samples[i][self.parts:]",
"        pictures = [self.read(name) for name in names]",
"        self.check_sizes(names, [picture.size for picture in pictures])",
"        return self.transform(*pictures, *label) if self.transform else (*pictures, *label)",
"",
"    def check_sizes(self, names, sizes):",
"        \"\"\"Raise OSError if the (width, height) of a pair differ or an edge is below `least`.\"\"\"",
"        if sizes[0] != sizes[-1]:",
"            raise OSError(f\"the sizes of a pair differ: {names[0]} has {sizes[0]} pixels, \"",
"                          f\"{names[1]} has {sizes[1]}\")",
"        if min(sizes[0]) < self.least:",
"            raise OSError(f\"{names[0]} has {sizes[0]} pixels, less than --crop: \"",
"                          \"use --resize or a smaller --crop\")",
"",
"    def read(self, name):",
"        \"\"\"Return the decoded picture.\"\"\"",
"        return load_image(name, name)",
"",
"    def size(self, name):",
"        \"\"\"Return the bytes of the encoded picture.\"\"\"",
"        return os.path.getsize(name)",
"",
"    def files(self):",
"        \"\"\"Return the paths of the files that an epoch reads.\"\"\"",
"        return [name for sample in self.samples for name in sample[:self.parts]]",
"",
"",
"def open_pictures(parser, args, transform):",
"    \"\"\"Return the Pictures of --data_source and --split; exit with status 2 if there are none.\"\"\"",
"    names = {\"train\": (\"train\", \"training\"), \"test\": (\"val\", \"test\", \"testing\")}[args.split]",
"    root = next((args.data_source / name for name in names if (args.data_source / name).is_dir()),",
"                args.data_source / names[0])",
"    try:",
"        return Pictures(root, transform, args.pair, 1 if args.resize else args.crop)",
"    except OSError as error:",
"        parser.error(f\"--data_source {args.data_source}: {error}; it needs {names[0]}/<class>/* or \"",
"                     f\"{names[0]}/{args.pair[0]}/** and {names[0]}/{args.pair[1]}/**; \"",
"                     \"`python make_dataset.py photos` makes the default\")",
"",
"",
"def drop_from_cache(paths):",
"    \"\"\"Drop the pages of these files, and of no others, from the page cache; needs no root.\"\"\"",
"    for path in paths:",
"        file = os.open(path, os.O_RDONLY)",
"        os.fdatasync(file)  # the kernel keeps pages that are not on the disk yet",
"        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)",
"        os.close(file)",
"",
"",
"def main():",
"    # --------------------------------------------------------------------------------- options",
"    script = Path(__file__).stem",
"    parser = build_parser()",
"    args = parser.parse_args()",
"    if 0 < args.resize < args.crop:",
"        parser.error(f\"--crop {args.crop} is larger than --resize {args.resize}\")",
"",
"    # batches are copied to the GPU, as in training",
"    device = torch.device(\"cuda\" if torch.cuda.is_available() else \"cpu\")",
"    on_gpu = device.type == \"cuda\"",
"    synchronize = torch.cuda.synchronize if on_gpu else lambda: None",
"",
"    # ------------------------------------------------------------------------------------ data",
"    steps = [transforms.Resize(args.resize)] if args.resize else []",
"    if args.split == \"train\":",
"        steps += [transforms.RandomCrop(args.crop), transforms.RandomHorizontalFlip()]",
"    else:",
"        steps += [transforms.CenterCrop(args.crop)]",
"    transform = transforms.Compose([*steps, transforms.PILToTensor()])",
"",
"    # where samples come from",
"    dataset = open_pictures(parser, args, transform)",
"",
"    # the samples that are read",
"    if args.samples and args.samples < len(dataset):",
"        some = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(args.seed))",
"        dataset.samples = [dataset.samples[i] for i in some[:args.samples].sort().values.tolist()]",
"    pictures = [name for sample in dataset.samples for name in sample[:dataset.parts]]",
"    size = sum(dataset.size(name) for name in pictures)",
"",
"    # the order of epoch e is torch.randperm with a generator seeded with seed + e",
"    order = torch.Generator()",
"    sampler = SequentialSampler(dataset)",
"    if args.split == \"train\":",
"        sampler = RandomSampler(dataset, generator=order)",
"",
"    # uint8 batches: (N, 3, crop, crop) with (N,) labels, or two of (N, 3, crop, crop) for pairs",
"    loader = DataLoader(dataset, args.batch_size, sampler=sampler, num_workers=args.num_workers,",
"                        persistent_workers=args.num_workers > 0 and not args.cold,",
"                        pin_memory=on_gpu)",
"",
"    # --------------------------------------------------------------------------------- reading",
"    args.result_dir.mkdir(parents=True, exist_ok=True)",
"    print(f\"{script}: {len(dataset):,} samples, {size / 1e6:,.1f} MB, to {device}\", flush=True)",
"    epochs = []",
"    for epoch in range(args.epochs):",
"        torch.manual_seed(args.seed + epoch)",
"        order.manual_seed(args.seed + epoch)",
"        if args.cold:",
"            drop_from_cache(dataset.files())",
"        batches = iter(loader)  # starts the workers; their start is not timed",
"        synchronize()",
"        start = time.perf_counter()",
"        for first, second in tqdm(batches, f\"epoch {epoch + 1}\", total=len(loader), leave=False,",
"                                  disable=None):",
"            # a training step would begin here",
"            first = first.to(device, non_blocking=True)",
"            second = second.to(device, non_blocking=True)",
"        synchronize()",
"",
"        # the epoch's line",
"        seconds = time.perf_counter() - start",
"        epochs.append(dict(seconds=seconds, images_per_second=len(pictures) / seconds,",
"                           megabytes_per_second=size / 1e6 / seconds))",
"        print(f\"epoch {epoch + 1}/{args.epochs}  {len(pictures) / seconds:,.0f} images/s  \"",
"              f\"{size / 1e6 / seconds:,.1f} MB/s  {seconds:.2f} s\", flush=True)",
"",
"    # the record: medians of the epochs after the warm-up",
"    environment = dict(torch=torch.__version__,",
"                       device=torch.cuda.get_device_name() if on_gpu else \"cpu\")",
"    record = dict(script=script, options=vars(args), environment=environment,",
"                  samples=len(dataset), bytes=size, epochs=epochs)",
"    for name in epochs[0]:",
"        record[name] = statistics.median(each[name] for each in epochs[1:] or epochs)",
"    path = args.result_dir / f\"{script}.json\"",
"    path.with_suffix(\".part\").write_text(json.dumps(record, indent=1, default=str) + \"\\n\")",
"    os.replace(path.with_suffix(\".part\"), path)",
"",
"",
"if __name__ == \"__main__\":",
"    try:",
"        main()",
"    except OSError as error:  # a worker's error ends with the line that names the picture",
"        sys.exit(f\"{Path(__file__).name}: error: {str(error).splitlines()[-1]}\")",
"    except KeyboardInterrupt:",
"        sys.exit(f\"{Path(__file__).name}: stopped\")",
""
],
"variants": {
"DALI": {
"group": "The loaders",
"title": "decoding on the GPU or in C++ threads",
"guide": "loading.md#loader_dalipy-decoding-on-the-gpu-or-in-c-threads",
"launcher": "python ",
"added": 131,
"hunks": [
[
3,
3,
[
"#     # new #",
"#     # DALI reads and decodes",
"#     \"nvidia-dali-cuda120\",",
"#"
]
],
[
33,
33,
[
"# new #",
"# DALI decodes, resizes and crops on the GPU or in C++ threads",
"import itertools",
"import numpy as np",
"try:",
"    from nvidia.dali import fn, math, pipeline_def, types",
"    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy",
"except ImportError as error:",
"    sys.exit(f\"{Path(__file__).name}: error: {error}: pip install nvidia-dali-cuda120\")",
"warnings.filterwarnings(\"ignore\", \"Please set `reader_name`\")  # pairs have no reader of DALI's",
""
]
],
[
58,
58,
[
"",
"    # new #",
"    # where DALI decodes",
"    add(\"--dali_device\", choices=(\"gpu\", \"cpu\"), default=\"gpu\", help=\"what decodes; no GPU: cpu\")"
]
],
[
181,
181,
[
"# new #",
"# DALI gets the files of pairs from here; change __iter__ for a layout of your own",
"class ExternalInputIterator:",
"    \"\"\"Yield batches for pipeline `shard` of `shards`: first files, second files, sample numbers.",
"    A file is an array of its bytes. `order` lists the samples of an epoch. The last batches repeat",
"    samples, so that all pipelines have equally many full batches; DALIGenericIterator drops these.",
"    \"\"\"",
"    def __init__(self, samples, order, batch_size, shard=0, shards=1):",
"        self.samples, self.order, self.batch_size = samples, order, batch_size",
"        self.shard, self.shards = shard, shards",
"    def __iter__(self):",
"        steps = -(-len(self.order) // (self.batch_size * self.shards))",
"        numbers = np.resize(self.order, (steps, self.shards, self.batch_size))",
"        for batch in numbers[:, self.shard]:",
"            first, second = zip(*(self.samples[i] for i in batch))",
"            yield ([np.fromfile(name, np.uint8) for name in first],",
"                   [np.fromfile(name, np.uint8) for name in second], batch[:, np.newaxis])",
"",
"# new #",
"# does what the transform in main() does: if you change that, change this too",
"@pipeline_def",
"def pictures_pipeline(args, on_gpu, samples, order, source, shard, shards):",
"    \"\"\"Return pictures (crop, crop, 3), the (parts, 2) heights and widths, and sample numbers.\"\"\"",
"    if source:",
"        *encoded, number = fn.external_source(source, num_outputs=3, cycle=\"raise\")",
"    else:  # the label is the sample's number, so that errors can name the file",
"        encoded, number = fn.readers.file(",
"            files=[samples[i][0] for i in order], labels=order, name=\"reader\", shard_id=shard,",
"            num_shards=shards, pad_last_batch=True, stick_to_shard=args.split == \"test\",",
"            shuffle_after_epoch=args.split == \"train\",",
"            dont_use_mmap=not args.cold)  # read() is faster than mmap for files in memory",
"        encoded = [encoded]",
"    shapes = [fn.peek_image_shape(each)[:2] for each in encoded]",
"    # as in torchvision: Resize rounds down, CenterCrop rounds a half to the even pixel",
"    size = shapes[0]",
"    if args.resize:",
"        size = args.resize * size // math.min(size[0], size[1])",
"    room = size - args.crop",
"    corner, flip = (room + (room // 2 & 1)) // 2, 0",
"    if args.split == \"train\":  # one draw a sample, so a pair gets one crop and one flip",
"        corner = math.floor(fn.random.uniform(range=(0, 1), shape=[2]) * (room + 1))",
"        flip = args.crop * fn.stack(np.int32(0), fn.random.coin_flip())",
"    # fn.resize crops and flips too: a region whose end is left of its start is flipped",
"    scale = shapes[0] / fn.cast(size, dtype=types.FLOAT)",
"    start, end = (corner + flip) * scale, (corner + args.crop - flip) * scale",
"    # a decoder can crash on a file that is no picture: peek_image_shape has to fail before that",
"    encoded = [fn.reinterpret(each, shape=fn.cast(0 * shape[:1] - 1, dtype=types.INT32))",
"               for each, shape in zip(encoded, shapes)]  # -1: nothing changes",
"    # the GPU decodes 3 of 4 pictures on its JPEG engine and the others with CUDA",
"    options = dict(device=\"mixed\", hw_decoder_load=0.75) if on_gpu else {}",
"    decoded = [fn.decoders.image(each, jpeg_fancy_upsampling=True, **options) for each in encoded]",
"    pictures = [fn.resize(each, size=[args.crop, args.crop], roi_start=start, roi_end=end,",
"                          interp_type=types.INTERP_LINEAR, antialias=True) for each in decoded]",
"    return *pictures, fn.stack(*shapes), number",
"",
"# new #",
"# DALI returns whole batches, so this class replaces DataLoader",
"class DALILoader:",
"    \"\"\"Yield uint8 (N, 3, crop, crop) with (N,) labels, or two of (N, 3, crop, crop) for pairs.",
"    Every sample comes once an epoch. Raises OSError with DALI's message.",
"    \"\"\"",
"    def __init__(self, dataset, args, sampler):",
"        self.dataset, self.args, self.sampler = dataset, args, sampler",
"        self.on_gpu = args.dali_device == \"gpu\" and torch.cuda.is_available()",
"        # with two pipelines, one works while the other waits for the last pictures of its batch",
"        self.shards = 2 if self.on_gpu and len(dataset) > args.batch_size else 1",
"        # threads on more than 5 of 8 cores slow down the GPU's decoder",
"        self.threads = args.num_workers * 5 // 8 if self.on_gpu else args.num_workers",
"        self.order, self.iterator = [], None",
"        self.labels = torch.tensor([k for _, k in dataset.samples] if dataset.classes else [])",
"    def build(self):",
"        \"\"\"Return the iterator over the pipelines.\"\"\"",
"        pipelines = []",
"        for shard in range(self.shards):",
"            source = None if self.dataset.classes else ExternalInputIterator(",
"                self.dataset.samples, self.order, self.args.batch_size, shard, self.shards)",
"            pipelines.append(pictures_pipeline(",
"                self.args, self.on_gpu, self.dataset.samples, self.order, source, shard,",
"                self.shards, batch_size=self.args.batch_size,",
"                num_threads=max(1, self.threads // self.shards),",
"                device_id=0 if self.on_gpu else None, prefetch_queue_depth=3,",
"                seed=int(torch.randint(2 ** 31, ()))))",
"        names = [\"first\", \"second\"][:self.dataset.parts]",
"        return DALIGenericIterator(",
"            pipelines, [*names, \"shapes\", \"number\"],",
"            reader_name=\"reader\" if self.dataset.classes else None,",
"            size=-1 if self.dataset.classes else len(self.dataset),",
"            last_batch_policy=LastBatchPolicy.PARTIAL, prepare_first_batch=False)",
"    def __len__(self):",
"        return -(-len(self.dataset) // self.args.batch_size)",
"    def __iter__(self):",
"        self.order[:] = self.sampler  # in place: each ExternalInputIterator holds this list",
"        self.iterator = self.iterator or self.build()",
"        return self.read(iter(self.iterator))",
"    def read(self, steps):",
"        try:",
"            for batch in itertools.chain.from_iterable(steps):  # a step: one batch a pipeline",
"                number = batch[\"number\"].flatten().long()",
"                for i, sizes in zip(number.tolist(), batch[\"shapes\"].flip(-1).tolist()):",
"                    self.dataset.check_sizes(self.dataset.samples[i], list(map(tuple, sizes)))",
"                first = batch[\"first\"].permute(0, 3, 1, 2)",
"                second = (self.labels[number] if self.dataset.classes",
"                          else batch[\"second\"].permute(0, 3, 1, 2))",
"                if len(number):  # the last step can have no samples for the second pipeline",
"                    yield first, second",
"        except RuntimeError as error:",
"            said = str(error).split(\"encountered:\")[-1].strip().splitlines()[0]",
"            raise OSError(f\"DALI cannot read a picture: {said}; \"",
"                          \"resize_imagenet.py names damaged pictures\") from None",
""
]
],
[
219,
222,
[
"    # new #",
"    # DALILoader replaces DataLoader; --num_workers is the number of its threads",
"    loader = DALILoader(dataset, args, sampler)"
]
],
[
230,
230,
[
"        # new #",
"        # DALI reads ahead into the next epoch, which would not be cold",
"        if args.cold:",
"            loader.iterator = None",
""
]
]
]
},
"LMDB": {
"group": "The loaders",
"title": "one file instead of many",
"guide": "loading.md#loader_lmdbpy-one-file-instead-of-many",
"launcher": "python ",
"added": 90,
"hunks": [
[
3,
3,
[
"#     # new #",
"#     # many files in one",
"#     \"lmdb\",",
"#"
]
],
[
25,
25,
[
"",
"# new #",
"# LMDB keeps many files in one",
"import fcntl",
"import functools",
"import io",
"import lmdb"
]
],
[
54,
54,
[
"    # new #",
"    # train_LMDB.py makes and reads the same files",
"    add(\"--lmdb\", type=Path, help=\"the LMDB file; None: DATA_SOURCE_<split>.lmdb\")",
""
]
],
[
172,
172,
[
"# new #",
"# the index is written last, so a file without it is incomplete",
"def build_lmdb(path, keys, index):",
"    \"\"\"Copy the files of `keys`, {name: key}, into a new LMDB file `path`. Raises OSError.\"\"\"",
"    with open(f\"{path}.part\", \"ab\") as part:",
"        fcntl.flock(part, fcntl.LOCK_EX)  # waits for another process that builds it",
"        if os.path.exists(path):",
"            return",
"        try:",
"            part.truncate(0)  # remove what a killed process left",
"            map_size = 2 * sum(map(os.path.getsize, keys)) + 2 * len(index) + 2 ** 15 * len(keys)",
"            with lmdb.open(part.name, map_size, subdir=False, lock=False, sync=False) as store:",
"                for name, key in tqdm(keys.items(), f\"building {path}\", disable=None):",
"                    with store.begin(write=True) as transaction:",
"                        transaction.put(key, Path(name).read_bytes())",
"                with store.begin(write=True) as transaction:",
"                    transaction.put(b\"index 2\", index)",
"                store.sync(True)",
"            os.replace(part.name, path)",
"        except (OSError, lmdb.Error) as error:",
"            part.truncate(0)",
"            raise OSError(f\"cannot build {path}: {error}; --lmdb can name another disk\") from None",
"",
"# new #",
"# each process opens the file when it first reads; a forked worker has to open it again",
"@functools.cache",
"def open_lmdb(path):",
"    \"\"\"Return a transaction that reads the LMDB file `path`. Raises OSError.\"\"\"",
"    try:",
"        store = lmdb.open(path, subdir=False, readonly=True, create=False, lock=False)",
"        if os.path.getsize(path) < (store.info()[\"last_pgno\"] + 1) * store.stat()[\"psize\"]:",
"            raise lmdb.Error(\"it is cut short\")  # reading on would be a crash",
"        return store.begin()",
"    except lmdb.Error as error:",
"        raise OSError(f\"{path}: {error}; if damaged, remove it to build it again\") from None",
"os.register_at_fork(after_in_child=open_lmdb.cache_clear)",
"",
"# new #",
"# names, sizes and times show whether the file was made from these pictures",
"def match_lmdb(path, pictures):",
"    \"\"\"Build the LMDB file `path` if there is none. Raises OSError if it is not of `pictures`.\"\"\"",
"    keys = {name: b\"%d\" % i for i, name in enumerate(pictures.files())}",
"    files = [[os.path.relpath(name, pictures.root), file.st_size, file.st_mtime_ns]",
"             for name in keys for file in [os.stat(name)]]",
"    index = json.dumps(dict(classes=pictures.classes, files=files)).encode()",
"    if not os.path.exists(path):",
"        build_lmdb(path, keys, index)",
"    if open_lmdb(path).get(b\"index 2\") != index:",
"        raise OSError(f\"{path} holds other files than {pictures.root}: remove it to build it again\")",
"",
"# new #",
"# needs only the LMDB file; it holds encoded pictures and JSON, and no pickles, which can run code",
"class ImageFolderLMDB(Pictures):",
"    \"\"\"Pictures from an LMDB file, with ImageFolder's samples and classes. Raises OSError.\"\"\"",
"    def __init__(self, path, transform=None, least=1):",
"        self.path, self.transform, self.least = str(path), transform, least",
"        try:",
"            index = json.loads(open_lmdb(self.path).get(b\"index 2\") or \"{}\")",
"            self.classes, self.parts = index[\"classes\"], 1 if index[\"classes\"] else 2",
"            self.class_to_idx = {name: i for i, name in enumerate(self.classes or ())}",
"            self.records = {name: (i, size) for i, (name, size, _) in enumerate(index[\"files\"])}",
"            names = [*self.records]",
"            self.samples = [*zip(names[::2], names[1::2])] if self.parts == 2 else [",
"                (name, self.class_to_idx[Path(name).parts[0]]) for name in names]",
"        except (LookupError, TypeError, ValueError) as error:",
"            raise OSError(f\"{path} has no good index ({error!r}): remove it to build it again\")",
"    def read(self, name):",
"        record = open_lmdb(self.path).get(b\"%d\" % self.records[name][0])",
"        return load_image(io.BytesIO(record), f\"{name} in {self.path}\")",
"    def size(self, name):",
"        return self.records[name][1]",
"    def files(self):",
"        open_lmdb.cache_clear()  # closes it: mapped pages cannot be dropped from the page cache",
"        return [self.path]",
""
]
],
[
203,
204,
[
"    # new #",
"    # a slow disk reads one file faster than many; later runs need no folder",
"    path = args.lmdb or Path(f\"{args.data_source.resolve()}_{args.split}.lmdb\")",
"    if args.data_source.exists() or not path.exists():",
"        match_lmdb(str(path), open_pictures(parser, args, transform))",
"    dataset = ImageFolderLMDB(path, transform, 1 if args.resize else args.crop)"
]
]
]
}
},
"choices": [
[
"DALI",
"LMDB"
]
]
}
},
"records": [
{
"folder": "h100-loading",
"family": "loader",
"file": "loading.json",
"warning": "",
"limits": [
"loader is limited by CPU: 11.3 of 16 cores busy, the GPU 0%; 1,355 images/s cold and 1,545 warm; the disk alone gives 550.8 MB/s, the loader reads 153.7 MB/s when warm.",
"loader_DALI is limited by IO: 7,077 images/s cold and 23,363 warm; the disk alone gives 550.8 MB/s, the loader reads 2,325.4 MB/s when warm."
],
"title": "imagenet_copies, batch 768; 1x NVIDIA H100 80GB HBM3",
"setting": "1x NVIDIA H100 80GB HBM3, driver 580.159.04, CUDA 13.0, cuDNN 92400; 16 cores of Intel(R) Xeon(R) Processor; lmdb 3.0.0, nvidia-dali-cuda120 2.4.0, torch 2.14.1, torchvision 0.29.2, Python 3.12.3; 2026-11-25; `./loading.sh loader_DALI.py data/imagenet_copies --result_dir results/h100-loading --batch_size 768`",
"rows": [
{
"techniques": [],
"note": "cold",
"speed": 1354.6285935075468,
"value": "134.8 MB/s",
"least": 1278.4524523298107,
"most": 1430.804734685283,
"epochs": 2,
"runs": 1,
"ratio": null
},
{
"techniques": [],
"note": "warm",
"speed": 1544.6449678830531,
"value": "153.7 MB/s",
"least": 1480.122571081515,
"most": 1609.1673646845911,
"epochs": 2,
"runs": 1,
"ratio": null
},
{
"techniques": [
"DALI"
],
"note": "cold",
"speed": 7077.079052533922,
"value": "704.4 MB/s",
"least": 6618.036623223168,
"most": 7536.121481844676,
"epochs": 2,
"runs": 1,
"ratio": null
},
{
"techniques": [
"DALI"
],
"note": "warm",
"speed": 23362.537050182036,
"value": "2,325.4 MB/s",
"least": 21490.39282626011,
"most": 25234.68127410396,
"epochs": 2,
"runs": 1,
"ratio": null
}
]
},
{
"folder": "h100-loading-others",
"family": "loader",
"file": "loading.json",
"warning": "",
"limits": [
"loader is limited by CPU: 11.5 of 16 cores busy, the GPU 0%; 1,377 images/s cold and 1,606 warm; the disk alone gives 781.7 MB/s, the loader reads 199.5 MB/s when warm.",
"loader_DALI is limited by IO: 7,751 images/s cold and 18,712 warm; the disk alone gives 781.7 MB/s, the loader reads 2,324.2 MB/s when warm."
],
"title": "imagenet_others, batch 768; 1x NVIDIA H100 80GB HBM3",
"setting": "1x NVIDIA H100 80GB HBM3, driver 580.159.04, CUDA 13.0, cuDNN 92400; 16 cores of Intel(R) Xeon(R) Processor; lmdb 3.0.0, nvidia-dali-cuda120 2.4.0, torch 2.14.1, torchvision 0.29.2, Python 3.12.3; 2026-11-25; `./loading.sh loader_DALI.py data/imagenet_others --result_dir results/h100-loading-others --batch_size 768`",
"rows": [
{
"techniques": [],
"note": "cold",
"speed": 1377.1337126844383,
"value": "171.1 MB/s",
"least": 1236.832674242938,
"most": 1517.4347511259382,
"epochs": 2,
"runs": 1,
"ratio": null
},
{
"techniques": [],
"note": "warm",
"speed": 1606.3917738245573,
"value": "199.5 MB/s",
"least": 1568.0350061206047,
"most": 1644.74854152851,
"epochs": 2,
"runs": 1,
"ratio": null
},
{
"techniques": [
"DALI"
],
"note": "cold",
"speed": 7750.6951245315895,
"value": "962.7 MB/s",
"least": 7439.420757674741,
"most": 8061.969491388438,
"epochs": 2,
"runs": 1,
"ratio": null
},
{
"techniques": [
"DALI"
],
"note": "warm",
"speed": 18712.25837352027,
"value": "2,324.2 MB/s",
"least": 17766.305854158254,
"most": 19658.210892882293,
"epochs": 2,
"runs": 1,
"ratio": null
}
]
},
{
"folder": "h100-resnet50",
"family": "train",
"file": "running.json",
"warning": "",
"limits": [],
"title": "resnet50, 224 px, imagenet_copies, batch 256; 1x NVIDIA H100 80GB HBM3",
"setting": "1x NVIDIA H100 80GB HBM3, driver 580.159.04, CUDA 13.0, cuDNN 92400; 16 cores of Intel(R) Xeon(R) Processor; lmdb 3.0.0, nvidia-dali-cuda120 2.4.0, torch 2.14.1, torchvision 0.29.2, Python 3.12.3; 2026-11-26; `./running.sh 4 data/imagenet_copies --part staircase --without LMDB --without cache --minutes 20 --result_dir results/h100-resnet50 -- --model resnet50 --image_size 224 --augment resized --batch_size 256 --compile_mode reduce-overhead`",
"rows": [
{
"techniques": [],
"note": "",
"speed": 1505.9178919220233,
"value": "top-1 10.00%",
"least": 1419.9525181332256,
"most": 1577.5314675664129,
"epochs": 21,
"runs": 7,
"ratio": "1.00x"
},
{
"techniques": [
"DALI"
],
"note": "",
"speed": 1737.7300703790052,
"value": "top-1 3.33%",
"least": 1725.9001755193613,
"most": 1750.1456861306324,
"epochs": 9,
"runs": 3,
"ratio": "1.17x \u00b10.03"
},
{
"techniques": [
"DALI",
"channels_last"
],
"note": "",
"speed": 2308.623157099836,
"value": "top-1 10.00%",
"least": 2270.7966665194676,
"most": 2324.302404790083,
"epochs": 9,
"runs": 3,
"ratio": "1.55x \u00b10.05"
},
{
"techniques": [
"DALI",
"amp",
"channels_last"
],
"note": "",
"speed": 3717.624943400344,
"value": "top-1 10.00%",
"least": 3578.9229617271917,
"most": 3874.49770046858,
"epochs": 12,
"runs": 4,
"ratio": "2.49x \u00b10.08"
},
{
"techniques": [
"DALI",
"amp",
"channels_last",
"compile"
],
"note": "",
"speed": 4292.02297223013,
"value": "top-1 10.00%",
"least": 4184.1730065282345,
"most": 4394.890773434972,
"epochs": 12,
"runs": 4,
"ratio": "2.87x \u00b10.07"
},
{
"techniques": [
"DALI",
"amp",
"channels_last",
"compile",
"cudnn"
],
"note": "",
"speed": 4329.266588660117,
"value": "top-1 16.67%",
"least": 4315.174783796859,
"most": 4341.731181770372,
"epochs": 3,
"runs": 1,
"ratio": "2.89x \u00b10.15"
},
{
"techniques": [
"DALI",
"amp",
"channels_last",
"compile",
"fused"
],
"note": "",
"speed": 4494.714249806533,
"value": "top-1 6.67%",
"least": 4335.955973189462,
"most": 4615.103213989051,
"epochs": 21,
"runs": 7,
"ratio": "2.98x \u00b10.09"
},
{
"techniques": [
"DALI",
"amp",
"channels_last",
"compile",
"cudnn",
"fused"
],
"note": "",
"speed": 4407.853408529463,
"value": "top-1 13.33%",
"least": 4244.685813323976,
"most": 4606.335378820161,
"epochs": 12,
"runs": 4,
"ratio": "2.92x \u00b10.11"
}
]
},
{
"folder": "h100-mnist",
"family": "train",
"file": "running.json",
"warning": "A later run of the baseline did not end well (SKIP: time: cut off after 30 s, because the whole may take 13.5 minutes (--minutes)). The baseline's speed changed: it trained 35,999 images/s and then 28,363. Something else used the machine, or loading varied.",
"limits": [],
"title": "conv11 64 wide, 32 px, mnist_png, batch 512; 1x NVIDIA H100 80GB HBM3",
"setting": "1x NVIDIA H100 80GB HBM3, driver 580.159.04, CUDA 13.0, cuDNN 92400; 16 cores of Intel(R) Xeon(R) Processor; lmdb 3.0.0, nvidia-dali-cuda120 2.4.0, torch 2.14.1, torchvision 0.29.2, Python 3.12.3; 2026-11-25; `./running.sh 5 data/mnist_png --part staircase --minutes 13.5 --result_dir results/h100-mnist -- --width 64 --batch_size 512 --compile_mode reduce-overhead`",
"rows": [
{
"techniques": [],
"note": "",
"speed": 36044.31048680019,
"value": "top-1 99.60%",
"least": 27157.314841929452,
"most": 36985.697237459666,
"epochs": 24,
"runs": 6,
"ratio": "1.00x"
},
{
"techniques": [
"channels_last"
],
"note": "",
"speed": 35427.21254882221,
"value": "top-1 99.65%",
"least": 31397.272283245944,
"most": 48368.24520124294,
"epochs": 12,
"runs": 3,
"ratio": "1.09x \u00b10.14"
},
{
"techniques": [
"DALI",
"channels_last"
],
"note": "",
"speed": 17256.8870607985,
"value": "top-1 99.68%",
"least": 16813.24340787628,
"most": 18249.86666201822,
"epochs": 4,
"runs": 1,
"ratio": "0.49x \u00b10.08"
},
{
"techniques": [
"LMDB",
"channels_last"
],
"note": "",
"speed": 41573.3859679052,
"value": "top-1 99.65%",
"least": 32217.572495363245,
"most": 51628.63785210432,
"epochs": 4,
"runs": 1,
"ratio": "1.17x \u00b10.37"
},
{
"techniques": [
"cache",
"channels_last"
],
"note": "",
"speed": 62392.222286438,
"value": "top-1 99.65%",
"least": 59127.10700490121,
"most": 62895.37029147212,
"epochs": 12,
"runs": 3,
"ratio": "1.78x \u00b10.18"
},
{
"techniques": [
"amp",
"cache",
"channels_last"
],
"note": "",
"speed": 78732.03464313562,
"value": "top-1 99.71%",
"least": 55941.03263818126,
"most": 90311.51965495595,
"epochs": 12,
"runs": 3,
"ratio": "2.18x \u00b10.30"
},
{
"techniques": [
"amp",
"cache",
"channels_last",
"compile"
],
"note": "",
"speed": 105058.58097024256,
"value": "top-1 99.65%",
"least": 85328.76435480492,
"most": 109788.35404528782,
"epochs": 12,
"runs": 3,
"ratio": "2.91x \u00b10.26"
},
{
"techniques": [
"amp",
"cache",
"channels_last",
"compile",
"cudnn"
],
"note": "",
"speed": 101976.92617447348,
"value": "top-1 99.68%",
"least": 99998.96552219492,
"most": 112270.5977793635,
"epochs": 4,
"runs": 1,
"ratio": "2.81x \u00b10.44"
},
{
"techniques": [
"amp",
"cache",
"channels_last",
"compile",
"fused"
],
"note": "",
"speed": 131924.85009731684,
"value": "top-1 99.70%",
"least": 130263.20460714436,
"most": 133079.0577842747,
"epochs": 12,
"runs": 3,
"ratio": "3.65x \u00b10.33"
},
{
"techniques": [
"amp",
"cache",
"channels_last",
"compile",
"cudnn",
"fused"
],
"note": "",
"speed": 133767.05661847463,
"value": "top-1 99.70%",
"least": 109998.5328020187,
"most": 137136.33437616876,
"epochs": 16,
"runs": 4,
"ratio": "3.77x \u00b10.33"
}
]
},
{
"folder": "h200-2gpu-resnet50",
"family": "train",
"file": "running.json",
"warning": "The baseline's speed changed: it trained 1,045 images/s and then 1,193. Something else used the machine, or loading varied.",
"limits": [
"`--augment` took no value then; today it is `--augment resized`. train.py started its loading workers again in each epoch when this was measured, so its speed is too low. It keeps them now."
],
"title": "resnet50, 224 px, imagenet_copies, batch 512; 2x NVIDIA H200",
"setting": "2x NVIDIA H200, driver 580.159.04, CUDA 13.0, cuDNN 92400; 32 cores of Intel(R) Xeon(R) Processor; lmdb 3.0.0, nvidia-dali-cuda120 2.4.0, torch 2.14.1, torchvision 0.29.2, Python 3.12.3; 2026-11-23; `./running.sh 3 data/imagenet_copies --part staircase --without LMDB --without cache --without stem --without cudnn --minutes 6.5 --result_dir results/h200-2gpu-resnet50 -- --model resnet50 --image_size 224 --augment --batch_size 512 --workers 32 --steps 24 --compile_mode reduce-overhead`",
"rows": [
{
"techniques": [],
"note": "",
"speed": 1118.9709016204629,
"value": "top-1 6.67%",
"least": 1044.488700444649,
"most": 1203.18610951048,
"epochs": 4,
"runs": 2,
"ratio": "1.00x"
},
{
"techniques": [
"DALI"
],
"note": "",
"speed": 2088.0287182822767,
"value": "top-1 16.67%",
"least": 2080.3429062440064,
"most": 2095.7145303205475,
"epochs": 2,
"runs": 1,
"ratio": "1.96x \u00b10.77"
},
{
"techniques": [
"DALI",
"DDP"
],
"note": "",
"speed": 3818.7828513471973,
"value": "top-1 6.67%",
"least": 3783.792843572568,
"most": 3853.7728591218265,
"epochs": 2,
"runs": 1,
"ratio": "3.51x \u00b11.38"
},
{
"techniques": [
"DALI",
"DP"
],
"note": "",
"speed": 3603.0438968392746,
"value": "top-1 13.33%",
"least": 3567.814748726395,
"most": 3638.2730449521537,
"epochs": 2,
"runs": 1,
"ratio": "3.25x \u00b11.28"
},
{
"techniques": [
"DALI",
"DDP",
"channels_last"
],
"note": "",
"speed": 5104.104081067313,
"value": "top-1 6.67%",
"least": 5066.110465786687,
"most": 5142.09769634794,
"epochs": 2,
"runs": 1,
"ratio": "4.52x \u00b11.78"
},
{
"techniques": [
"DALI",
"DDP",
"amp",
"channels_last"
],
"note": "",
"speed": 6735.1553421411,
"value": "top-1 10.00%",
"least": 6656.474335183933,
"most": 6813.8363490982665,
"epochs": 2,
"runs": 1,
"ratio": "5.85x \u00b12.30"
},
{
"techniques": [
"DALI",
"DDP",
"amp",
"channels_last",
"compile"
],
"note": "",
"speed": 8238.837133954248,
"value": "top-1 10.00%",
"least": 8188.200914962289,
"most": 8289.473352946208,
"epochs": 2,
"runs": 1,
"ratio": "7.03x \u00b12.76"
},
{
"techniques": [
"DALI",
"DDP",
"amp",
"channels_last",
"compile",
"fused"
],
"note": "",
"problem": "SKIP: time: it does not fit into the 6.5 minutes (--minutes)"
}
]
}
]
};
