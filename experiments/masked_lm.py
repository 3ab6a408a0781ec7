"""Masked language modelling: a bidirectional encoder learns to fill in words, to be fine-tuned on tasks afterwards.

Devlin et al. 2019, "BERT", arXiv:1810.04805; Liu et al. 2019, "RoBERTa", arXiv:1907.11692; DistilBERT's shape (Sanh et
al. 2019, arXiv:1910.01108) is trained as RoBERTa is, not distilled. The default data, the documentation that Python
brings with it, need no download; the tokenizer is trained on them.

    jaxformer train --config=masked_lm:size=tiny --workdir=runs/bert
    jaxformer train --config=masked_lm:size=tiny,model=roberta --workdir=runs/roberta
    jaxformer train --config=masked_lm:size=tiny,model=roberta --workdir=runs/static --config.data.masking=static
    jaxformer train --config=masked_lm --workdir=runs/mine --config.data.name=masked:text
        --config.data.path='books/*.txt'
    jaxformer train --config=finetune:start=run,task=classification --workdir=runs/polarity
        --config.start.workdir=runs/bert --config.data.train=polarity.tsv

Argument: model=bert|roberta|distilbert, size=small|tiny|base, attention=dense|local|dilated|global_tokens.

bert reads pairs of sentences and also learns whether the second follows the first (loss.next_sentence_weight,
data.sentences=pairs); the others read rows full of sentences (data.sentences=full; isolated: documents in a row do not
see each other). Loss and accuracy are over the tokens chosen to be predicted; the first lines say what knowing the
frequency of tokens alone reaches.

size   cost                           what it is
tiny   about a minute on 2 CPU cores  2 layers of width 128 (Turc et al. 2019, arXiv:1908.08962), rows of 64 tokens
small  hours on 2 CPU cores           4 layers of width 256, rows of 128 tokens
base   days on many GPUs              as published; give it gigabytes of text
"""

from ml_collections import ConfigDict

from jaxformer.training.config import optional, parse_arg
from jaxformer.training.optimizer_config import optimizer_config
from jaxformer.training.schedule_config import schedule_config

# Arguments of each attention, for rows of a hundred tokens or more.
ATTENTION_ARGS: dict[str, dict[str, object]] = {
    "dense": {},
    "local": {"window": 31},  # tokens on each side of the token itself
    "dilated": {"window": 15, "dilation": 2},  # neighbours, tokens between them
    "global_tokens": {"indices": (0, 1, 2, 3)},  # positions
}

# What each model changes in the config below, by path.
MODELS: dict[str, dict[str, object]] = {
    "bert": {},
    "roberta": {"data.tokenizer": "bpe", "data.sentences": "full"},
    "distilbert": {"data.sentences": "full"},
}

# What each size changes in the config below, by path: of all models, and of one.
SIZES: dict[str, dict[str, dict[str, object]]] = {
    "small": {"all": {}},
    "tiny": {
        "all": {
            "model.num_layers": 2,
            "model.embed_dim": 128,
            "model.num_heads": 2,
            "data.length": 64,
            "data.tokenizer_size": 4096,
            "data.validation_bytes": 50_000,
            "optimizer.learning_rate": 2e-3,
            "schedule.warmup_steps": 50,
            "train.steps": 250,
            "eval.every_steps": 125,
            "checkpoint.every_steps": 125,
        }
    },
    # Devlin et al. 2019, appendix A.2; Liu et al. 2019, table 9.
    "base": {
        "all": {
            "model.num_layers": 12,
            "model.embed_dim": 768,
            "model.num_heads": 12,
            "model.init_stddev": 0.02,
            "model.dtype": "bfloat16",
            "model.remat": "dots_no_batch",
            "data.length": 512,
            "data.tokenizer_size": 30_522,
            "data.validation_bytes": 10_000_000,
            "optimizer.learning_rate": 1e-4,
            "optimizer.for_adamw.b2": 0.999,
            "schedule.warmup_steps": 10_000,
            "train.steps": 1_000_000,
            "train.batch_size": 256,
            "eval.every_steps": 5000,
            "checkpoint.every_steps": 5000,
        },
        "roberta": {
            "data.tokenizer_size": 50_265,
            "optimizer.learning_rate": 6e-4,
            "optimizer.for_adamw.b2": 0.98,
            "optimizer.clip_norm": None,
            "schedule.warmup_steps": 24_000,
            "train.steps": 500_000,
            "train.batch_size": 8192,
            "train.accumulation_steps": 16,
        },
        "distilbert": {"model.num_layers": 6},
    },
}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of a model and its size; every knob with its unit."""
    chosen = parse_arg(arg, model=tuple(MODELS), size=tuple(SIZES), attention=tuple(ATTENTION_ARGS))
    name, size = chosen["model"], SIZES[chosen["size"]]
    config = ConfigDict()
    config.seed = 0  # of parameters, dropout, the order of rows and what is masked
    config.objective = "masked_language_model"  # cross-entropy of the chosen tokens
    config.model = model_config(name, chosen["attention"])
    config.data = data_config()
    config.loss = ConfigDict()
    config.loss.label_smoothing = 0.0  # probability spread over the vocabulary, fraction in [0, 1)
    config.loss.z_loss = 0.0  # weight of the squared log-normaliser
    if name == "bert":
        config.loss.next_sentence_weight = 1.0  # of the loss of whether the second sentence follows
    # Places of a row whose logits are computed where that is enough; None = so many that it nearly always is.
    config.loss.predictions_per_row = optional(int)
    config.update(training_config())
    for changes in (MODELS[name], size["all"], size.get(name, {})):
        config.update_from_flattened_dict(changes)
    return config


def model_config(name: str, attention: str) -> ConfigDict:
    """Shape of the network; what is not here is as published (`jaxformer.models`), and may be added."""
    model = ConfigDict()
    model.name = name  # a model that `jaxformer list` shows
    model.vocab_size = optional(int)  # tokens; None = the tokenizer's
    model.num_layers = 4  # blocks
    model.embed_dim = 256  # features
    model.num_heads = 4
    model.mlp_dim = optional(int)  # features; None = 4 × embed_dim
    model.max_length = optional(int)  # tokens; None = data.length
    if name == "bert":
        model.next_sentence = True  # a head for it; False = none, for data without pairs
    model.dropout_rate = 0.1  # of embeddings and of what sub-layers add, fraction in [0, 1)
    model.attention_dropout_rate = 0.1  # fraction in [0, 1)
    model.mlp_dropout_rate = 0.0  # fraction in [0, 1)
    model.attention = attention
    model.attention_args = ConfigDict(ATTENTION_ARGS[attention])  # of this attention
    model.scan_layers = True  # one compiled block; False = unrolled
    model.remat = "none"  # what the backward pass recomputes: none, full, sqrt, dots, dots_no_batch
    model.init_stddev = 0.05  # of kernels and embeddings; 0.02 as published, for widths of 768
    model.dtype = "float32"  # of the computation
    model.param_dtype = "float32"
    return model


def data_config() -> ConfigDict:
    """Text, tokens and what is masked."""
    data = ConfigDict()
    data.name = "masked:python_docs"  # a dataset that `jaxformer list` shows, behind masked:
    data.path = optional(str)  # files of text or jsonl, as 'books/*.txt'
    data.field = optional(str)  # which field of JSON lines holds the text
    data.tokenizer = "wordpiece"  # wordpiece, bpe, unigram: trained on the text; bytes, or a tokenizer.json
    data.tokenizer_size = 8192  # tokens at most of one that is trained
    data.lowercase = False  # of a wordpiece tokenizer that is trained: no capitals, no accents
    data.length = 128  # tokens a row
    data.sentences = "pairs"  # pairs (for next_sentence), full, isolated
    data.masking = "dynamic"  # dynamic: drawn anew in every epoch; static: once
    data.whole_words = False  # all tokens of a word are chosen, or none
    data.mask_fraction = 0.15  # of tokens, chosen to be predicted
    data.short_fraction = 0.1  # of pairs, made shorter at random
    data.validation_fraction = 0.05  # of documents
    data.validation_bytes = optional(int, 200_000)  # at most; None = all
    data.split_seed = 0  # of that share, and of what is masked in it
    data.prefetch = 2  # batches made ready in the background
    return data


def training_config() -> ConfigDict:
    """The run: optimizer, schedule, length, evaluation, checkpoints, logging and mesh."""
    config = ConfigDict()
    config.optimizer = optimizer_config(
        "adamw",
        learning_rate=1e-3,
        b1=0.9,
        b2=0.98,
        epsilon=1e-6,
        weight_decay=0.01,
        no_decay=(r"(^|/)(bias|scale)$",),
    )
    config.schedule = schedule_config("linear", warmup_steps=500)
    config.train = ConfigDict()
    config.train.steps = 10_000  # updates
    config.train.batch_size = 32  # rows an update, over all devices
    config.train.accumulation_steps = 1  # parts of a batch computed one after the other
    config.train.non_finite = "skip"  # what a step without finite gradient does: skip (nothing changes), stop
    config.train.average_decay = optional(float)  # of an average of the parameters, which evaluation uses; None = none
    config.train.loss_scale = optional(str)  # for model.dtype=float16: dynamic, or a number; None = none
    config.train.loss_scale_growth_steps = optional(int)  # of dynamic: good steps until it doubles; None = 2000
    config.eval = ConfigDict()
    config.eval.every_steps = 1000  # steps; the last step is always evaluated
    config.eval.batch_size = 32  # rows
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
    return config
