"""Write what a run's model attends to in a text as a page for the browser, one HTML file that loads nothing.

    jaxformer view --workdir=runs/gpt --text='The cat sat on the mat.' --output=view.html
    jaxformer view --workdir=runs/bert --text='It rains.' --text_b='The street is wet.' --output=view.html
    jaxformer view --workdir=runs/translation --source='ein Haus' --output=view.html
    jaxformer view --workdir=runs/translation --source='ein Haus' --text='a house' --output=view.html

An encoder-decoder reads --source, and writes --text (its own translation if that is left out). Tokens that are one
character together are shown as one; --tokens shows them one by one.
"""

import argparse

SUMMARY = "look at what a run's model attends to"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument("--workdir", metavar="D", required=True, help="run directory")
    parser.add_argument("--text", metavar="TEXT", help="what the model reads; of an encoder-decoder what it writes")
    parser.add_argument("--text_b", metavar="TEXT", help="the second text of a pair that an encoder reads")
    parser.add_argument("--source", metavar="TEXT", help="what the encoder of an encoder-decoder reads")
    parser.add_argument("--output", metavar="F", required=True, help="HTML file to write; - = standard output")
    parser.add_argument("--layers", metavar="A[,B]", help="numbers of the layers to keep, from 0 (all)")
    parser.add_argument("--heads", metavar="A[,B]", help="numbers of the heads to keep, from 0 (all)")
    parser.add_argument("--window", metavar="A,B", help="tokens A to B - 1 of a long text (the first that fit)")
    parser.add_argument("--tokens", action="store_true", help="token by token, even where several are one character")
    parser.add_argument("--step", default="latest", metavar="N", help="which checkpoint: latest, best or a number")


def run(arguments: argparse.Namespace) -> None:
    """Writes the page, and tells how large it is and what it holds."""
    import sys

    layers, heads = (_numbers(arguments, name) for name in ("layers", "heads"))
    window = _numbers(arguments, "window")
    if window is not None and len(window) != 2:
        raise ValueError(f"--window={arguments.window} must be two numbers: the first token, the one behind the last")
    from jaxformer.training.output_files import check_target, write_target
    from jaxformer.training.viewing import view_run

    check_target(arguments.output, arguments.workdir)
    view = view_run(
        arguments.workdir,
        arguments.text,
        second_text=arguments.text_b,
        source=arguments.source,
        step=arguments.step,
        join=not arguments.tokens,
        layers=layers,
        heads=heads,
        window=window,
    )
    write_target(arguments.output, view.html)
    if arguments.output != "-":
        shapes = ", ".join(
            f"{name}: {len(shown.rows):,} tokens to {len(shown.columns):,}, {shown.weights.shape[0]} layers of "
            f"{shown.weights.shape[1]} heads"
            for name, shown in view.maps.items()
        )
        print(f"{len(view.html) / 1e3:,.0f} kB in {arguments.output} ({shapes})", file=sys.stderr)


def _numbers(arguments: argparse.Namespace, name: str) -> tuple[int, ...] | None:
    """The numbers of a flag.

    Raises:
      ValueError: it holds something else.
    """
    given = getattr(arguments, name)
    if given is None:
        return None
    try:
        return tuple(int(number) for number in given.split(","))
    except ValueError:
        raise ValueError(f"--{name}={given} must be whole numbers with commas between them") from None
