"""Text to text: an encoder-decoder learns to restore what was cut out of texts, then tasks, all as texts.

Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (T5),
arXiv:1910.10683. The default data, the documentation that Python brings with it, need no download; nor do dates
(but `pip install 'jaxformer[translation]'`).

    jaxformer train --config=text_to_text:size=tiny --workdir=runs/t5
    jaxformer train --config=text_to_text:size=tiny,data=dates,start=run --workdir=runs/dates
        --config.start.workdir=runs/t5
    jaxformer train --config=text_to_text:size=tiny,data=polarity,start=run --workdir=runs/polarity
        --config.start.workdir=runs/t5 --config.data.tasks.polarity.train=sentence_polarity.zip
    jaxformer train --config=text_to_text:size=tiny,data=mixture --workdir=runs/mixture
        --config.data.tasks.polarity.train=sentence_polarity.zip
    jaxformer eval --workdir=runs/dates
    jaxformer generate --workdir=runs/dates --prompt='date: 3 March 2021'

Argument: data=spans|dates|polarity|mixture, start=scratch|run, model=t5|t5_v1_1, size=small|tiny|base.

data=spans cuts spans out of text (span corruption; data.objective=prefix: the rest of a text from its beginning). The
others are tasks with a prefix in front of each source, mixed by size (data.limit, data.temperature); a task of your own
is one more section of data.tasks in a copy of this file, such as pairs in files: {"name": "tsv_pairs", "train":
("pairs.tsv",), "fields": ("0", "1"), "prefix": "translate: "}. Their validation examples are written at every
evaluation; `jaxformer eval` writes all of them.

start=run begins with the parameters, model and tokenizer of the run directory start.workdir, trained here or made by
`jaxformer convert`. Deviation: AdamW, not Adafactor.
"""

from ml_collections import ConfigDict

from jaxformer.training.config import optional, parse_arg
from jaxformer.training.optimizer_config import optimizer_config
from jaxformer.training.schedule_config import schedule_config

# Tasks by name, with fields of `jaxformer.data.TextTask`.
TASKS: dict[str, dict[str, object]] = {
    "dates": {"name": "dates", "prefix": "date: "},
    "polarity": {"name": "sentence_polarity", "prefix": "sentiment: "},
}

DATA: dict[str, tuple[str, ...]] = {
    "spans": (),
    "dates": ("dates",),
    "polarity": ("polarity",),
    "mixture": ("dates", "polarity"),
}

# What each size changes in the config below, by path: of all runs, and of those from scratch.
SIZES: dict[str, dict[str, dict[str, object]]] = {
    "small": {"all": {}, "scratch": {}, "spans": {}},
    "tiny": {
        "all": {
            "schedule.warmup_steps": 50,
            "train.steps": 300,
            "eval.every_steps": 150,
            "checkpoint.every_steps": 150,
        },
        "scratch": {"model.num_layers": 2, "model.embed_dim": 128, "model.num_heads": 4, "model.mlp_dim": 512},
        "spans": {"data.length": 64, "data.tokenizer_size": 4096, "data.validation_bytes": 50_000},
    },
    # Raffel et al. 2020, section 3.1; of tasks section 3.1.2, the number of updates.
    "base": {
        "all": {
            "train.steps": 262_144,
            "train.batch_size": 128,
            "eval.every_steps": 5000,
            "checkpoint.every_steps": 5000,
            "schedule.warmup_steps": 10_000,
        },
        "scratch": {
            "model.num_layers": 12,
            "model.embed_dim": 768,
            "model.num_heads": 12,
            "model.head_dim": 64,
            "model.mlp_dim": 3072,
            "model.dtype": "bfloat16",
            "model.remat": "dots_no_batch",
        },
        "spans": {
            "train.steps": 524_288,
            "data.length": 512,
            "data.tokenizer_size": 32_000,
            "data.validation_bytes": 10_000_000,
        },
    },
}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of a model and its data; every knob with its unit."""
    chosen = parse_arg(arg, data=tuple(DATA), start=("scratch", "run"), model=("t5", "t5_v1_1"), size=tuple(SIZES))
    tasks, scratch, size = DATA[chosen["data"]], chosen["start"] == "scratch", SIZES[chosen["size"]]
    config = ConfigDict()
    config.seed = 0  # of parameters, dropout, the order of rows and what is cut out
    config.objective = "language_model"  # cross-entropy of the target's tokens, given those before and the source
    config.model = model_config(chosen["model"]) if scratch else body_config()
    if not scratch:
        config.start = ConfigDict()
        config.start.workdir = optional(str)  # the run directory that parameters, model and tokenizer come from
        config.start.step = "latest"  # latest, best, or a number
    config.data = task_data_config(tasks, scratch) if tasks else span_data_config(scratch)
    config.loss = ConfigDict()
    config.loss.label_smoothing = 0.0  # probability spread over the vocabulary, fraction in [0, 1)
    config.loss.z_loss = 0.0  # weight of the squared log-normaliser
    config.loss.chunk_size = optional(int)  # tokens whose logits exist at once; None = all
    config.update(training_config(bool(tasks)))
    for changes in (size["all"], size["scratch"] if scratch else {}, {} if tasks else size["spans"]):
        config.update_from_flattened_dict(changes)
    return config


def body_config() -> ConfigDict:
    """What a run may have otherwise than its start; None = as that."""
    model = ConfigDict()
    model.dropout_rate = optional(float)  # of embeddings and of what sub-layers add, fraction in [0, 1)
    model.attention_dropout_rate = optional(float)  # fraction in [0, 1)
    model.mlp_dropout_rate = optional(float)  # fraction in [0, 1)
    model.final_dropout_rate = optional(float)  # of both stacks' outputs, fraction in [0, 1)
    model.remat = optional(str)  # what the backward pass recomputes: none, full, sqrt, dots, dots_no_batch
    model.dtype = optional(str)  # of the computation
    return model


def model_config(name: str) -> ConfigDict:
    """Shape of a network from scratch; what is not here is as published (`jaxformer.models`), and may be added."""
    model = ConfigDict()
    model.name = name  # t5; t5_v1_1: a gated feed-forward layer and an output head of its own
    model.vocab_size = optional(int)  # tokens; None = the tokenizer's
    model.num_layers = 4  # blocks of the decoder
    model.num_encoder_layers = optional(int)  # blocks of the encoder; None = num_layers
    model.embed_dim = 256  # features
    model.num_heads = 4
    model.head_dim = optional(int)  # features a head; None = embed_dim / num_heads
    model.mlp_dim = optional(int, 1024)  # features; None = 4 × embed_dim
    model.max_length = optional(
        int
    )  # tokens of a side; None = those of the longest text; relative positions end nowhere
    model.dropout_rate = 0.0  # of embeddings and of what sub-layers add, fraction in [0, 1); 0.1 in T5 1.0
    model.attention_dropout_rate = 0.0  # fraction in [0, 1)
    model.mlp_dropout_rate = 0.0  # fraction in [0, 1)
    model.final_dropout_rate = 0.0  # of both stacks' outputs, fraction in [0, 1)
    model.scan_layers = True  # one compiled block; False = unrolled
    model.remat = "none"  # what the backward pass recomputes: none, full, sqrt, dots, dots_no_batch
    model.dtype = "float32"  # of the computation
    model.param_dtype = "float32"
    return model


def span_data_config(scratch: bool) -> ConfigDict:
    """Text, tokens and what is cut out."""
    data = ConfigDict()
    data.name = "spans:python_docs"  # a dataset that `jaxformer list` shows, behind spans:
    data.path = optional(str)  # files of text or jsonl, as 'books/*.txt'
    data.field = optional(str)  # which field of JSON lines holds the text
    # unigram, bpe, wordpiece: trained on the text; bytes, or a tokenizer.json; None = the start's
    data.tokenizer = optional(str, "unigram" if scratch else None)
    data.tokenizer_size = 8192  # tokens at most of one that is trained, sentinels aside
    data.length = 128  # tokens of a source row
    data.objective = "spans"  # spans; prefix: the rest of a text from its beginning
    data.density = 0.15  # of tokens, cut out
    data.mean_span = 3.0  # tokens
    data.masking = "dynamic"  # dynamic: drawn anew in every epoch; static: once
    data.validation_fraction = 0.05  # of documents
    data.validation_bytes = optional(int, 200_000)  # at most; None = all
    data.split_seed = 0  # of that share, and of what is cut out of it
    data.prefetch = 2  # batches made ready in the background
    return data


def task_data_config(tasks: tuple[str, ...], scratch: bool) -> ConfigDict:
    """Tasks as pairs of texts, and batches of them."""
    data = ConfigDict()
    data.name = "text_tasks"
    data.tasks = ConfigDict()
    for name in tasks:
        data.tasks[name] = ConfigDict(TASKS[name])  # name: what `jaxformer list` shows of pairs, or a labels' format
        data.tasks[name].weight = 1.0  # of the task's share
        if name == "dates":
            data.tasks[name].numbers = ConfigDict({"train_examples": 30_000, "validation_examples": 1000})
        else:
            data.tasks[name].train = ()  # the file
            data.tasks[name].validation = ()  # the same; () = a share of the training examples
            data.tasks[name].test = ()  # the same; () = none
    data.tokenizer = optional(str, "bytes" if scratch else None)  # bytes, or a tokenizer.json; None = the start's
    data.limit = optional(int)  # a task of more examples counts as one of so many; None = no limit
    data.temperature = 1.0  # of the tasks' shares: 1 = by size, larger = more alike
    data.length = optional(int)  # tokens of a side in training: longer pairs are left out; None = none is
    data.batching = "bucketed"  # bucketed (by length), padded (to the longest)
    data.num_buckets = 2
    data.validation_fraction = 0.05  # of a task's examples, where there is no file
    data.split_seed = 0  # of that share, and of what is made
    data.prefetch = 2  # batches made ready in the background
    return data


def training_config(tasks: bool) -> ConfigDict:
    """The run: optimizer, schedule, length, evaluation, checkpoints, logging, mesh and samples."""
    config = ConfigDict()
    config.optimizer = optimizer_config(
        "adamw",
        learning_rate=2e-3,
        b1=0.9,
        b2=0.98,
        epsilon=1e-8,
        weight_decay=0.0,
    )
    config.schedule = schedule_config("cosine", warmup_steps=200, final_fraction=0.02)
    config.train = ConfigDict()
    config.train.steps = 5000  # updates
    config.train.batch_size = 32  # rows an update, over all devices
    config.train.accumulation_steps = 1  # parts of a batch computed one after the other
    config.train.non_finite = "skip"  # what a step without finite gradient does: skip (nothing changes), stop
    config.train.average_decay = optional(float)  # of an average of the parameters, which evaluation uses; None = none
    config.train.loss_scale = optional(str)  # for model.dtype=float16: dynamic, or a number; None = none
    config.train.loss_scale_growth_steps = optional(int)  # of dynamic: good steps until it doubles; None = 2000
    config.eval = ConfigDict()
    config.eval.every_steps = 1000  # steps; the last step is always evaluated
    config.eval.batch_size = 32  # rows
    if tasks:
        config.eval.decode_examples = 128  # validation pairs written at each evaluation; 0 = none
        config.eval.text_metrics = False  # BLEU and chrF beside exact matches; needs jaxformer[translation]
        config.eval.num_beams = 1  # 1 = greedy
        config.eval.length_penalty = 1.0  # score = sum of log-probabilities / length^length_penalty
        config.eval.early_stopping = True  # of beams: as soon as num_beams texts have ended
        config.eval.max_new_tokens = 32  # tokens of a text at most
    config.checkpoint = ConfigDict()
    config.checkpoint.every_steps = 1000  # steps; the last step is always saved
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
    if tasks:
        config.sample = ConfigDict()
        config.sample.num_translations = 3  # validation pairs shown at each evaluation; 0 = none
    return config
