"""List what a config may name: experiments, attentions, models, data, objectives, optimizers, schedules."""

import argparse

SUMMARY = "list experiments, attentions, models, datasets and more"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares no flags."""


def run(arguments: argparse.Namespace) -> None:
    """Prints every name with a line."""
    from jaxformer.training.catalogue import catalogue

    for title, entries in catalogue().items():
        print(f"{title}:")
        width = max(map(len, entries), default=0)
        for name, summary in entries.items():
            first, *others = summary.splitlines() or [""]
            print(f"  {name:<{width}}  {first}")
            for line in others:
                print(f"  {'':<{width}}  {line}")
