"""Sequence to sequence: an encoder-decoder Transformer, or the RNN with attention before it, learns pairs of texts.

Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762; Bahdanau et al. 2015, arXiv:1409.0473; Luong et al.
2015, arXiv:1508.04025; without attention Sutskever et al. 2014, arXiv:1409.3215. The dates of many locales, written as
ISO 8601, need no download (but `pip install 'jaxformer[translation]'`); files are parallel texts, a pair a line.

    jaxformer train --config=translation --workdir=runs/dates
    jaxformer train --config=translation:model=rnn,attention=none --workdir=runs/dates_none
    jaxformer tokenizer train --vocab_size=6_000 --input='multi30k/train.*.gz' --output=joint.json
    jaxformer train --config=translation:data=files --workdir=runs/multi30k --config.data.tokenizer=joint.json
        --config.data.train=multi30k/train.en.gz,multi30k/train.de.gz
        --config.data.validation=multi30k/val.en.gz,multi30k/val.de.gz
        --config.data.test=multi30k/test_2016_flickr.en.gz,multi30k/test_2016_flickr.de.gz
    jaxformer eval --workdir=runs/multi30k --config.eval.num_beams=5
    jaxformer generate --workdir=runs/multi30k --prompt_file=- --num_beams=5 < sentences.en
    jaxformer train --config=translation:data=files --workdir=runs/table --config.data.name=tsv_pairs
        --config.data.train=pairs.tsv --config.data.fields=0,1

Files by `data.name`: parallel; tsv_pairs, whose `fields` are columns, by number from 0 or by the names in line 1;
jsonl_pairs, whose fields may be inside others (`de,translation.en`); huggingface_pairs, where a file is
`owner/name[:config][@split]`, with fields like those. Without validation a share of the training pairs is held out.

Argument: model=transformer|rnn, data=dates|files|copy|reverse|sort, size=tiny|small|base, attention=<of both sides'
own tokens, one that `jaxformer list` shows; of the RNN additive|dot|scaled_dot|general|none>, and of the Transformer
encoder_attention=<another for the encoder> and cross_attention=<from decoder to encoder>.

Validation pairs are translated at every evaluation; `jaxformer eval` translates all of them and the test pairs, and
writes hypotheses, references and scores: `translations/` of the run.
"""

from ml_collections import ConfigDict

from jaxformer.attention import ATTENTION, PATTERNS
from jaxformer.training.config import optional, parse_arg
from jaxformer.training.optimizer_config import optimizer_config
from jaxformer.training.overrides import ConfigError
from jaxformer.training.schedule_config import schedule_config

# Arguments of each attention at lengths of some tens of tokens.
ATTENTION_ARGS: dict[str, dict[str, object]] = {
    "dense": {},
    "additive": {},
    "bilinear": {},
    "concat": {},
    "kernel": {"kernel": "gaussian", "width": optional(float)},  # distance in features; None = learned
    "shared_query_key": {},
    "local": {"window": 15},  # tokens on each side of the token itself; a decoder's, before it
    "dilated": {"window": 7, "dilation": 2},  # neighbours, tokens between them
    "strided": {"stride": 8},  # tokens
    "fixed": {"stride": 8, "num_summary": 2},  # tokens of a block, those of its end that all see
    "global_tokens": {"indices": (0, 1, 2, 3)},  # positions
    "random_blocks": {"num": 3, "seed": 0, "block_size": 8},  # blocks a block sees, drawn by seed, tokens a block
    "bigbird": {"block_size": 8, "num_random": 2, "seed": 0},
    "longformer": {"window": 15, "global_indices": (0,)},  # tokens on each side, positions
    "lsh": {"num_hashes": 4, "num_buckets": 8, "chunk_size": 8},  # rounds, buckets a round, tokens a chunk
    "routing": {"num_clusters": 4, "window": 16},  # clusters, tokens a cluster
    "sinkhorn": {"block_size": 8},  # tokens
    "clustered": {"num_clusters": 8},
    "compressed": {"stride": 4},  # tokens a slot
    "linformer": {"rank": 16},  # slots that all keys are mixed into
    "linear": {"feature_map": "elu"},
    "performer": {"num_features": 64},
}

RECURRENT_ATTENTIONS = ("additive", "dot", "scaled_dot", "general", "none")

# What each size changes in the config below, by path: of both models, of the Transformer and of the RNN.
SIZES: dict[str, dict[str, dict[str, object]]] = {
    "tiny": {"all": {}, "transformer": {}, "rnn": {}},
    # For some ten thousand sentences on a CPU.
    "small": {
        "all": {"train.steps": 5000, "eval.every_steps": 1000, "schedule.warmup_steps": 500},
        "transformer": {"model.num_layers": 3, "model.embed_dim": 192, "optimizer.learning_rate": 1.5e-3},
        "rnn": {"model.embed_dim": 192},
    },
    # As published: Vaswani et al. 2017, table 3 (25,000 tokens a batch); Bahdanau et al. 2015, appendix A.
    "base": {
        "all": {
            "train.steps": 100_000,
            "train.batch_size": 1024,
            "eval.every_steps": 5000,
            "checkpoint.every_steps": 5000,
        },
        "transformer": {
            "model.num_layers": 6,
            "model.embed_dim": 512,
            "model.num_heads": 8,
            "model.mlp_dim": 2048,
            "optimizer.learning_rate": 1.0,
            "schedule.name": "inverse_sqrt",
            "schedule.warmup_steps": 4000,
        },
        "rnn": {"model.embed_dim": 620, "model.hidden_dim": 1000},
    },
}

# What each kind of data changes, by path; it comes last.
DATA: dict[str, dict[str, object]] = {
    "dates": {
        "loss.label_smoothing": 0.0,
        "model.dropout_rate": 0.0,
        "eval.text_metrics": False,  # a date is right or wrong
        "eval.max_new_tokens": 12,
    },
    "files": {"data.name": "parallel"},
    "copy": {"data.name": "copy_pairs"},
    "reverse": {"data.name": "reverse_pairs"},
    "sort": {"data.name": "sort_pairs"},
}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of a model and its pairs; every knob with its unit."""
    chosen = parse_arg(
        arg,
        model=("transformer", "rnn"),
        data=tuple(DATA),
        size=tuple(SIZES),
        attention=(*ATTENTION_ARGS, *RECURRENT_ATTENTIONS[1:]),
        encoder_attention=("same", *ATTENTION_ARGS),
        cross_attention=tuple(name for name in ATTENTION_ARGS if name not in PATTERNS and ATTENTION[name].cross),
    )
    config = ConfigDict()
    config.seed = 0  # of parameters, dropout and the order of training pairs
    config.objective = "language_model"  # cross-entropy of the target's tokens, given those before and the source
    if chosen["model"] == "rnn":
        config.model = recurrent_config("additive" if "attention=" not in (arg or "") else chosen["attention"])
    else:
        config.model = transformer_config(*(chosen[f"{name}attention"] for name in ("", "encoder_", "cross_")))
    config.data = data_config(chosen["data"])
    config.loss = ConfigDict()
    config.loss.label_smoothing = 0.1  # probability spread over the vocabulary, fraction in [0, 1)
    config.loss.z_loss = 0.0  # weight of the squared log-normaliser
    config.update(training_config(chosen["model"]))
    size = SIZES[chosen["size"]]
    for changes in (size["all"], size[chosen["model"]], DATA[chosen["data"]]):
        config.update_from_flattened_dict(changes)
    return config


def transformer_config(attention: str, encoder_attention: str, cross_attention: str) -> ConfigDict:
    """Shape and wiring of the Transformer."""
    if attention not in ATTENTION_ARGS:
        raise ConfigError(f"attention={attention} is of model=rnn; of a Transformer: {', '.join(ATTENTION_ARGS)}")
    model = ConfigDict()
    model.name = "encoder_decoder"  # a model that `jaxformer list` shows
    model.vocab_size = optional(int)  # tokens of the target, or of both; None = the tokenizer's
    model.source_vocab_size = optional(int)  # tokens of a separate source; None = its tokenizer's
    model.share_embeddings = True  # source and target have one table of tokens; needs one tokenizer
    model.num_layers = 2  # blocks of the decoder
    model.num_encoder_layers = optional(int)  # blocks of the encoder; None = num_layers
    model.embed_dim = 128  # features
    model.num_heads = 4
    model.num_kv_heads = optional(int)  # None = num_heads; 1 = multi-query attention
    model.head_dim = optional(int)  # features a head; None = embed_dim / num_heads
    model.mlp_dim = optional(int, 512)  # features; None = 4 × embed_dim
    model.max_length = optional(int)  # tokens of a side; None = those of the longest text
    model.positions = "sinusoidal"  # learned, sinusoidal, rotary, alibi, relative, none
    model.norm = "layer"  # layer, rms, batch, none
    model.norm_placement = "post"  # post (as published), pre, none
    model.norm_epsilon = 1e-5
    model.norm_momentum = optional(float)  # of batch norm: share of its averages that a step keeps; None = 0.9
    model.mlp_norm = optional(str)  # of the feed-forward layer's hidden width: layer, rms, batch; None = none
    model.mlp_norm_placement = optional(str)  # before, after the activation; None = before
    model.activation = "relu"  # relu, gelu, gelu_tanh, swiglu, geglu, geglu_tanh
    model.use_bias = True
    model.tie_embeddings = True  # the output head is the transposed token embedding
    model.scale_embedding = True  # token embeddings times sqrt(embed_dim), beside vectors of positions
    model.vocab_multiple = 1  # rows of the vocabulary are padded to a multiple, for speed
    model.dropout_rate = 0.1  # of embeddings and of what sub-layers add, fraction in [0, 1)
    model.attention_dropout_rate = 0.0  # fraction in [0, 1)
    model.mlp_dropout_rate = 0.0  # fraction in [0, 1)
    model.attention = attention  # of the decoder, and of the encoder where that has none of its own
    model.attention_args = ConfigDict(ATTENTION_ARGS[attention])
    if encoder_attention != "same":
        model.encoder_attention = encoder_attention
        model.encoder_attention_args = ConfigDict(ATTENTION_ARGS[encoder_attention])
    model.cross_attention = cross_attention  # from decoder to encoder
    model.cross_attention_args = ConfigDict(ATTENTION_ARGS[cross_attention])
    model.scan_layers = True  # one compiled block; False = unrolled
    model.remat = "none"  # what the backward pass recomputes: none, full, sqrt, dots, dots_no_batch
    model.kernel_init = "xavier_uniform"  # normal (of init_stddev), xavier_uniform
    model.init_stddev = 0.07  # of normal kernels and of embeddings: about 1 / sqrt(embed_dim)
    model.scale_residual_init = False  # kernels into the residual stream start smaller, the more layers there are
    model.dtype = "float32"  # of the computation
    model.param_dtype = "float32"
    return model


def recurrent_config(attention: str) -> ConfigDict:
    """Shape and wiring of the RNN."""
    if attention not in RECURRENT_ATTENTIONS:
        raise ConfigError(
            f"attention={attention} is of model=transformer; of an RNN: {', '.join(RECURRENT_ATTENTIONS)}"
        )
    model = ConfigDict()
    model.name = "recurrent"  # a model that `jaxformer list` shows
    model.vocab_size = optional(int)  # tokens of the target, or of both; None = the tokenizer's
    model.source_vocab_size = optional(int)  # tokens of a separate source; None = its tokenizer's
    model.share_embeddings = True  # source and target have one table of tokens; needs one tokenizer
    model.num_layers = 1  # of each side
    model.embed_dim = 128  # features of a token
    model.hidden_dim = 256  # features of a state; the encoder's two directions have half each
    model.cell = "gru"  # gru, lstm
    model.bidirectional = True  # the encoder reads both ways
    model.attention = attention  # additive (Bahdanau), dot, scaled_dot, general (Luong), none
    model.convention = "bahdanau"  # bahdanau: the previous state asks; luong: the current one
    model.attention_dim = optional(int)  # features in which additive attention compares; None = hidden_dim
    model.dropout_rate = 0.1  # of embedded tokens and of outputs, fraction in [0, 1)
    model.init_stddev = 0.1  # of embeddings
    model.dtype = "float32"  # of the computation
    model.param_dtype = "float32"
    return model


def data_config(data_name: str) -> ConfigDict:
    """Pairs, tokens and batches."""
    data = ConfigDict()
    data.name = data_name  # dates, parallel, tsv_pairs, jsonl_pairs, huggingface_pairs, copy_pairs, …
    if data_name == "files":
        data.train = ()  # (source file, target file) of parallel; else (file,) or ("owner/name[:config][@split]",)
        data.validation = ()  # the same; () = a share of the training pairs
        data.test = ()  # the same; () = none
        data.fields = ("source", "target")  # of JSON lines and Hugging Face; of TSV the columns ("0", "1")
        data.tokenizer = "bytes"  # of both sides: bytes, or a tokenizer.json
        data.source_tokenizer = optional(str)  # of the source alone; needs model.share_embeddings=False
        data.validation_fraction = 0.05  # of the training pairs, where there are no files
        data.split_seed = 0  # of that share
    else:
        data.train_examples = 30_000
        data.validation_examples = 1000
        data.test_examples = 2000
        data.split_seed = 0  # of what is drawn: the same in runs of different config.seed
    if data_name == "dates":
        data.locales = ()  # of Babel; () = those of several scripts
        data.years = (1900, 2099)  # first, last
    elif data_name != "files":
        data.min_length = 1  # shortest word, symbols
        data.max_length = 20  # longest word, symbols
    data.length = optional(int)  # tokens of a side in training: longer pairs are left out; None = none is
    data.batching = "bucketed"  # bucketed (by length), packed (several pairs a row), padded (to the longest)
    data.num_buckets = 4
    data.prefetch = 2  # batches made ready in the background
    return data


def training_config(model: str) -> ConfigDict:
    """The run: optimizer, schedule, length, evaluation, checkpoints, logging, mesh and samples."""
    config = ConfigDict()
    config.optimizer = optimizer_config(
        "adamw",
        learning_rate=2e-3,  # of the Transformer's inverse_sqrt a factor, 1 as published
        b1=0.9,
        b2=0.98,
        epsilon=1e-9,
        weight_decay=0.0,
    )
    config.schedule = schedule_config("cosine", warmup_steps=200, final_fraction=0.02, of_width=model == "transformer")
    config.train = ConfigDict()
    config.train.steps = 1500  # updates
    config.train.batch_size = 64  # pairs an update, over all devices; rows of pairs where they are packed
    config.train.accumulation_steps = 1  # parts of a batch computed one after the other
    config.train.non_finite = "skip"  # what a step without finite gradient does: skip (nothing changes), stop
    config.train.average_decay = optional(float)  # of an average of the parameters, which evaluation uses; None = none
    config.train.loss_scale = optional(str)  # for model.dtype=float16: dynamic, or a number; None = none
    config.train.loss_scale_growth_steps = optional(int)  # of dynamic: good steps until it doubles; None = 2000
    config.eval = ConfigDict()
    config.eval.every_steps = 500  # steps; the last step is always evaluated
    config.eval.batch_size = 64  # rows
    config.eval.decode_examples = 128  # validation pairs translated at each evaluation; 0 = none
    config.eval.text_metrics = True  # BLEU and chrF; needs jaxformer[translation]
    config.eval.num_beams = 1  # 1 = greedy
    config.eval.length_penalty = 1.0  # score = sum of log-probabilities / length^length_penalty
    config.eval.early_stopping = True  # of beams: as soon as num_beams translations have ended
    config.eval.max_new_tokens = 64  # tokens of a translation at most
    config.checkpoint = ConfigDict()
    config.checkpoint.every_steps = 500  # steps; the last step is always saved
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
    config.sample.num_translations = 3  # validation pairs shown at each evaluation; 0 = none
    return config
