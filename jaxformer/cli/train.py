"""Train a model, from the last checkpoint where the run directory has one.

jaxformer train --config=language_model:size=tiny --workdir=runs/a --config.train.steps=1_000
jaxformer train --workdir=runs/a          # go on
"""

import argparse
import os

SUMMARY = "train a model, or go on with a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument("--config", metavar="F[:arg]", help="config file or bundled name; may be left out to go on")
    parser.add_argument("--workdir", metavar="D", required=True, help="run directory")
    parser.add_argument("--config.a.b", metavar="v", dest="_", help="set a field of the config; repeatable")
    parser.set_defaults(takes_overrides=True)


def run(arguments: argparse.Namespace) -> None:
    """Trains, and prints the last figures."""
    from jaxformer.training.signals import deferred_interruption

    with deferred_interruption():  # from here on, so that a signal during the imports is heeded too
        from pathlib import Path

        from jaxformer.cli.output import keep_stdout_for_results, print_result
        from jaxformer.training.config import continue_config, load_config
        from jaxformer.training.distributed import ENVIRONMENT, start_distributed
        from jaxformer.training.loop import train_and_evaluate

        if ENVIRONMENT[0] in os.environ:
            keep_stdout_for_results()
            start_distributed()
        if arguments.config is None:
            config = continue_config(Path(arguments.workdir), arguments.overrides)
        else:
            config = load_config(arguments.config, arguments.overrides)
        print_result(train_and_evaluate(config, arguments.workdir), once=True)
