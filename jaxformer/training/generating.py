"""Text from a finished run's model: prompts continued, or sources translated."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
from ml_collections import ConfigDict

from jaxformer.inference import has_encoder
from jaxformer.models import TaskModel
from jaxformer.training.assembly import tokenizer_name
from jaxformer.training.compilation_cache import enable_compilation_cache
from jaxformer.training.finished import load_model, read_run
from jaxformer.training.overrides import ConfigError
from jaxformer.training.run_directory import RunDirectory
from jaxformer.training.sampling import TextStream, prompt_tokens
from jaxformer.training.sharding import make_mesh
from jaxformer.training.translator import Translator, make_translator, translates


def generate_from_run(
    workdir: str | Path,
    prompts: Sequence[str],
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    num_samples: int = 1,
    seed: int = 0,
    step: str = "latest",
) -> Iterator[str]:
    """Continues prompts with a run's model, or translates them where the run is of pairs; yields text as it comes.

    A single output is yielded as it is. Several are one a line, in the prompts' order: then a line break in the text is
    written as backslash and n, and a backslash twice. All are generated together; the first streams, the others follow.
    Translations and what beams find don't stream.

    Args:
      workdir: the run directory.
      prompts: the texts to continue (empty = the start of a document) or to translate.
      max_new_tokens: tokens to generate for each, at most; None = 200, or the run's `eval.max_new_tokens` where it
        translates.
      temperature: of the softmax; 0 = always the likeliest; None = 1 for continuations without beams, else 0.
      top_k: sample from that many likeliest tokens; None = all.
      top_p: sample from the smallest set of that probability; None = all.
      min_p: leave out tokens less likely than that share of the likeliest; None = none.
      repetition_penalty: above 1 makes tokens that stand there already less likely.
      num_beams: beams of a beam search; 1 = none.
      length_penalty: of a beam search.
      num_samples: outputs for each prompt: samples, or the best of the beams.
      seed: of the samples.
      step: which checkpoint: "latest", "best" or a number.

    Yields:
      Pieces of text: prompts with their continuations, or translations alone.

    Raises:
      ConfigError: no run was started there, or its model writes no text.
      CheckpointError: there is no such checkpoint.
      ValueError: a number is out of range, or a prompt is too long for the model.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}, must be at least 1")
    if 1 < num_beams < num_samples:
        raise ValueError(f"num_samples is {num_samples}, must be at most num_beams = {num_beams}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed is {seed}, must be in [-2^63, 2^63)")
    enable_compilation_cache()
    workdir = Path(workdir)
    config = read_run(workdir)
    model, params, model_state, _ = load_model(workdir, config, make_mesh(data=1, devices=jax.devices()[:1]), step)
    sampling: dict[str, Any] = {
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    search = {"num_beams": num_beams, "length_penalty": length_penalty}
    if translates(config):
        translator = make_translator(RunDirectory(workdir), config, model, params, model_state)
        longest = config.eval.max_new_tokens if max_new_tokens is None else max_new_tokens
        options = {"temperature": temperature or 0.0, **sampling, **search, "max_new_tokens": longest}
        yield from _translations(translator, prompts, num_samples, seed, options)
        return
    _check_decoder(workdir, config, model)
    from jaxformer.data import load_tokenizer

    tokenizer = load_tokenizer(RunDirectory(workdir).tokenizer(tokenizer_name(config)))
    common = {
        "max_new_tokens": 200 if max_new_tokens is None else max_new_tokens,
        "eos_id": tokenizer.eos_id,
        "vocab_size": tokenizer.vocab_size,
        "model_state": model_state,
    }
    if num_beams != 1:
        used = [
            name for name, value in {"temperature": temperature or None, **sampling}.items() if value not in _UNUSED
        ]
        if used:
            raise ValueError(f"num_beams={num_beams} searches, so {used[0]} can't be used")
        yield from _lines(_search(model, params, tokenizer, prompts, num_samples, {**search, **common}))
    else:
        sampling |= {"rng": jax.random.key(seed), "temperature": 1.0 if temperature is None else temperature}
        texts = [prompt for prompt in prompts for _ in range(num_samples)]
        yield from _stream(model, params, tokenizer, texts, {**sampling, **common})


def _translations(
    translator: Translator, sources: Sequence[str], num_samples: int, seed: int, options: dict[str, Any]
) -> Iterator[str]:
    """The sources' translations, so many of each."""
    if num_samples > 1 and options["num_beams"] == 1 and not options["temperature"]:
        raise ValueError(
            f"num_samples is {num_samples}, but greedy translations are all the same: give beams or a temperature"
        )
    found = translator.translate(sources, rng=jax.random.key(seed), num_return=num_samples, **options)
    yield from _lines([hypothesis.text for row in found for hypothesis in row])


def _check_decoder(workdir: Path, config: ConfigDict, model: Any) -> None:
    """Refuses a run that continues no text, saying what its model is for.

    Raises:
      ConfigError: as said.
    """
    if has_encoder(model):
        raise ConfigError(
            f"the run in {workdir} was pretrained on {config.data.name!r}, so it turns no prompt into a text yet; "
            f"train it on a task (text_to_text:start=run,data=dates --config.start.workdir={workdir}), then generate"
        )
    if isinstance(model, TaskModel):
        raise ConfigError(f"the run in {workdir} has a head for {config.head.task!r}; jaxformer predict uses it")
    if model.config.architecture == "encoder":
        raise ConfigError(
            f"the run in {workdir} has an encoder, which writes no text; jaxformer embed gives its vectors, and "
            "finetune:start=run trains it for a task"
        )


# Values of filters that filter nothing.
_UNUSED = (None, 1.0)


def _search(
    model: nn.Module, params: Any, tokenizer: Any, prompts: Sequence[str], num_return: int, options: dict[str, Any]
) -> list[str]:
    """The best continuations that beams find, each behind its prompt."""
    from jaxformer.inference import beam_search

    ids = [prompt_tokens(tokenizer, prompt) for prompt in prompts]
    found = beam_search(model, params, ids, num_return=num_return, pad_id=-1, **options)
    texts = []
    for prompt, rows in zip(prompts, found.tokens):
        for row in rows:
            text = TextStream(tokenizer)
            for token in row[row >= 0].tolist():
                text.add(token)
            text.finish()
            texts.append(prompt + text.text)
    return texts


def _lines(texts: Sequence[str]) -> Iterator[str]:
    escape = _one_line if len(texts) > 1 else str
    yield from (escape(text) + "\n" for text in texts)


def _stream(
    model: nn.Module, params: Any, tokenizer: Any, texts: Sequence[str], options: dict[str, Any]
) -> Iterator[str]:
    """Texts with their continuations, the first as it comes."""
    from jaxformer.inference import stream

    tokens = stream(model, params, [prompt_tokens(tokenizer, text) for text in texts], **options)
    escape = _one_line if len(texts) > 1 else str
    rows = [TextStream(tokenizer) for _ in texts]
    yield escape(texts[0])
    for column in tokens:
        pieces = [row.add(int(token)) for row, token in zip(rows, column)]
        yield escape(pieces[0])
    yield escape(rows[0].finish()) + "\n"
    for text, row in zip(texts[1:], rows[1:]):
        row.finish()
        yield escape(text + row.text) + "\n"


def _one_line(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
