"""How a technique is switched on in libraries that run the loop or make loaders and optimizers.

{library: {technique, its kind, or "technique on device": text}}. A pair is (the name of a call in
the user's files, the arguments that it gets), which --write can write.
"""

LIGHTNING = {
    "amp bfloat16": ("Trainer", 'precision="bf16-mixed"'),
    "amp float16": ("Trainer", 'precision="16-mixed"'),
    "cudnn": ("Trainer", "benchmark=True"),
}
TRANSFORMERS = {
    "workers": (
        "TrainingArguments",
        "dataloader_num_workers={workers}, dataloader_persistent_workers=True",
    ),
    "amp bfloat16": ("TrainingArguments", "bf16=True"),
    "amp bfloat16 on cpu": ("TrainingArguments", "bf16=True, use_cpu=True"),  # or it wants a GPU
    "amp float16": ("TrainingArguments", "fp16=True"),
    "compile": ("TrainingArguments", "torch_compile=True"),
    "compile reduce-overhead": (
        "TrainingArguments",
        'torch_compile=True, torch_compile_mode="reduce-overhead"',
    ),
    "fused": ("TrainingArguments", 'optim="adamw_torch_fused"'),
    "tf32": ("TrainingArguments", "tf32=True"),
    "batch": ("TrainingArguments", "per_device_train_batch_size={size}"),
}
LIBRARIES = {
    "accelerate": {
        "workers": "the DataLoader that prepare() is given: num_workers={workers}, "
        "persistent_workers=True",
        "amp bfloat16": ("Accelerator", 'mixed_precision="bf16"'),
        "amp float16": ("Accelerator", 'mixed_precision="fp16"'),
        "compile": ("Accelerator", 'dynamo_backend="inductor"'),
        "compile reduce-overhead": "Accelerator(dynamo_plugin=accelerate.utils.TorchDynamoPlugin("
        'backend="inductor", mode="reduce-overhead"))',
        "batch": "the DataLoader that prepare() is given: batch_size={size}",
    },
    "composer": {
        "amp bfloat16": ("Trainer", 'precision="amp_bf16"'),
        "amp float16": ("Trainer", 'precision="amp_fp16"'),
        "compile": ("Trainer", "compile_config={{}}"),
    },
    "fabric": {
        "amp bfloat16": ("Fabric", 'precision="bf16-mixed"'),
        "amp float16": ("Fabric", 'precision="16-mixed"'),
    },
    "fastai": {
        "amp bfloat16": "learn = learn.to_bf16()",
        "amp float16": "learn = learn.to_fp16()",
        "channels_last": "learn = learn.to_channelslast()",
        "compile": "learn.model.compile()",
        "compile reduce-overhead": 'learn.model.compile(mode="reduce-overhead")',
        "workers": "DataLoaders: num_workers={workers}, persistent_workers=True",
        "batch": "DataLoaders: bs={size}",
    },
    "lightning": LIGHTNING,
    "mmengine": {
        "amp bfloat16": 'the config: optim_wrapper = dict(type="AmpOptimWrapper", '
        'dtype="bfloat16", ...)',
        "amp float16": 'the config: optim_wrapper = dict(type="AmpOptimWrapper", ...)',
        "compile": "the config: compile = True",
        "cudnn": "the config: env_cfg = dict(cudnn_benchmark=True, ...)",
        "workers": "the config: train_dataloader = dict(num_workers={workers}, "
        "persistent_workers=True, ...)",
        "batch": "the config: train_dataloader = dict(batch_size={size}, ...)",
    },
    "pytorch_lightning": LIGHTNING,
    "skorch": {
        "channels_last": "a callback's on_train_begin(self, net, **kwargs): "
        "net.module_.to(memory_format=torch.channels_last)",
        "compile": "the net: compile=True",
        "fused": "the net: optimizer__fused=True",
        "workers": "the net: iterator_train__num_workers={workers}, "
        "iterator_train__persistent_workers=True",
        "batch": "the net: iterator_train__batch_size={size}",
    },
    "timm": {
        "fused": "create_optimizer_v2: fused=True",
        "workers": "create_loader: num_workers={workers}",
        "batch": "create_loader: batch_size={size}",
    },
    "transformers": TRANSFORMERS,
    "trl": TRANSFORMERS,
    "ultralytics": {
        "amp bfloat16": "model.train: amp=True",
        "amp float16": "model.train: amp=True",
        "compile": "model.train: compile=True",
        "workers": "model.train: workers={workers}",
        "batch": "model.train: batch={size}",
    },
}
