"""Continue text with a run's model, or translate it; the text goes to stdout as it comes.

    jaxformer generate --workdir=runs/a --prompt='def main('
    printf 'import \\nclass ' | jaxformer generate --workdir=runs/a --prompt_file=- --temperature=0
    jaxformer generate --workdir=runs/translation --prompt_file=- --num_beams=5 < sentences.txt

A single output is printed as it is. Several (a prompt a line, or --num_samples) are printed one a line: a line break
inside one is then written as \\n, and a backslash as \\\\.
"""

import argparse
import re
import sys
from pathlib import Path

_SETTINGS = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "num_beams",
    "length_penalty",
    "num_samples",
    "seed",
    "step",
)

SUMMARY = "continue text with a run's model, or translate it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument("--workdir", metavar="D", required=True, help="run directory")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="text to continue or to translate")
    source.add_argument("--prompt_file", metavar="F", help="file with a prompt on each line; - = standard input")
    parser.add_argument(
        "--max_new_tokens", type=int, metavar="N", help="tokens at most (200; of translations the run's)"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="0 = always the likeliest (1; of translations and beams 0)"
    )
    parser.add_argument("--top_k", type=int, metavar="K", help="sample from the K likeliest tokens")
    parser.add_argument("--top_p", type=float, metavar="P", help="sample from the smallest set of probability P")
    parser.add_argument(
        "--min_p", type=float, metavar="P", help="leave out what is less likely than P of the likeliest"
    )
    parser.add_argument("--repetition_penalty", type=float, default=1.0, metavar="R", help="above 1: repeat less (1)")
    parser.add_argument("--num_beams", type=int, default=1, metavar="N", help="beams of a beam search (1: none)")
    parser.add_argument("--length_penalty", type=float, default=1.0, metavar="A", help="score = sum / length^A (1)")
    parser.add_argument("--num_samples", type=int, default=1, metavar="N", help="outputs for each prompt (1)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the samples (0)")
    parser.add_argument("--step", default="latest", metavar="N", help="which checkpoint: latest, best or a number")


def run(arguments: argparse.Namespace) -> None:
    """Generates, and prints the text as it comes."""
    prompts = [arguments.prompt] if arguments.prompt is not None else _read_prompts(arguments.prompt_file)
    from jaxformer.training.generating import generate_from_run

    values = {name: getattr(arguments, name) for name in _SETTINGS}
    for piece in generate_from_run(arguments.workdir, prompts, **values):
        sys.stdout.write(piece)
        sys.stdout.flush()


def _read_prompts(name: str) -> list[str]:
    """The lines of a file. Only line feeds end one: other breaks, which Unicode has many of, belong to a prompt."""
    content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt file {name} is not UTF-8: {error.reason} at byte {error.start}") from error
    if not text:
        raise ValueError(f"prompt file {name} is empty")
    prompts = re.split(r"\r?\n", text)
    return prompts if prompts[-1] else prompts[:-1]
