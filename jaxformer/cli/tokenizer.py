"""Train a tokenizer on text.

    jaxformer tokenizer train --kind=bpe --vocab_size=8_000 --input='books/*.txt' --output=tokenizer.json

Then train a model with --config.data.tokenizer=tokenizer.json. Of pairs, a joint tokenizer is trained on both sides:

    jaxformer tokenizer train --vocab_size=8_000 --input=train.en.gz,train.de.gz --output=joint.json
    jaxformer tokenizer train --vocab_size=8_000 --input=pairs.jsonl --field=source,target --output=joint.json
    jaxformer tokenizer train --vocab_size=8_000 --input=pairs.tsv --field=0 --output=source.json
"""

import argparse

SUMMARY = "train a tokenizer on text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument("action", choices=["train"], help="what to do")
    parser.add_argument("--kind", choices=["bpe", "wordpiece", "unigram"], default="bpe", help="algorithm (bpe)")
    parser.add_argument("--vocab_size", type=int, required=True, metavar="N", help="tokens, special ones included")
    parser.add_argument(
        "--input",
        required=True,
        metavar="GLOB",
        help="text file, folder or glob, several with commas between them, or a dataset's name",
    )
    parser.add_argument(
        "--field",
        metavar="NAME",
        help="field of JSON lines, or column of a .tsv (a number from 0 or a name in line 1); several with commas",
    )
    parser.add_argument("--output", required=True, metavar="F", help="the tokenizer.json to write")


def run(arguments: argparse.Namespace) -> None:
    """Trains and writes the tokenizer, and prints what it is."""
    from jaxformer.cli.output import print_result
    from jaxformer.data import train_tokenizer_from_files

    names = ("kind", "vocab_size", "input", "field", "output")
    print_result(train_tokenizer_from_files(**{name: getattr(arguments, name) for name in names}))
