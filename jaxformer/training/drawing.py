"""Samples of a run: a continued text, drawn pictures, or translations."""

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from ml_collections import ConfigDict

from jaxformer.training.run_directory import RunDirectory
from jaxformer.training.sampling import sample_text
from jaxformer.training.translating import shown_translations
from jaxformer.training.translator import Translator


def draw_sample(
    model: nn.Module, params: Any, model_state: Any, data: Any, config: ConfigDict, step: int, directory: RunDirectory
) -> dict[str, str] | None:
    """Draws what `config.sample` asks for: text, where it has a prompt, translations, or pictures written into files.

    Args:
      model: the module.
      params: its parameters.
      model_state: its other variables.
      data: of the run.
      config: the whole config.
      step: updates done; decides the randomness beside the seed.
      directory: the run directory.

    Returns:
      ``text``, or the ``file`` of the pictures; None where nothing is asked for.
    """
    if "sample" not in config:
        return None
    seed = config.seed + step
    if "prompt" in config.sample:
        if config.sample.max_new_tokens < 1:
            return None
        return {"text": sample_text(model, params, model_state, data.tokenizer, config, seed)}
    if "num_translations" in config.sample:
        if config.sample.num_translations < 1:
            return None
        translator = Translator(model, params, model_state, data.source_tokenizer, data.tokenizer, data.start_id)
        examples = data.splits["validation"]
        return {"text": shown_translations(translator, examples, config.eval, config.sample.num_translations)}
    if config.sample.num_pictures < 1:
        return None
    file = directory.pictures / f"step_{step:08}.png"
    write_pictures(file, sample_pictures(model, params, model_state, data, config.sample, seed), data.num_levels)
    return {"file": str(file.relative_to(directory.path))}


def sample_pictures(
    model: nn.Module, params: Any, model_state: Any, data: Any, settings: ConfigDict, seed: int
) -> np.ndarray:
    """Pictures drawn pixel by pixel, from the start id on.

    Args:
      model: a module that decodes.
      params: its parameters.
      model_state: its other variables.
      data: a `jaxformer.data.PixelData`.
      settings: num_pictures, and temperature, top_k and top_p of `generate`.
      seed: of the pixels.

    Returns:
      uint8 [num_pictures, H, W, C], levels below ``data.num_levels``.
    """
    from jaxformer.inference import generate

    arguments = dict(settings)
    count = arguments.pop("num_pictures")
    tokens = generate(
        model,
        params,
        np.full((count, 1), data.tokenizer.bos_id, np.int32),
        max_new_tokens=int(np.prod(data.shape)),
        rng=jax.random.key(seed),
        vocab_size=data.num_levels,
        model_state=model_state,
        **arguments,
    )
    return tokens.astype(np.uint8).reshape(count, *data.shape)


def write_pictures(file: Path, values: np.ndarray, num_levels: int) -> None:
    """Writes pictures side by side as one PNG; small ones are enlarged to be seen."""
    from jaxformer.data import contact_sheet, write_png

    scale = max(1, 64 // max(values.shape[1:3]))
    write_png(file, contact_sheet(values, num_levels, scale))
