"""Language modelling: a decoder-only Transformer learns to continue text.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2). The default data are the Python
sources of the interpreter that runs it: real text on every machine, with no download.

    jaxformer train --config=language_model --workdir=runs/language_model
    jaxformer train --config=language_model:size=tiny --workdir=runs/tiny --config.train.steps=100
    jaxformer train --config=language_model --workdir=runs/mine --config.data.name=text --config.data.path='books/*.txt'
    jaxformer generate --workdir=runs/language_model --prompt='def main('

Argument: size=small|tiny|base, attention=<a causal one that `jaxformer list` shows>, packing=auto|packed|contiguous,
model=gpt|switch|universal|reformer|sparse (Fedus et al. 2021: a mixture of experts in every other block, of which each
token uses one; Dehghani et al. 2019: one block's parameters in all layers, with model.halting=act in as many as each
token needs; Kitaev et al. 2020: reversible layers with LSH and local attention in turn; Child et al. 2019: sparse
factors of attention; these two have attentions of their own).

Auxiliary losses of training, as in Al-Rfou et al. 2018, arXiv:1808.04444, each logged under a name of its own:
    --config.loss.intermediate_weight=1    every layer predicts, layer l of n until l / 2n of the training
    --config.model.num_future_tokens=2     the token after the next too, by a head of its own, weight loss.future_weight
    --config.loss.positions=last           the opposite of the paper's first: only a row's last position is supervised

size   parameters  cost                          expected
tiny        0.12 M about a minute on 2 CPU cores  2.8 validation bits per byte (of harder text)
small       0.8 M  about 5 minutes on 2 CPU cores below 2.1 validation bits per byte, text that looks like Python
base        86 M   days on one GPU                GPT-2 small's shape on bytes; give it gigabytes of text (data.path)
"""

from ml_collections import ConfigDict

from jaxformer.attention import ATTENTION, PATTERNS
from jaxformer.training.config import optional, parse_arg
from jaxformer.training.optimizer_config import optimizer_config
from jaxformer.training.overrides import ConfigError
from jaxformer.training.schedule_config import schedule_config

# Arguments of each attention that can be causal, at lengths of some hundreds of tokens.
ATTENTION_ARGS: dict[str, dict[str, object]] = {
    "dense": {},
    "additive": {},
    "bilinear": {},
    "concat": {},
    "kernel": {"kernel": "gaussian", "width": optional(float)},  # distance in features; None = learned
    "shared_query_key": {},
    "local": {"window": 63},  # tokens before the token itself
    "dilated": {"window": 15, "dilation": 4},  # neighbours, tokens between them
    "strided": {"stride": 16},  # tokens
    "fixed": {"stride": 16, "num_summary": 4},  # tokens of a block, those of its end that all see
    "global_tokens": {"indices": (0, 1, 2, 3)},  # positions
    "random_blocks": {"num": 3, "seed": 0, "block_size": 16},  # blocks a block sees, drawn by seed, tokens a block
    "bigbird": {"block_size": 16, "num_random": 2, "seed": 0},
    "longformer": {"window": 31, "global_indices": (0,)},  # tokens before the token itself, positions
    "lsh": {"num_hashes": 2, "num_buckets": 16, "chunk_size": 32},  # rounds, buckets a round, tokens a chunk
    "routing": {"num_clusters": 8, "window": 64},  # clusters, tokens a cluster
    "sinkhorn": {"block_size": 16},  # tokens
    "compressed": {"stride": 4},  # tokens a slot
    "linear": {"feature_map": "elu"},
    "performer": {"num_features": 64},
}

# Fields of the model that only some models have.
MODEL_FIELDS: dict[str, dict[str, object]] = {
    "gpt": {},
    "switch": {
        "num_experts": 4,  # feed-forward layers of a block that has them
        "expert_period": 2,  # of every so many blocks the last has experts, the others one plain layer
        "experts_per_token": 1,
        # Tokens that an expert takes of a row in training, of experts_per_token × tokens / num_experts; None = all.
        "expert_capacity_factor": optional(float, 1.25),
        "expert_dispatch": "sort",  # how tokens come to experts: sort, einsum (equal)
        "shared_expert": False,  # one more expert that every token uses
        "balance_loss_weight": 0.01,  # keeps experts equally busy
        "router_z_loss_weight": 0.001,  # keeps router logits small
        "router_jitter": 0.01,  # noise of the router's input in training, fraction in [0, 1)
    },
    "universal": {
        "name": "universal_transformer",
        "positions": "sinusoidal",  # added at every step
        "step_embedding": "sinusoidal",  # the number of the step, added at every step: none, sinusoidal
        "random_position_start": 0,  # tokens at most before a row's first position in training
        "convolution_width": optional(int),  # positions mixed in front of the feed-forward layer; None = none
        "halting": "none",  # none: every token makes num_layers steps; act: as many as it needs, up to num_layers
        "halting_threshold": 0.99,  # sum of halting probabilities at which a token halts, fraction in (0, 1]
        "halting_mix": "weighted",  # how steps make the output: weighted (Graves 2016), exponential (tensor2tensor)
        "halting_bias_init": 1.0,  # the larger, the fewer steps at the start
        "ponder_weight": 0.01,  # loss per step
    },
    "reformer": {
        "name": "reformer",
        "positions": "axial",  # vectors of rows and columns
        "axial_shape": optional(tuple),  # rows, columns: at least max_length together; None = nearest to a square
        "axial_dims": optional(tuple),  # features of each, side by side; None = their sum
        "activation": "relu",
        "tie_embeddings": False,
        "residual": "reversible",  # plain, reversible (memory for gradients does not grow with num_layers)
        "residual_merge": "concatenate",  # of the two streams: mean, concatenate
        "mlp_chunk_size": optional(int, 1024),  # positions of the feed-forward layer at a time; None = all
        "remat": "none",  # a reversible stack recomputes every layer anyway
    },
    "sparse": {
        "name": "sparse_transformer",
        "positions": "axial",  # vectors of rows and columns
        "axial_shape": optional(tuple),  # rows, columns: at least max_length together; None = nearest to a square
        "axial_dims": optional(tuple),  # features of each, side by side; None = their sum
        "pattern": "fixed",  # strided, fixed, banded (the last stride tokens)
        "use": "merged",  # of the two factors: merged, interleaved (over layers), heads (half of them each)
        "stride": 16,  # tokens
        "num_summary": 4,  # of fixed: tokens at the end of a stride that all see
        "alternate_dense": False,  # every other layer sees everything
        "remat": "full",  # what the backward pass recomputes: none, full, sqrt, dots, dots_no_batch
    },
}

# The attentions of models that have several in turn, by name of the model, and their arguments.
MIXED_ATTENTIONS: dict[str, dict[str, dict[str, object]]] = {
    # Buckets as factors, whose product counts: cheaper where there are many.
    "reformer": {"local": ATTENTION_ARGS["local"], "lsh": {**ATTENTION_ARGS["lsh"], "num_buckets": (16,)}},
}

# What each size changes in the config below, by path.
SIZES: dict[str, dict[str, object]] = {
    "small": {},
    "tiny": {
        "model.num_layers": 2,
        "model.embed_dim": 64,
        "data.length": 128,
        "data.validation_bytes": 50_000,
        "train.steps": 400,
        "train.batch_size": 16,
        "schedule.warmup_steps": 20,
        "eval.every_steps": 200,
        "checkpoint.every_steps": 200,
        "sample.max_new_tokens": 64,
    },
    "base": {
        "model.num_layers": 12,
        "model.embed_dim": 768,
        "model.num_heads": 12,
        "model.positions": "learned",
        "model.init_stddev": 0.02,
        "model.dtype": "bfloat16",
        "model.remat": "dots_no_batch",
        "data.length": 1024,
        "data.validation_bytes": 10_000_000,
        "optimizer.learning_rate": 6e-4,
        "schedule.final_fraction": 0.1,
        "schedule.warmup_steps": 2000,
        "train.steps": 600_000,
        "train.batch_size": 480,
        "train.accumulation_steps": 8,
        "eval.every_steps": 2000,
        "eval.batch_size": 60,
        "checkpoint.every_steps": 2000,
        "log.every_steps": 20,
    },
}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of a size; every knob with its unit."""
    # Those that can't be causal are known too, so that the model says why it refuses them.
    attentions = (*ATTENTION_ARGS, *sorted(set(ATTENTION) - set(ATTENTION_ARGS)))
    packings = ("auto", "packed", "contiguous")
    chosen = parse_arg(arg, size=tuple(SIZES), attention=attentions, packing=packings, model=tuple(MODEL_FIELDS))
    attention, packing = chosen["attention"], chosen["packing"]
    if chosen["model"] in ("reformer", "sparse"):
        if attention != "dense":
            raise ConfigError(f"model={chosen['model']} has attentions of its own; attention can't be {attention}")
        packing = "contiguous" if packing == "auto" else packing
    record = PATTERNS[attention] if attention in PATTERNS else ATTENTION[attention]
    if packing == "auto":
        packing = "packed" if record.packing else "contiguous"
    config = ConfigDict()
    config.seed = 0  # of parameters, dropout and data order
    config.objective = "language_model"
    config.model = model_config(chosen["model"], attention)
    config.data = data_config(packing)
    config.loss = ConfigDict()
    config.loss.label_smoothing = 0.0  # probability spread over the vocabulary, fraction in [0, 1)
    config.loss.z_loss = 0.0  # weight of the squared log-normaliser
    # Tokens whose logits exist at once; None = all.
    config.loss.chunk_size = optional(int, 1024 if chosen["model"] == "reformer" else None)
    config.loss.positions = "all"  # that training supervises: all, last (of a row, or of each packed document)
    config.loss.intermediate_weight = 0.0  # of the intermediate layers' predictions at the start; 0 = none
    config.loss.intermediate_steps = optional(int)  # steps of which they take half to vanish; None = train.steps' first
    config.loss.future_weight = 0.5  # of each token after the next (model.num_future_tokens)
    config.update(training_config())
    config.update_from_flattened_dict(SIZES[chosen["size"]])
    config.model.update(MODEL_FIELDS[chosen["model"]])
    if attention not in PATTERNS and not ATTENTION[attention].decodes:
        config.sample.max_new_tokens = 0  # this attention has no decoding state
    return config


def model_config(name: str, attention: str) -> ConfigDict:
    """Shape and wiring of the network."""
    model = ConfigDict()
    model.name = name  # a model that `jaxformer list` shows
    model.vocab_size = optional(int)  # tokens; None = the tokenizer's
    model.num_layers = 4  # blocks
    model.embed_dim = 128  # features
    model.num_heads = 2
    model.num_kv_heads = optional(int)  # None = num_heads; 1 = multi-query attention
    model.head_dim = optional(int)  # features a head; None = embed_dim / num_heads
    model.mlp_dim = optional(int)  # features; None = 4 × embed_dim
    model.max_length = optional(int)  # tokens; None = data.length
    model.positions = "rotary"  # learned, sinusoidal, rotary, alibi, relative, axial, none
    model.norm = "layer"  # layer, rms, batch, none
    model.norm_placement = "pre"  # pre, post, none
    model.norm_epsilon = 1e-5
    model.norm_momentum = optional(float)  # of batch norm: share of its averages that a step keeps; None = 0.9
    model.mlp_norm = optional(str)  # of the feed-forward layer's hidden width: layer, rms, batch; None = none
    model.mlp_norm_placement = optional(str)  # before, after the activation; None = before
    model.activation = "gelu_tanh"  # relu, gelu, gelu_tanh, swiglu, geglu, geglu_tanh
    model.use_bias = True
    model.tie_embeddings = True  # the output head is the transposed token embedding
    model.num_future_tokens = 1  # tokens that each position predicts in training; 1 = the next
    model.vocab_multiple = 1  # rows of the vocabulary are padded to a multiple, for speed
    model.dropout_rate = 0.0  # fraction in [0, 1)
    model.attention_dropout_rate = 0.0  # fraction in [0, 1)
    if name in MIXED_ATTENTIONS:
        model.attention = tuple(MIXED_ATTENTIONS[name])  # of the layers in turn
        model.attention_args = ConfigDict(MIXED_ATTENTIONS[name])  # of each
    elif name != "sparse":
        model.attention = attention
        model.attention_args = ConfigDict(ATTENTION_ARGS.get(attention, {}))  # of this attention
    model.scan_layers = True  # one compiled block; False = unrolled
    model.remat = "none"  # what the backward pass recomputes: none, full, sqrt, dots, dots_no_batch
    model.init_stddev = 0.05  # of kernels and embeddings; narrow models want more than GPT-2's 0.02
    model.dtype = "float32"  # of the computation
    model.param_dtype = "float32"
    return model


def data_config(packing: str) -> ConfigDict:
    """Text, tokens and rows."""
    data = ConfigDict()
    data.name = "python_stdlib"  # a dataset that `jaxformer list` shows
    data.path = optional(str)  # file, folder or glob; a name for huggingface
    data.field = optional(str)  # of the JSON objects, or the column
    data.tokenizer = "bytes"  # or the path of a tokenizer.json
    data.length = 256  # tokens a row
    data.packing = packing  # packed: documents never see each other (not every attention can); contiguous: one stream
    data.validation_fraction = 0.05  # of documents
    data.training_bytes = optional(int)  # bytes of training text at most; None = all
    data.validation_bytes = optional(int, 200_000)  # bytes of validation text at most; None = all
    data.split_seed = 0  # which documents are for validation: the same in runs of different config.seed
    data.prefetch = 2  # batches made ready in the background
    return data


def training_config() -> ConfigDict:
    """The run: optimizer, schedule, length, evaluation, checkpoints, logging, mesh and text samples."""
    config = ConfigDict()
    config.optimizer = optimizer_config(
        "adamw",
        learning_rate=8e-3,
        b1=0.9,
        b2=0.95,
        epsilon=1e-8,
        weight_decay=0.1,
    )
    config.schedule = schedule_config("cosine", warmup_steps=100, final_fraction=0.02)
    config.train = ConfigDict()
    config.train.steps = 1300  # updates
    config.train.batch_size = 8  # rows an update, over all devices
    config.train.accumulation_steps = 1  # parts of a batch computed one after the other
    config.train.non_finite = "skip"  # what a step without finite gradient does: skip (nothing changes), stop
    config.train.average_decay = optional(float)  # of an average of the parameters, which evaluation uses; None = none
    config.train.loss_scale = optional(str)  # for model.dtype=float16: dynamic, or a number; None = none
    config.train.loss_scale_growth_steps = optional(int)  # of dynamic: good steps until it doubles; None = 2000
    config.eval = ConfigDict()
    config.eval.every_steps = 650  # steps; the last step is always evaluated
    config.eval.batch_size = 32  # rows
    config.checkpoint = ConfigDict()
    config.checkpoint.every_steps = 325  # steps; the last step is always saved
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
    config.sample.prompt = "def "
    config.sample.max_new_tokens = 200  # tokens; 0 = no sample
    config.sample.temperature = 0.8  # 0 = always the likeliest
    config.sample.top_k = optional(int)  # None = all
    config.sample.top_p = optional(float, 0.95)  # smallest set of this probability; None = all
    return config
