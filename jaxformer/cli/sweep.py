"""Train a config with all combinations of some values: those that differ in numbers alone together, in one program.

jaxformer sweep --config=language_model:size=tiny --workdir=sweeps/a \\
    --sweep='optimizer.learning_rate=1e-3,3e-3,1e-2; seed=0..3' --config.train.steps=200
jaxformer sweep --workdir=sweeps/a                            # go on
jaxformer generate --workdir='sweeps/a/runs/learning_rate=3e-3,seed=0'

Between fields stands `;`, between values `,`; a..b are whole numbers, both included. Runs that differ in the seed and
in floats of optimizer and schedule are trained together; others form groups, one after another. Results: sweep.csv,
sweep.png, a line of JSON for each run on stdout, and an ordinary run directory for each in runs/.
"""

import argparse

SUMMARY = "train a config with all combinations of some values, together"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument("--config", metavar="F[:arg]", help="config file or bundled name; may be left out to go on")
    parser.add_argument("--sweep", metavar="S", help="'path=value,value; path=a..b'; may be left out to go on")
    parser.add_argument("--workdir", metavar="D", required=True, help="the sweep's folder")
    parser.add_argument("--max_together", metavar="N", type=int, help="runs trained together at most: bounds memory")
    parser.add_argument("--separate", action="store_true", help="train all runs one after another")
    parser.add_argument("--config.a.b", metavar="v", dest="_", help="set a field of the config; repeatable")
    parser.set_defaults(takes_overrides=True)


def run(arguments: argparse.Namespace) -> None:
    """Trains, and prints a row for each run."""
    from jaxformer.training.signals import deferred_interruption

    with deferred_interruption():  # from here on, so that a signal during the imports is heeded too
        from pathlib import Path

        from jaxformer.cli.output import print_result
        from jaxformer.training.config import load_config
        from jaxformer.training.overrides import ConfigError
        from jaxformer.training.sweep import run_sweep
        from jaxformer.training.sweep_record import SweepDirectory, read_record

        sweep, separate, most = arguments.sweep, arguments.separate, arguments.max_together
        if arguments.config is None:
            record = read_record(SweepDirectory(Path(arguments.workdir)))
            base = record.base.with_overrides(arguments.overrides)
            sweep, most = (record.sweep if sweep is None else sweep), (record.max_together if most is None else most)
            separate = separate or record.separate
        elif sweep is None:
            raise ConfigError("sweep needs --sweep='path=value,value; path=a..b' beside --config")
        else:
            base = load_config(arguments.config, arguments.overrides)
        for row in run_sweep(base, sweep, arguments.workdir, separate=separate, max_together=most):
            print_result(row)
