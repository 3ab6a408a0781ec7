"""Pixels: a Transformer learns the likelihood of pictures pixel by pixel, draws new ones, or tells their class.

Child et al. 2019, "Generating Long Sequences with Sparse Transformers", arXiv:1904.10509: pixels in raster order, with
attention along the row and the column of each. The default pictures are scikit-learn's 1,797 digits (8 × 8 pixels of 17
levels; needs jaxformer[images]); data=images takes any folder of image files. Likelihood is in bits per dimension (one
channel of one pixel) of the validation pictures; drawn pictures stand in the run directory, pictures/step_*.png.

    jaxformer train --config=pixels --workdir=runs/pixels
    jaxformer train --config=pixels:size=tiny,attention=fixed --workdir=runs/tiny
    jaxformer train --config=pixels:model=sparse --workdir=runs/sparse --config.model.use=interleaved
    jaxformer train --config=pixels:task=classify --workdir=runs/classes
    jaxformer train --config=pixels:data=images --workdir=runs/mine --config.data.path=photos --config.data.width=24

Argument: task=generate|classify (the class is read off after the last pixel), data=digits|images, size=small|tiny|base,
model=gpt|sparse|reformer (Child et al. 2019: sparse factors of attention in three uses, recomputed blocks; Kitaev et
al. 2020: reversible layers with LSH and local attention in turn; these two have attentions of their own),
attention=strided|fixed|dense|local.
"""

from ml_collections import ConfigDict

from jaxformer.training.config import optional, parse_arg
from jaxformer.training.optimizer_config import optimizer_config
from jaxformer.training.overrides import ConfigError
from jaxformer.training.schedule_config import schedule_config

# Arguments of each attention; a stride is that of a picture's row.
ATTENTION_ARGS: dict[str, dict[str, object]] = {
    "strided": {"stride": 0},  # a row of pixels back, and the column
    "fixed": {"stride": 0, "num_summary": 2},  # the own row so far, and the last tokens of each row
    "dense": {},
    "local": {"window": 31},  # tokens before the token itself
}

# Fields of the model that only some models have, or have otherwise; they come last.
MODEL_FIELDS: dict[str, dict[str, object]] = {
    "gpt": {},
    "sparse": {
        "name": "sparse_transformer",
        "positions": "axial",  # vectors of rows and columns
        "axial_shape": optional(tuple),  # rows, columns: at least max_length together; None = those of the picture
        "axial_dims": optional(tuple),  # features of each, side by side; None = their sum
        "pattern": "strided",  # strided, fixed, banded (the last stride tokens)
        "use": "merged",  # of the two factors: merged, interleaved (over layers), heads (half of them each)
        "stride": optional(int),  # tokens; None = a row of the picture, so a step is a column
        "num_summary": 2,  # of fixed: tokens at the end of a stride that all see
        "alternate_dense": False,  # every other layer sees everything
        "remat": "full",  # what the backward pass recomputes: none, full, sqrt, dots, dots_no_batch
    },
    "reformer": {
        "name": "reformer",
        "positions": "axial",  # vectors of rows and columns
        "axial_shape": optional(tuple),  # rows, columns: at least max_length together; None = those of the picture
        "axial_dims": optional(tuple),  # features of each, side by side; None = their sum
        "activation": "relu",
        "tie_embeddings": False,
        "residual": "reversible",  # plain, reversible (memory for gradients does not grow with num_layers)
        "residual_merge": "concatenate",  # of the two streams: mean, concatenate
        "mlp_chunk_size": optional(int),  # positions of the feed-forward layer at a time; None = all
        "remat": "none",  # a reversible stack recomputes every layer anyway
    },
}

# The attentions of models that have several in turn, by name of the model, and their arguments.
MIXED_ATTENTIONS: dict[str, dict[str, dict[str, object]]] = {
    "reformer": {
        "local": {"window": 31},
        "lsh": {"num_hashes": 2, "num_buckets": (8,), "chunk_size": 16},  # rounds, buckets a round, tokens a chunk
    },
}

# What each size changes, by path.
SIZES: dict[str, dict[str, object]] = {
    "small": {},
    "tiny": {
        "model.num_layers": 2,
        "model.embed_dim": 64,
        "train.steps": 400,
        "train.batch_size": 16,
        "schedule.warmup_steps": 20,
        "eval.every_steps": 200,
        "checkpoint.every_steps": 200,
        "sample.num_pictures": 4,
    },
    "base": {
        "model.num_layers": 24,
        "model.embed_dim": 256,
        "model.dtype": "bfloat16",
        "model.remat": "dots_no_batch",
        "optimizer.learning_rate": 3.5e-4,
        "train.steps": 100_000,
        "train.batch_size": 64,
        "schedule.warmup_steps": 5000,
        "eval.every_steps": 5000,
        "checkpoint.every_steps": 5000,
    },
}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of a size; every knob with its unit."""
    chosen = parse_arg(
        arg,
        task=("generate", "classify"),
        data=("digits", "images"),
        size=tuple(SIZES),
        model=tuple(MODEL_FIELDS),
        attention=tuple(ATTENTION_ARGS),
    )
    if chosen["model"] != "gpt" and "attention=" in (arg or ""):
        raise ConfigError(
            f"model={chosen['model']} has attentions of its own; attention can't be {chosen['attention']}"
        )
    config = ConfigDict()
    config.seed = 0  # of parameters, dropout, data order and drawn pictures
    config.objective = "language_model"
    config.model = model_config(chosen["model"], chosen["attention"])
    config.data = data_config(chosen["data"], "label" if chosen["task"] == "classify" else "pixels")
    config.loss = ConfigDict()
    config.loss.label_smoothing = 0.0  # probability spread over the vocabulary, fraction in [0, 1)
    config.loss.z_loss = 0.0  # weight of the squared log-normaliser
    config.update(training_config())
    config.update_from_flattened_dict(SIZES[chosen["size"]])
    config.model.update(MODEL_FIELDS[chosen["model"]])
    if chosen["task"] == "classify":
        config.sample.num_pictures = 0  # only the class is learned
    return config


def model_config(name: str, attention: str) -> ConfigDict:
    """Shape and wiring of the network."""
    model = ConfigDict()
    model.name = name  # a model that `jaxformer list` shows
    model.vocab_size = optional(int)  # tokens; None = levels, classes and the start
    model.num_layers = 4  # blocks
    model.embed_dim = 128  # features
    model.num_heads = 4
    model.num_kv_heads = optional(int)  # None = num_heads; 1 = multi-query attention
    model.head_dim = optional(int)  # features a head; None = embed_dim / num_heads
    model.mlp_dim = optional(int)  # features; None = 4 × embed_dim
    model.max_length = optional(int)  # tokens; None = those of a picture
    model.positions = "learned"  # learned, sinusoidal, rotary, alibi, relative, axial, none
    model.norm = "layer"  # layer, rms, batch, none
    model.norm_placement = "pre"  # pre, post, none
    model.norm_epsilon = 1e-5
    model.norm_momentum = optional(float)  # of batch norm: share of its averages that a step keeps; None = 0.9
    model.mlp_norm = optional(str)  # of the feed-forward layer's hidden width: layer, rms, batch; None = none
    model.mlp_norm_placement = optional(str)  # before, after the activation; None = before
    model.activation = "gelu_tanh"  # relu, gelu, gelu_tanh, swiglu, geglu, geglu_tanh
    model.use_bias = True
    model.tie_embeddings = True  # the output head is the transposed token embedding
    model.vocab_multiple = 1  # rows of the vocabulary are padded to a multiple, for speed
    model.dropout_rate = 0.1  # fraction in [0, 1)
    model.attention_dropout_rate = 0.0  # fraction in [0, 1)
    if name in MIXED_ATTENTIONS:
        model.attention = tuple(MIXED_ATTENTIONS[name])  # of the layers in turn
        model.attention_args = ConfigDict(MIXED_ATTENTIONS[name])  # of each
    elif name != "sparse":
        model.attention = attention
        model.attention_args = ConfigDict(ATTENTION_ARGS[attention])  # of this attention
        if "stride" in model.attention_args:
            model.attention_args.stride = optional(int)  # tokens; None = a row of the picture, so a step is a column
    model.scan_layers = True  # one compiled block; False = unrolled
    model.remat = "none"  # what the backward pass recomputes: none, full, sqrt, dots, dots_no_batch
    model.init_stddev = 0.05  # of kernels and embeddings
    model.dtype = "float32"  # of the computation
    model.param_dtype = "float32"
    return model


def data_config(name: str, targets: str) -> ConfigDict:
    """Pictures and rows."""
    data = ConfigDict()
    data.name = name  # digits or images
    data.path = optional(str)  # the folder of images
    data.height = optional(int)  # pixels of an image; None = 32; the digits are 8 × 8, and take none of these four
    data.width = optional(int)  # pixels; None = 32
    data.channels = optional(int)  # 1 (grey) or 3 (red, green, blue); None = 1
    data.num_levels = optional(int)  # levels of a channel, 2 to 256; None = 256
    data.targets = targets  # pixels: each from those before it; label: the class, after the last pixel
    data.length = optional(int)  # tokens a row; None = pixels × channels and the start
    data.validation_fraction = 0.1  # of pictures
    data.split_seed = 0  # which pictures are for validation: the same in runs of different config.seed
    data.prefetch = 2  # batches made ready in the background
    return data


def training_config() -> ConfigDict:
    """The run: optimizer, schedule, length, evaluation, checkpoints, logging, mesh and pictures drawn."""
    config = ConfigDict()
    config.optimizer = optimizer_config(
        "adamw",
        learning_rate=2e-3,
        b1=0.9,
        b2=0.98,
        epsilon=1e-8,
        weight_decay=0.1,
    )
    config.schedule = schedule_config("cosine", warmup_steps=200, final_fraction=0.02)
    config.train = ConfigDict()
    config.train.steps = 3000  # updates
    config.train.batch_size = 32  # pictures an update, over all devices
    config.train.accumulation_steps = 1  # parts of a batch computed one after the other
    config.train.non_finite = "skip"  # what a step without finite gradient does: skip (nothing changes), stop
    config.train.average_decay = optional(float)  # of an average of the parameters, which evaluation uses; None = none
    config.train.loss_scale = optional(str)  # for model.dtype=float16: dynamic, or a number; None = none
    config.train.loss_scale_growth_steps = optional(int)  # of dynamic: good steps until it doubles; None = 2000
    config.eval = ConfigDict()
    config.eval.every_steps = 1500  # steps; the last step is always evaluated
    config.eval.batch_size = 64  # rows
    config.checkpoint = ConfigDict()
    config.checkpoint.every_steps = 1500  # steps; the last step is always saved
    config.checkpoint.keep_latest = 2
    config.checkpoint.keep_best = 1  # of lowest validation loss
    config.log = ConfigDict()
    config.log.every_steps = 10  # steps
    config.log.tensorboard = False  # needs jaxformer[tensorboard]
    config.mesh = ConfigDict()
    config.mesh.data = -1  # devices along the batch; -1 = all that remain
    config.mesh.fsdp = 1  # devices along the batch that also split the parameters
    config.mesh.tensor = 1  # devices along heads and features
    config.mesh.expert = 1  # devices along experts
    config.sample = ConfigDict()
    config.sample.num_pictures = 16  # drawn at each evaluation into the run directory; 0 = none
    config.sample.temperature = 1.0  # 0 = always the likeliest
    config.sample.top_k = optional(int)  # None = all
    config.sample.top_p = optional(float)  # smallest set of this probability; None = all
    return config
