"""Fine-tuning: a pretrained Transformer, or a new one, learns to classify texts, to tag words or to answer questions.

Devlin et al. 2019, "BERT", arXiv:1810.04805, section 4; decoders as in Radford et al. 2018, "Improving Language
Understanding by Generative Pre-Training". Figures of the validation examples need `pip install 'jaxformer[finetune]'`.

    jaxformer train --config=masked_lm:size=tiny --workdir=runs/bert
    jaxformer train --config=finetune:size=tiny,start=run --workdir=runs/labels --config.start.workdir=runs/bert
        --config.data.train=train.tsv --config.data.fields=sentence --config.data.label=label
    jaxformer train --config=finetune:size=tiny,start=run,task=ner --workdir=runs/ner --config.start.workdir=runs/bert
        --config.data.train=train.conll --config.data.validation=dev.conll
    jaxformer train --config=finetune:size=tiny,task=qa --workdir=runs/qa --config.data.train=train.json
    jaxformer eval --workdir=runs/labels
    jaxformer predict --workdir=runs/labels --input=new.tsv --output=predicted.tsv

Argument: task=classification|regression|ner|qa, start=scratch|run, model=bert|roberta|distilbert|gpt,
size=small|tiny|base, answers=spans|tokens (of qa: where the answer starts and ends, or of each token whether it starts,
ends or neither).

start=run begins with the parameters, model and tokenizer of the run directory start.workdir, trained here or made by
`jaxformer convert`; the task's head is new, and model= only chooses how that reads. start=scratch needs a tokenizer:
data.tokenizer=runs/bert/tokenizer.json, or bytes.

Of classification, and of regression, whose labels are numbers: data.fields of two names are pairs of texts; data.name
is tsv_labels, jsonl_labels, huggingface_labels (`owner/name[:config][@split]`) or sentence_polarity.
    --config.optimizer.layer_decay=0.9   each layer learns at 0.9 of the rate of that above it
    --config.optimizer.head_only=True    the body stays as it is
"""

from ml_collections import ConfigDict

from jaxformer.training.config import optional, parse_arg
from jaxformer.training.optimizer_config import optimizer_config
from jaxformer.training.schedule_config import schedule_config

# Per task, its objective and data, by path.
TASKS: dict[str, dict[str, object]] = {
    "classification": {},
    "regression": {"objective": "regression", "data.regression": True},
    "ner": {"objective": "tagging", "data.name": "conll"},
    "qa": {"objective": "answers", "data.name": "squad"},
}

# Fields by path that models have otherwise; gpt is a decoder, whose last token alone has read the text.
MODELS: dict[str, dict[str, object]] = {
    "bert": {},
    "roberta": {"data.separators": 2},
    "distilbert": {"head.pooler": "relu"},
    "gpt": {"head.pooling": "last", "head.pooler": None},
}

# What each size changes in the config below, by path: of all runs, and of those from scratch.
SIZES: dict[str, dict[str, dict[str, object]]] = {
    "small": {"all": {}, "scratch": {}},
    "tiny": {
        "all": {
            "data.num_buckets": 2,
            "optimizer.learning_rate": 5e-4,
            "schedule.warmup_steps": 30,
            "train.steps": 300,
            "eval.every_steps": 150,
            "checkpoint.every_steps": 150,
        },
        "scratch": {
            "model.num_layers": 2,
            "model.embed_dim": 128,
            "model.num_heads": 2,
            "optimizer.learning_rate": 1e-3,
        },
    },
    # Devlin et al. 2019, appendix A.3: three epochs of some hundred thousand examples.
    "base": {
        "all": {
            "optimizer.learning_rate": 3e-5,
            "schedule.warmup_steps": 1000,
            "train.steps": 10_000,
            "eval.every_steps": 1000,
            "checkpoint.every_steps": 1000,
        },
        "scratch": {
            "model.num_layers": 12,
            "model.embed_dim": 768,
            "model.num_heads": 12,
            "model.init_stddev": 0.02,
            "model.dtype": "bfloat16",
        },
    },
}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of a task and what it starts from; every knob with its unit."""
    chosen = parse_arg(
        arg,
        task=tuple(TASKS),
        start=("scratch", "run"),
        model=tuple(MODELS),
        size=tuple(SIZES),
        answers=("spans", "tokens"),
    )
    task, scratch, size = chosen["task"], chosen["start"] == "scratch", SIZES[chosen["size"]]
    config = ConfigDict()
    config.seed = 0  # of new parameters, dropout and the order of examples
    config.objective = "classification"  # that of the task: classification, regression, tagging, answers, answer_tokens
    config.model = model_config(chosen["model"]) if scratch else body_config()
    if not scratch:
        config.start = ConfigDict()
        config.start.workdir = optional(str)  # the run directory that parameters, model and tokenizer come from
        config.start.step = "latest"  # latest, best, or a number
    config.head = ConfigDict()
    config.head.task = optional(str)  # None = the objective
    config.head.num_classes = optional(int)  # None = those of the training examples
    config.head.pooling = "first"  # what a text's head reads: first, last (token), mean
    config.head.pooler = optional(str, "tanh")  # a projection before a text's classifier: tanh, relu; None = none
    config.head.use_bias = True
    config.head.dropout_rate = 0.1  # before the classifier, fraction in [0, 1)
    config.data = data_config(task, scratch)
    config.loss = ConfigDict()
    if task in ("classification", "ner"):
        config.loss.label_smoothing = 0.0  # probability spread over the classes, fraction in [0, 1)
    config.update(training_config())
    model_changes = dict(MODELS[chosen["model"]])
    if task == "ner":
        model_changes.pop("data.separators", None)
    changes = (TASKS[task], model_changes, size["all"], size["scratch"] if scratch else {})
    for fields in changes:
        config.update_from_flattened_dict(fields)
    if task == "qa":
        # There is no answer if that scores better by more than so much; None = 0, or without such questions always one.
        config.eval.no_answer_threshold = optional(float)
        config.eval.most_answer_tokens = 30  # longer answers are not given (Devlin et al.'s code)
    if task == "qa" and chosen["answers"] == "tokens":
        config.objective, config.data.targets = "answer_tokens", "tokens"
    return config


def body_config() -> ConfigDict:
    """What a run may have otherwise than its start; None = as that."""
    model = ConfigDict()
    model.dropout_rate = optional(float)  # of embeddings and of what sub-layers add, fraction in [0, 1)
    model.attention_dropout_rate = optional(float)  # fraction in [0, 1)
    model.mlp_dropout_rate = optional(float)  # fraction in [0, 1)
    model.remat = optional(str)  # what the backward pass recomputes: none, full, sqrt, dots, dots_no_batch
    model.dtype = optional(str)  # of the computation
    return model


def model_config(name: str) -> ConfigDict:
    """Shape of a network from scratch; what is not here is as published (`jaxformer.models`), and may be added."""
    model = ConfigDict()
    model.name = name  # a model that `jaxformer list` shows
    model.vocab_size = optional(int)  # tokens; None = the tokenizer's
    model.num_layers = 4  # blocks
    model.embed_dim = 256  # features
    model.num_heads = 4
    model.mlp_dim = optional(int)  # features; None = 4 × embed_dim
    model.max_length = optional(int)  # tokens; None = those of the longest row
    model.dropout_rate = 0.1  # of embeddings and of what sub-layers add, fraction in [0, 1)
    model.attention_dropout_rate = 0.1  # fraction in [0, 1)
    model.mlp_dropout_rate = 0.0  # fraction in [0, 1)
    model.scan_layers = True  # one compiled block; False = unrolled
    model.remat = "none"  # what the backward pass recomputes: none, full, sqrt, dots, dots_no_batch
    model.init_stddev = 0.05  # of kernels and embeddings; 0.02 as published, for widths of 768
    model.dtype = "float32"  # of the computation
    model.param_dtype = "float32"
    return model


def data_config(task: str, scratch: bool) -> ConfigDict:
    """Examples, tokens and rows."""
    data = ConfigDict()
    data.name = "tsv_labels"  # of classification tsv_labels, jsonl_labels, huggingface_labels, sentence_polarity
    data.train = ()  # the file, as ('train.tsv',)
    data.validation = ()  # the same; () = a share of the training examples
    data.test = ()  # the same; () = none
    if task in ("classification", "regression"):
        data.fields = ("text",)  # that of the text, or those of two texts; of TSV names in line 1, or numbers from 0
        data.label = "label"  # the field of the label
        data.regression = False  # labels are numbers
    data.tokenizer = optional(str, "bytes" if scratch else None)  # bytes, or a tokenizer.json; None = the start's
    # Tokens of a row at most; None = those that the start has positions for, at most 384.
    data.length = optional(int, {"qa": 384}.get(task, 128) if scratch else None)
    if task != "ner":
        data.separators = 1  # between two texts
    if task == "qa":
        data.stride = 128  # tokens from the beginning of one row of a long context to that of the next
        data.question_length = 64  # tokens at most
        data.targets = "spans"  # spans; tokens with objective=answer_tokens
    data.num_buckets = 4  # widths of rows
    data.validation_fraction = 0.1  # of the training examples, where there is no file
    data.split_seed = 0  # of that share
    data.prefetch = 2  # batches made ready in the background
    return data


def training_config() -> ConfigDict:
    """The run: optimizer, schedule, length, evaluation, checkpoints, logging and mesh."""
    config = ConfigDict()
    config.optimizer = optimizer_config(
        "adamw",
        learning_rate=2e-4,
        b1=0.9,
        b2=0.999,
        epsilon=1e-6,
        weight_decay=0.01,
        no_decay=(r"(^|/)(bias|scale)$",),
    )
    config.schedule = schedule_config("linear", warmup_steps=100)
    config.train = ConfigDict()
    config.train.steps = 1000  # updates
    config.train.batch_size = 32  # rows an update, over all devices
    config.train.accumulation_steps = 1  # parts of a batch computed one after the other
    config.train.non_finite = "skip"  # what a step without finite gradient does: skip (nothing changes), stop
    config.train.average_decay = optional(float)  # of an average of the parameters, which evaluation uses; None = none
    config.train.loss_scale = optional(str)  # for model.dtype=float16: dynamic, or a number; None = none
    config.train.loss_scale_growth_steps = optional(int)  # of dynamic: good steps until it doubles; None = 2000
    config.eval = ConfigDict()
    config.eval.every_steps = 250  # steps; the last step is always evaluated
    config.eval.batch_size = 32  # rows
    config.eval.predict_examples = optional(int)  # validation examples predicted at each evaluation; None = all
    config.checkpoint = ConfigDict()
    config.checkpoint.every_steps = 250  # steps; the last step is always saved
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
    return config
