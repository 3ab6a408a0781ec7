"""Algorithmic tasks: a Transformer learns to copy, reverse, add, sort or count, and is tested on longer input.

Graves et al. 2014, arXiv:1410.5401 (copy); Dehghani et al. 2019, arXiv:1807.03819, section 3.4 (reverse, addition); Tay
et al. 2020, arXiv:2002.11296 (sort); Kitaev et al. 2020, arXiv:2001.04451, section 2 (duplicate); Graves 2016,
arXiv:1603.08983, section 3.1 (parity). Every batch is fresh, drawn from seed and step. Figures come for each test
length: loss and accuracy of the answer's tokens given those before, and exact match of greedily decoded answers.

    jaxformer train --config=algorithmic --workdir=runs/copy
    jaxformer train --config=algorithmic:task=reverse,size=tiny --workdir=runs/reverse
    jaxformer train --config=algorithmic:task=parity,model=universal --workdir=runs/parity --config.model.halting=act
    jaxformer train --config=algorithmic:task=duplicate --workdir=runs/duplicate
    jaxformer eval --workdir=runs/duplicate --attention=lsh:num_hashes=8,num_buckets=16,chunk_size=8
    jaxformer eval --workdir=runs/copy --config.data.test_lengths=10,30,100
    jaxformer generate --workdir=runs/copy --prompt='3 1 4 1 5 = ' --temperature=0

Argument: task=copy|reverse|addition|sort|duplicate|parity, size=small|tiny|base, model=gpt|universal|reformer|sparse
(Dehghani et al. 2019: one block's parameters in every step, with model.halting=act as many steps as each token needs;
Kitaev et al. 2020: reversible layers with LSH and local attention in turn, for duplicate one LSH layer; Child et al.
2019: sparse factors of attention; the last two have attentions of their own), attention=<a causal one that `jaxformer
list` shows>; for duplicate shared_query_key by default.

With model.halting=act the end of training and `jaxformer eval` also write, for the test examples of each length, how
many steps every token made: `numpy.load("runs/parity/ponder/step_00003000/length_4.npz")` has tokens, targets,
ponder_steps and ponder_remainder, each [examples, tokens].
"""

from ml_collections import ConfigDict

from jaxformer.attention import ATTENTION, PATTERNS
from jaxformer.training.config import optional, parse_arg
from jaxformer.training.optimizer_config import optimizer_config
from jaxformer.training.overrides import ConfigError
from jaxformer.training.schedule_config import schedule_config

# Arguments of each attention that can be causal, at lengths of some tens of tokens.
ATTENTION_ARGS: dict[str, dict[str, object]] = {
    "dense": {},
    "additive": {},
    "bilinear": {},
    "concat": {},
    "kernel": {"kernel": "gaussian", "width": optional(float)},  # distance in features; None = learned
    "shared_query_key": {},
    "local": {"window": 31},  # tokens before the token itself
    "dilated": {"window": 15, "dilation": 2},  # neighbours, tokens between them
    "strided": {"stride": 8},  # tokens
    "fixed": {"stride": 8, "num_summary": 2},  # tokens of a block, those of its end that all see
    "global_tokens": {"indices": (0, 1, 2, 3)},  # positions
    "random_blocks": {"num": 3, "seed": 0, "block_size": 8},  # blocks a block sees, drawn by seed, tokens a block
    "bigbird": {"block_size": 8, "num_random": 2, "seed": 0},
    "longformer": {"window": 15, "global_indices": (0,)},  # tokens before the token itself, positions
    "lsh": {"num_hashes": 4, "num_buckets": 16, "chunk_size": 8},  # rounds, buckets a round, tokens a chunk
    "routing": {"num_clusters": 4, "window": 32},  # clusters, tokens a cluster
    "sinkhorn": {"block_size": 8},  # tokens
    "compressed": {"stride": 4},  # tokens a slot
    "linear": {"feature_map": "elu"},
    "performer": {"num_features": 64},
}

# Fields of the model that only some models have, or have otherwise.
MODEL_FIELDS: dict[str, dict[str, object]] = {
    "gpt": {},
    "universal": {
        "name": "universal_transformer",
        "positions": "sinusoidal",  # added at every step
        "scale_embedding": True,
        "kernel_init": "xavier_uniform",
        "scale_residual_init": False,
        "step_embedding": "sinusoidal",  # the number of the step, added at every step: none, sinusoidal
        "convolution_width": optional(int),  # positions mixed in front of the feed-forward layer; None = none
        "halting": "none",  # none: every token makes num_layers steps; act: as many as it needs, up to num_layers
        "halting_threshold": 0.99,  # sum of halting probabilities at which a token halts, fraction in (0, 1]
        "halting_mix": "weighted",  # how steps make the output: weighted (Graves 2016), exponential (tensor2tensor)
        "halting_bias_init": -1.0,  # the larger, the fewer steps at the start: 4 at -1, 2 at 1
        "ponder_weight": 0.003,  # loss per step, mean over all tokens; ten times that leaves one step for parity
    },
    "reformer": {
        "name": "reformer",
        "positions": "axial",  # vectors of rows and columns
        "axial_shape": optional(tuple),  # rows, columns: at least max_length together; None = nearest to a square
        "axial_dims": optional(tuple),  # features of each, side by side; None = their sum
        "activation": "relu",
        "tie_embeddings": False,
        "kernel_init": "xavier_uniform",
        "scale_residual_init": False,
        "residual": "reversible",  # plain, reversible (memory for gradients does not grow with num_layers)
        "residual_merge": "concatenate",  # of the two streams: mean, concatenate
        "mlp_chunk_size": optional(int),  # positions of the feed-forward layer at a time; None = all
    },
    "sparse": {
        "name": "sparse_transformer",
        "positions": "axial",  # vectors of rows and columns
        "axial_shape": optional(tuple),  # rows, columns: at least max_length together; None = nearest to a square
        "axial_dims": optional(tuple),  # features of each, side by side; None = their sum
        "pattern": "fixed",  # strided, fixed, banded (the last stride tokens)
        "use": "merged",  # of the two factors: merged, interleaved (over layers), heads (half of them each)
        "stride": 8,  # tokens
        "num_summary": 2,  # of fixed: tokens at the end of a stride that all see
        "alternate_dense": False,  # every other layer sees everything
        "remat": "full",
    },
}

# The attentions of models that have several in turn, by name of the model, and their arguments.
MIXED_ATTENTIONS: dict[str, dict[str, dict[str, object]]] = {
    "reformer": {
        "local": ATTENTION_ARGS["local"],
        # Buckets as factors, whose product counts; tokens see those of their own bucket alone, as in decoding.
        "lsh": {**ATTENTION_ARGS["lsh"], "num_buckets": (16,), "within_bucket": True},
    },
}

# What each size changes in the config below, by path.
SIZES: dict[str, dict[str, object]] = {
    "small": {},
    "tiny": {
        "model.num_layers": 2,
        "data.max_length": 8,
        "data.test_lengths": (8, 16),
        "data.test_examples": 64,
        "train.steps": 600,
        "train.batch_size": 32,
        "schedule.warmup_steps": 50,
        "eval.every_steps": 300,
        "checkpoint.every_steps": 300,
    },
    "base": {
        "model.num_layers": 6,
        "model.embed_dim": 256,
        "data.max_length": 40,
        "data.test_lengths": (40, 80, 160, 400),
        "train.steps": 50_000,
        "train.batch_size": 128,
        "schedule.warmup_steps": 1000,
        "eval.every_steps": 5000,
        "checkpoint.every_steps": 5000,
    },
}

# What each task changes, by path; it comes last. Lengths are symbols.
TASKS: dict[str, dict[str, object]] = {
    "copy": {"sample.prompt": "3 1 4 1 5 = "},
    "reverse": {"sample.prompt": "3 1 4 1 5 = "},
    "addition": {"sample.prompt": "5 2 + 5 1 = "},  # 25 + 15 = 040, lowest digit first
    "sort": {"sample.prompt": "3 1 4 1 5 = "},
    # One layer of heads that share query and key, as in the paper, at a length for CPUs: 0 w 0 w are 64 tokens.
    "duplicate": {
        "model.num_layers": 1,
        "model.embed_dim": 256,
        "model.mlp_dim": 256,
        "model.positions": "learned",
        "data.min_length": 31,
        "data.max_length": 31,
        "data.test_lengths": (31,),
        "optimizer.learning_rate": 2e-3,
        "train.batch_size": 32,
        "schedule.warmup_steps": 200,
        "sample.max_new_tokens": 0,
    },
    # Lengths are the entries that are not zero, of as many as the longest.
    "parity": {
        "data.max_length": 16,
        "data.test_lengths": (1, 2, 4, 8, 12, 16),
        "sample.prompt": "1 -1 1 1 0 0 0 0 0 0 0 0 0 0 0 0 = ",
        "sample.max_new_tokens": 1,
    },
}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of a task; every knob with its unit."""
    # Those that can't be causal are known too, so that the model says why it refuses them.
    attentions = (*ATTENTION_ARGS, *sorted(set(ATTENTION) - set(ATTENTION_ARGS)))
    chosen = parse_arg(arg, task=tuple(TASKS), model=tuple(MODEL_FIELDS), size=tuple(SIZES), attention=attentions)
    attention, named = chosen["attention"], "attention=" in (arg or "")
    if chosen["model"] in ("reformer", "sparse") and named:
        raise ConfigError(f"model={chosen['model']} has attentions of its own; attention can't be {attention}")
    if chosen["task"] == "duplicate" and not named:
        # A Reformer of one layer is that of the paper's task: it hashes.
        attention = "lsh" if chosen["model"] == "reformer" else "shared_query_key"
    config = ConfigDict()
    config.seed = 0  # of parameters, dropout and training examples
    config.objective = "language_model"
    config.model = model_config(chosen["model"], attention)
    config.data = data_config(chosen["task"])
    config.loss = ConfigDict()
    config.loss.label_smoothing = 0.0  # probability spread over the vocabulary, fraction in [0, 1)
    config.loss.z_loss = 0.0  # weight of the squared log-normaliser
    config.update(training_config())
    for changes in (SIZES[chosen["size"]], TASKS[chosen["task"]]):
        config.update_from_flattened_dict(changes)
    if attention not in PATTERNS and not ATTENTION[attention].decodes:
        config.sample.max_new_tokens = 0  # this attention has no decoding state
        config.eval.decode = False
    return config


def model_config(name: str, attention: str) -> ConfigDict:
    """Shape and wiring of the network."""
    model = ConfigDict()
    model.name = name  # a model that `jaxformer list` shows
    model.vocab_size = optional(int)  # tokens; None = the task's
    model.num_layers = 4  # blocks
    model.embed_dim = 64  # features
    model.num_heads = 4
    model.num_kv_heads = optional(int)  # None = num_heads; 1 = multi-query attention
    model.head_dim = optional(int)  # features a head; None = embed_dim / num_heads
    model.mlp_dim = optional(int)  # features; None = 4 × embed_dim
    model.max_length = optional(int)  # tokens; None = those of the longest test
    model.positions = "rotary"  # learned, sinusoidal, rotary, alibi, relative, axial, none
    model.random_position_start = 0  # sinusoidal: tokens at most before a row's first position in training
    model.norm = "layer"  # layer, rms, batch, none
    model.norm_placement = "pre"  # pre, post, none
    model.norm_epsilon = 1e-5
    model.norm_momentum = optional(float)  # of batch norm: share of its averages that a step keeps; None = 0.9
    model.mlp_norm = optional(str)  # of the feed-forward layer's hidden width: layer, rms, batch; None = none
    model.mlp_norm_placement = optional(str)  # before, after the activation; None = before
    model.activation = "gelu_tanh"  # relu, gelu, gelu_tanh, swiglu, geglu, geglu_tanh
    model.use_bias = True
    model.tie_embeddings = True  # the output head is the transposed token embedding
    model.scale_embedding = False  # token embeddings times sqrt(embed_dim), beside vectors of positions
    model.vocab_multiple = 1  # rows of the vocabulary are padded to a multiple, for speed
    model.dropout_rate = 0.0  # fraction in [0, 1)
    model.attention_dropout_rate = 0.0  # fraction in [0, 1)
    if name in MIXED_ATTENTIONS and attention == "dense":
        model.attention = tuple(MIXED_ATTENTIONS[name])  # of the layers in turn
        model.attention_args = ConfigDict(MIXED_ATTENTIONS[name])  # of each
    elif name != "sparse":
        model.attention = attention
        args = MIXED_ATTENTIONS.get(name, ATTENTION_ARGS)
        model.attention_args = ConfigDict(args.get(attention, {}))  # of this attention
    model.scan_layers = True  # one compiled block; False = unrolled
    model.remat = "none"  # what the backward pass recomputes: none, full, sqrt, dots, dots_no_batch
    model.kernel_init = "normal"  # normal (of init_stddev), xavier_uniform
    model.init_stddev = 0.05  # of normal kernels and of embeddings
    model.scale_residual_init = True  # kernels into the residual stream start smaller, the more layers there are
    model.dtype = "float32"  # of the computation
    model.param_dtype = "float32"
    model.update(MODEL_FIELDS[name])
    return model


def data_config(task: str) -> ConfigDict:
    """The task, its lengths and tests."""
    data = ConfigDict()
    data.name = task
    data.min_length = 1  # shortest question in training, symbols
    data.max_length = 20  # longest question in training, symbols
    data.test_lengths = (20, 40, 80)  # each is evaluated by itself, symbols
    data.num_symbols = optional(int)  # different symbols, the base of numbers; None = the task's own number
    data.length = optional(int)  # tokens of a training row; None = as many as the longest question and answer need
    data.validation_examples = 512  # of the training lengths
    data.test_examples = 128  # of each test length
    data.test_seed = 0  # of validation and test examples: the same in runs of different config.seed
    data.prefetch = 2  # batches made ready in the background
    return data


def training_config() -> ConfigDict:
    """The run: optimizer, schedule, length, evaluation, checkpoints, logging, mesh and samples."""
    config = ConfigDict()
    config.optimizer = optimizer_config(
        "adamw",
        learning_rate=2e-3,
        b1=0.9,
        b2=0.98,
        epsilon=1e-8,
        weight_decay=0.01,
    )
    config.schedule = schedule_config("cosine", warmup_steps=200, final_fraction=0.02)
    config.train = ConfigDict()
    config.train.steps = 3000  # updates
    config.train.batch_size = 64  # examples an update, over all devices
    config.train.accumulation_steps = 1  # parts of a batch computed one after the other
    config.train.non_finite = "skip"  # what a step without finite gradient does: skip (nothing changes), stop
    config.train.average_decay = optional(float)  # of an average of the parameters, which evaluation uses; None = none
    config.train.loss_scale = optional(str)  # for model.dtype=float16: dynamic, or a number; None = none
    config.train.loss_scale_growth_steps = optional(int)  # of dynamic: good steps until it doubles; None = 2000
    config.eval = ConfigDict()
    config.eval.every_steps = 1500  # steps; the last step is always evaluated
    config.eval.batch_size = 64  # rows
    config.eval.decode = True  # tests are answered by greedy decoding too
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
    config.sample.prompt = ""
    config.sample.max_new_tokens = 8  # tokens; 0 = no sample
    config.sample.temperature = 0.0  # 0 = always the likeliest
    config.sample.top_k = optional(int)  # None = all
    config.sample.top_p = optional(float)  # smallest set of this probability; None = all
    return config
