"""Turn the texts of a file into vectors with a run's encoder or decoder.

    jaxformer embed --workdir=runs/bert --input=sentences.txt --output=vectors.npz
    jaxformer embed --workdir=runs/bert --input=articles.jsonl --field=body --output=vectors.jsonl --pooling=first
    jaxformer embed --workdir=runs/gpt --input=sentences.txt --output=- --pooling=last

The input holds a text a line, or JSON lines. A .npz holds the array `embeddings` [texts, width], float32.
"""

import argparse

SUMMARY = "turn texts into vectors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument("--workdir", metavar="D", required=True, help="run directory")
    parser.add_argument("--input", metavar="F", required=True, help="a text a line, or JSON lines (.jsonl)")
    parser.add_argument("--output", metavar="G", required=True, help=".npz or .jsonl; - = JSON lines, printed")
    parser.add_argument(
        "--pooling", default="mean", metavar="P", help="first ([CLS] of an encoder), last or mean (mean)"
    )
    parser.add_argument("--field", default="text", metavar="A", help="of JSON lines: that of the text (text)")
    parser.add_argument("--length", type=int, metavar="N", help="tokens of a text at most (the model's)")
    parser.add_argument("--batch_size", type=int, default=32, metavar="N", help="texts computed together (32)")
    parser.add_argument("--step", default="latest", metavar="N", help="which checkpoint: latest, best or a number")


def run(arguments: argparse.Namespace) -> None:
    """Embeds, and tells how many."""
    import sys

    from jaxformer.training.embedding import embed_file

    names = ("field", "step", "pooling", "length", "batch_size")
    values = {name: getattr(arguments, name) for name in names}
    count = embed_file(arguments.workdir, arguments.input, arguments.output, **values)
    if arguments.output != "-":
        print(f"{count:,} texts embedded in {arguments.output}", file=sys.stderr)
