"""Turn a checkpoint of Hugging Face's format into a run directory, or a run into such a checkpoint.

    jaxformer convert --from_hf=downloads/bert-base-uncased --workdir=runs/bert
    jaxformer convert --workdir=runs/bert --to_hf=out/bert

The first writes a run that eval, generate, embed and a start (config.start.workdir) read; the second a folder that
transformers loads, of any run whose model is a GPT-2, Llama, BERT, RoBERTa, DistilBERT or T5 in all that it computes.
Only safetensors are read, nothing is unpickled, nothing is downloaded.
"""

import argparse
import sys

SUMMARY = "turn a Hugging Face checkpoint into a run, or a run into one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument("--workdir", metavar="D", required=True, help="run directory: new with --from_hf")
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument("--from_hf", metavar="DIR", help="folder of the checkpoint to read")
    direction.add_argument("--to_hf", metavar="DIR", help="folder to write, empty or new")
    parser.add_argument("--new_head", action="store_true", help="draw a head over the vocabulary that the files lack")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of what is drawn (0)")
    parser.add_argument("--dtype", metavar="T", help="of parameters and computation: float32, bfloat16 (the files')")
    parser.add_argument("--tokenizer", metavar="F", help="bytes or a tokenizer.json, where the checkpoint has none")
    parser.add_argument("--step", default="latest", metavar="N", help="to write: latest, best or a number")
    parser.add_argument("--family", metavar="F", help="to write: gpt2, llama, … (the first that fits)")


def run(arguments: argparse.Namespace) -> None:
    """Converts, says what was skipped or drawn, and prints what it is."""
    from jaxformer.cli.output import print_result
    from jaxformer.training.converting import export_checkpoint, import_checkpoint

    if arguments.from_hf is not None:
        names = ("new_head", "seed", "dtype", "tokenizer")
        options = {name: getattr(arguments, name) for name in names}
        figures = import_checkpoint(arguments.from_hf, arguments.workdir, **options)
    else:
        figures = export_checkpoint(arguments.workdir, arguments.to_hf, step=arguments.step, family=arguments.family)
    for note in figures.pop("notes"):
        print(note, file=sys.stderr)
    print_result(figures)
