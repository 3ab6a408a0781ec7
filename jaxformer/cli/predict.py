"""Classify the texts of a file, tag its words or answer its questions, and write it in its own format.

    jaxformer predict --workdir=runs/polarity --input=reviews.tsv --output=labelled.tsv
    jaxformer predict --workdir=runs/polarity --input=lines.txt --fields=0 --output=-
    jaxformer predict --workdir=runs/entities --input=words.conll --output=tagged.conll
    jaxformer predict --workdir=runs/questions --input=dev-v2.0.json --output=answers.json --n_best=candidates.json

Tables (tsv) get the class or number in the label's column, JSON lines in the label's field, with its probability;
words (conll) get their tags; questions (squad) give an object of answers by id. The input needs no labels.
"""

import argparse

SUMMARY = "classify texts, tag words or answer questions of a file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument("--workdir", metavar="D", required=True, help="run directory")
    parser.add_argument("--input", metavar="F", required=True, help="file to predict from")
    parser.add_argument("--output", metavar="G", required=True, help="file to write; - = standard output")
    parser.add_argument("--format", metavar="X", help="tsv, jsonl, conll or squad (by the task and the file's name)")
    parser.add_argument("--fields", metavar="A[,B]", help="of tsv and jsonl: of the text or of a pair (the run's)")
    parser.add_argument("--label", metavar="L", help="of tsv and jsonl: of the label (the run's)")
    parser.add_argument("--step", default="latest", metavar="N", help="which checkpoint: latest, best or a number")
    parser.add_argument("--batch_size", type=int, metavar="N", help="rows computed together (the run's)")
    parser.add_argument("--n_best", metavar="F", help="second file, of the best answers with their scores")
    parser.add_argument(
        "--no_answer_threshold", type=float, metavar="X", help="no answer if that is better by more than X (the run's)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Predicts, and tells how many."""
    import sys

    from jaxformer.training.predicting import predict_file

    options = {"batch_size": arguments.batch_size, "threshold": arguments.no_answer_threshold}
    count = predict_file(
        arguments.workdir,
        arguments.input,
        arguments.output,
        format=arguments.format,
        fields=arguments.fields.split(",") if arguments.fields else None,
        label=arguments.label,
        step=arguments.step,
        n_best=arguments.n_best,
        **{name: value for name, value in options.items() if value is not None},
    )
    if arguments.output != "-":
        print(f"{count:,} predictions in {arguments.output}", file=sys.stderr)
