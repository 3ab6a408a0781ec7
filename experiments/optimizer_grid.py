"""Learning rate by weight decay: can one be tuned without the other? Adam with L2 against AdamW, on a tiny Transformer.

Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", arXiv:1711.05101, figures 1 and 2: the best pairs
of rate and decay lie along a diagonal for Adam with L2, and along the axes for AdamW. A byte model reads a few pages
again and again, so that it overfits unless its weights decay, and is judged by other text. A grid is one command:

    R='optimizer.learning_rate=1e-3,2e-3,4e-3,8e-3,16e-3,32e-3'
    jaxformer sweep --config=optimizer_grid --workdir=runs/adamw \
      --sweep="$R; optimizer.weight_decay=0.1,0.3,1,3,10,30; seed=0..2"
    jaxformer sweep --config=optimizer_grid --workdir=runs/adamw_schedule --config.optimizer.decay_multiplier=schedule \
      --sweep="$R; optimizer.weight_decay=1e-3,3e-3,1e-2,3e-2,1e-1,3e-1; seed=0..2"
    jaxformer sweep --config=optimizer_grid --workdir=runs/adam_l2 --config.optimizer.name=adam_l2 \
      --sweep="$R; optimizer.weight_decay=3e-4,1e-3,3e-3,1e-2,3e-2,1e-1; seed=0..2"

The second is the paper's AdamW, whose decay the rate does not multiply. Each draws its heat map; `read_grid` and
`separability` of `jaxformer.analysis` measure it. One run of the grid:

    jaxformer train --config=optimizer_grid --workdir=runs/one

Argument: size=tiny|small|base.

size   parameters  bytes read again  cost of one run
tiny       0.02 M             8,000  some 10 seconds on 2 CPU cores
small      0.8 M             50,000  minutes on 2 CPU cores
base       13 M           2,000,000  hours on one GPU
"""

from ml_collections import ConfigDict

from jaxformer.training.config import load_config, parse_arg

SIZES: dict[str, dict[str, object]] = {
    "tiny": {
        "model.num_layers": 1,
        "model.embed_dim": 32,
        "data.length": 64,
        "data.training_bytes": 8_000,
        "data.validation_bytes": 20_000,
        "train.steps": 250,
        "schedule.warmup_steps": 20,
    },
    "small": {"data.training_bytes": 50_000, "data.validation_bytes": 50_000, "train.steps": 1000},
    "base": {
        "model.num_layers": 4,
        "model.embed_dim": 512,
        "model.num_heads": 8,
        "model.init_stddev": 0.02,
        "data.training_bytes": 2_000_000,
        "train.steps": 20_000,
        "train.batch_size": 32,
        "schedule.warmup_steps": 500,
    },
}


def get_config(arg: str | None = None) -> ConfigDict:
    """The language model of a size, of which all that is not said here holds."""
    size = parse_arg(arg, size=tuple(SIZES))["size"]
    config = load_config("language_model").config
    with config.unlocked():
        config.optimizer.b1, config.optimizer.b2 = 0.9, 0.95  # of Adam too, so that only the decay's place differs
        config.optimizer.weight_decay = 1.0  # more than usual: the data are few
        config.optimizer.no_decay = (r"(^|/)(bias|scale)$",)  # embeddings, most of this model, do decay
        config.optimizer.clip_norm = None  # clipping would hide what large rates do
        config.schedule.final_fraction = 0.0  # of learning_rate
        config.train.batch_size = 8  # rows an update
        config.eval.every_steps = 0  # steps; 0 = at the end alone
        config.checkpoint.every_steps = 0  # steps; 0 = at the end alone
        config.sample.max_new_tokens = 0  # tokens; 0 = no sample
        config.update_from_flattened_dict(SIZES[size])
    return config
