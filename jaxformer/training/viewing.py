"""What a run's model attends to in a text: its attention maps as a page to look at."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxformer.analysis.attention_view import AttentionView, attention_view
from jaxformer.analysis.joined_tokens import character_groups, join_tokens
from jaxformer.analysis.recording import AttentionMap, record_attention
from jaxformer.data import decoder_start, load_tokenizer
from jaxformer.data.sentence_pairs import pair_layout
from jaxformer.inference import has_encoder
from jaxformer.training.assembly import tokenizer_name
from jaxformer.training.compilation_cache import enable_compilation_cache
from jaxformer.training.finished import load_model, read_run
from jaxformer.training.overrides import ConfigError
from jaxformer.training.run_directory import RunDirectory
from jaxformer.training.run_predictor import predicts, row_layout
from jaxformer.training.sharding import make_mesh
from jaxformer.training.translator import Translator, make_translator

# Tokens of a model's own output at most, where its run says nothing of it.
_LONGEST = 64


@dataclasses.dataclass(frozen=True)
class Given:
    """What an encoder or a decoder reads.

    Attributes:
      ids: with what stands at the sides of its texts.
      token_types: of a pair that an encoder reads, 0 and 1; else None.
      second: index of the second text's first token, or None.
    """

    ids: np.ndarray
    token_types: np.ndarray | None = None
    second: int | None = None


def view_run(
    workdir: str | Path,
    text: str | None = None,
    *,
    second_text: str | None = None,
    source: str | None = None,
    step: str = "latest",
    join: bool = True,
    **options: Any,
) -> AttentionView:
    """The attention of a run's model, of any kind, while it reads a text.

    A decoder reads the token that starts a document, where there is one, and the text; an encoder, with a task's head
    or without, ``[CLS] text [SEP]``, or a pair; an encoder-decoder a source, and the text as its translation.

    Args:
      workdir: the run directory.
      text: what is read; of an encoder-decoder the target, None = the model's own translation.
      second_text: of a pair that an encoder reads, the second text.
      source: of an encoder-decoder what its encoder reads.
      step: which checkpoint: "latest", "best" or a number.
      join: tokens that are one character together are shown as one: what is taken of them summed, what they take
        averaged. False = token by token.
      **options: of ``attention_view``: layers, heads, window, title, height.

    Returns:
      An ``AttentionView``: ``.save("view.html")``, or the value of a notebook's cell.

    Raises:
      ConfigError: no run was started there, or it reads other things than what is given.
      CheckpointError: there is no such checkpoint, or it does not fit the config.
      ValueError: a text too long for the model, or an option that is refused by ``attention_view``.
    """
    workdir = Path(workdir)
    config = read_run(workdir)
    enable_compilation_cache()
    model, params, model_state, number = load_model(workdir, config, make_mesh(data=1, devices=jax.devices()[:1]), step)
    options.setdefault("title", f"{workdir.resolve().name}, step {number:,}")
    directory = RunDirectory(workdir)
    if has_encoder(model):
        if source is None or second_text is not None:
            raise ConfigError(
                f"the run in {workdir} has an encoder and a decoder: give source, and text for a translation other "
                "than its own"
            )
        translator = make_translator(directory, config, model, params, model_state)
        if text is None:
            longest = translator.max_new_tokens or _LONGEST
            text = translator.translate([source], max_new_tokens=longest)[0][0].text
        return attention_view(translation_maps(translator, source, text, join), **options)
    if source is not None or text is None:
        raise ConfigError(f"the run in {workdir} has no encoder of its own beside a decoder: give text, and no source")
    tokenizer = load_tokenizer(directory.tokenizer(tokenizer_name(config)))
    given = read_texts(config, model, tokenizer, text, second_text)
    groups = character_groups(tokenizer, given.ids) if join else None
    maps = record_attention(
        model,
        params,
        given.ids,
        token_types=given.token_types,
        tokenizer=tokenizer,
        model_state=model_state,
        layers=options.get("layers"),
        heads=options.get("heads"),
        window=_token_window(options.get("window"), groups, given.ids.size),
    )
    second = given.second
    if groups is not None:
        maps = {name: _joined(shown, groups, groups) for name, shown in maps.items()}
        second = None if second is None else int(np.searchsorted(groups[1], second))
    return attention_view(maps, second=second, **options)


def read_texts(config: ConfigDict, model: Any, tokenizer: Any, text: str, second_text: str | None) -> Given:
    """A text or a pair as a run's encoder or decoder reads them.

    Args:
      config: the run's.
      model: its model.
      tokenizer: its tokenizer.
      text: the text.
      second_text: of a pair, or None.

    Raises:
      ConfigError: a pair for a model without a head that reads text after text, or nothing to read.
    """
    ids = np.asarray(tokenizer.encode(text), np.int64)
    sided = model.config.architecture == "encoder" or predicts(config)
    if sided and None not in (tokenizer.bos_id, tokenizer.eos_id):
        other = None if second_text is None else np.asarray(tokenizer.encode(second_text), np.int64)
        separators = row_layout(config, model).separators if predicts(config) else 1
        sides = {"start_id": tokenizer.bos_id, "end_id": tokenizer.eos_id, "separators": separators}
        tokens, types = pair_layout(ids, other, **sides)
        second = None if other is None else 1 + ids.size + separators
        return Given(tokens, types if model.config.num_token_types > 1 and other is not None else None, second)
    if second_text is not None:
        raise ConfigError("second_text needs an encoder or a head of a task: this model reads one text")
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    tokens = np.array([*start, *ids], np.int64)
    if not tokens.size:
        raise ConfigError("the text is empty, and there is no token that starts one")
    return Given(tokens)


def translation_maps(translator: Translator, source: str, target: str, join: bool = True) -> dict[str, AttentionMap]:
    """The maps of a source and its translation, as ``Translator.attention_maps``, by characters where ``join`` is set.

    Args:
      translator: a run's model with its tokenizers.
      source: a text.
      target: its translation.
      join: as in ``view_run``.
    """
    maps = translator.attention_maps(source, target)
    if not join:
        return maps
    tokenizer = translator.tokenizer
    written = np.array([*tokenizer.encode(target), tokenizer.eos_id])
    read = np.array([decoder_start(tokenizer), *written[:-1]])
    across = character_groups(translator.source_tokenizer, translator.source_ids(source))
    rows, columns = character_groups(tokenizer, written), character_groups(tokenizer, read)
    groups = {"encoder": (across, across), "decoder": (rows, columns), "cross": (rows, across)}
    return {name: _joined(shown, *groups[name]) for name, shown in maps.items()}


def _token_window(window: tuple[int, int] | None, groups: Any, length: int) -> tuple[int, int] | None:
    """A window of groups as one of tokens."""
    if window is None or groups is None or not 0 <= window[0] < window[1] or window[0] >= len(groups[1]):
        return window
    starts = [*map(int, groups[1]), length]
    return starts[window[0]], starts[min(window[1], len(groups[1]))]


def _joined(shown: AttentionMap, rows: Any, columns: Any) -> AttentionMap:
    """A map by groups, where these are fewer than its tokens; columns of added tokens stay as they are."""
    total = len(shown.rows) if shown.total_rows is None else shown.total_rows
    added = len(shown.columns) - total if rows is columns else 0
    if added > 0:
        texts, starts = columns
        columns = ((*shown.columns[:added], *texts), np.concatenate([np.arange(added), starts + added]))
    return join_tokens(shown, rows, columns)
