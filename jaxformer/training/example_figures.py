"""Figures of validation examples during training: as texts, where the loss is of rows of tokens."""

from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxformer.training.evaluating_tasks import predict_split
from jaxformer.training.run_directory import RunDirectory
from jaxformer.training.run_predictor import make_predictor, predicts
from jaxformer.training.state import TrainState
from jaxformer.training.translating import translate_examples
from jaxformer.training.translator import Translator, translates


def example_figures(
    directory: RunDirectory, config: ConfigDict, model: nn.Module, state: TrainState, data: Any, mesh: Mesh
) -> dict[str, float]:
    """Validation examples translated, classified, tagged or answered by the model as it is, and compared.

    Args:
      directory: of the run.
      config: the whole config: of pairs `eval.decode_examples` (0 = none) are translated, and of a task
        `eval.predict_examples` (None = all, 0 = none) predicted, from the first on.
      model: the module.
      state: with its parameters.
      data: the run's.
      mesh: the mesh.

    Returns:
      Figures by name; none of other runs, or of several processes.
    """
    # One process decodes; the parameters of several are spread out of its reach.
    if jax.process_count() > 1:
        return {}
    variables = (model, state.evaluation_params, state.model_state)
    if translates(config) and config.eval.decode_examples:
        translator = Translator(*variables, data.source_tokenizer, data.tokenizer, data.start_id)
        examples = data.splits["validation"]
        figures = translate_examples(translator, examples, config.eval, config.eval.decode_examples).figures
        return {name: value for name, value in figures.items() if isinstance(value, float)}
    if predicts(config) and config.eval.get("predict_examples") != 0:
        predictor = make_predictor(directory, config, *variables, data.tokenizer, mesh=mesh)
        return predict_split(predictor, data.splits["validation"], config.eval.get("predict_examples")).figures
    return {}
