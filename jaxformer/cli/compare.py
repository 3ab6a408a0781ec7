"""Compare attentions at several lengths: time and memory of an update, and the loss after some steps.

    jaxformer compare --config=language_model --attention=dense,local,lsh,performer --length=1024,4096,16384
    jaxformer compare --config=language_model:size=tiny --attention=dense --attention=local:window=15 --length=256 \\
        --steps=200 --output=compare.csv --plot=compare.png

A name has the arguments that the config file gives it, or its own: name:argument=value,argument=value in a flag of its
own. Each cell is trained in a process of its own; one that cannot be says why, and the others go on. Rows of an update
are as many as make the tokens of the config's batch.
"""

import argparse

SUMMARY = "compare attentions by time, memory and loss"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument("--config", metavar="F[:arg]", required=True, help="config file or bundled name")
    parser.add_argument("--attention", metavar="A[,B]", action="append", required=True, help="names; repeatable")
    parser.add_argument("--length", metavar="N[,M]", required=True, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="updates of each (10)")
    parser.add_argument("--batch_size", type=int, metavar="N", help="rows of an update (by the config's tokens)")
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds that a cell may take (any)")
    parser.add_argument("--output", metavar="F", help="table to write: .csv")
    parser.add_argument("--plot", metavar="F", help="picture to write: .png, .svg or .pdf (extra plots)")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each cell, no table")
    parser.add_argument("--config.a.b", metavar="v", dest="_", help="set a field of the config; repeatable")
    parser.set_defaults(takes_overrides=True)


def run(arguments: argparse.Namespace) -> None:
    """Compares, and prints the table."""
    import sys

    from jaxformer.cli.output import print_result
    from jaxformer.training.compare import compare, split_attentions, split_lengths
    from jaxformer.training.compare_table import compare_csv, compare_figure, compare_figures, compare_table
    from jaxformer.training.output_files import check_target, write_target
    from jaxformer.training.plotting import check_picture, save_picture

    check_target(arguments.output, arguments.config)
    if arguments.plot is not None:
        check_picture(arguments.plot)
    rows = []
    for row in compare(
        arguments.config,
        split_attentions(arguments.attention),
        split_lengths(arguments.length),
        overrides=arguments.overrides,
        steps=arguments.steps,
        batch_size=arguments.batch_size,
        timeout=arguments.timeout,
    ):
        rows.append(row)
        if arguments.json:
            print_result(compare_figures(row))
        else:
            print(compare_table([row]).splitlines()[-1], file=sys.stderr, flush=True)
    if not arguments.json:
        print(compare_table(rows))
    if arguments.output is not None:
        write_target(arguments.output, compare_csv(rows))
    if arguments.plot is not None:
        save_picture(compare_figure(rows), arguments.plot)
