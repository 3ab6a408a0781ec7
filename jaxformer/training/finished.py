"""What is done with a run after its training: loading its model, and evaluating it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxformer.training.assembly import example_batch, load_data, make_model, make_objective, place, tokenizer_name
from jaxformer.training.buckets import evaluate_buckets
from jaxformer.training.checkpoint_reading import choose_step, restore_model
from jaxformer.training.compilation_cache import enable_compilation_cache
from jaxformer.training.config import read_config, resolve
from jaxformer.training.evaluate import EvalStep, batches_of, evaluate
from jaxformer.training.evaluating_tasks import evaluate_splits
from jaxformer.training.other_attention import with_attention
from jaxformer.training.overrides import ConfigError
from jaxformer.training.pondering import write_ponder_maps
from jaxformer.training.run_directory import RunDirectory
from jaxformer.training.run_predictor import make_predictor, predicts
from jaxformer.training.sharding import make_mesh, state_shardings
from jaxformer.training.state import abstract_state
from jaxformer.training.step import make_eval_step
from jaxformer.training.translating import translate_examples, write_translations
from jaxformer.training.translation_metrics import check_text_metrics
from jaxformer.training.translator import Translator, make_translator, translates

_CHANGEABLE = ("data.", "eval.", "mesh.")


def read_run(workdir: Path, overrides: Sequence[str] = ()) -> ConfigDict:
    """A run directory's config with overrides, and with the values that the run decided.

    Raises:
      ConfigError: no run was started there, or an override cannot be applied.
    """
    run, decided = read_config(RunDirectory(workdir).config)
    return resolve(run.with_overrides(overrides).config, decided)


def load_model(workdir: Path, config: ConfigDict, mesh: Mesh, step: str = "latest") -> tuple[nn.Module, Any, Any, int]:
    """Model, parameters and model state of a run, without its optimizer.

    Args:
      workdir: the run directory.
      config: its config with all values decided.
      mesh: where the parameters go.
      step: "latest", "best" or a number.

    Returns:
      The module, its parameters, its other variables, and the step.

    Raises:
      CheckpointError: there is no such checkpoint, or it does not fit the config.
    """
    directory = RunDirectory(workdir).checkpoints
    number = choose_step(directory, step)
    model = make_model(config)
    # The state of a run without an optimizer: what evaluation needs, named and laid out as in training.
    state = abstract_state(model, optax.identity(), example_batch(config.data.length, model))
    state = place(state, state_shardings(state, mesh)[0])
    params, model_state = restore_model(directory, number, state.params, state.model_state)
    return model, params, model_state, number


def load_run(workdir: str | Path, step: str = "latest") -> tuple[nn.Module, Any, Any]:
    """A run's model, variables and tokenizer, to look into or to generate with.

    Args:
      workdir: the run directory.
      step: which checkpoint: "latest", "best" (lowest validation loss) or a number.

    Returns:
      The module, its variables (``params``, and ``state`` where its attention has any) for ``model.apply``, and the
      tokenizer.

    Raises:
      ConfigError: no run was started there.
      CheckpointError: there is no such checkpoint, or it does not fit the config.
    """
    from jaxformer.data import load_tokenizer

    workdir = Path(workdir)
    config = read_run(workdir)
    model, params, model_state, _ = load_model(workdir, config, make_mesh(**config.mesh), step)
    tokenizer = load_tokenizer(RunDirectory(workdir).tokenizer(tokenizer_name(config)))
    return model, {"params": params, **model_state}, tokenizer


def load_translator(workdir: str | Path, step: str = "latest") -> Translator:
    """A run of pairs as a function from texts to texts.

    Args:
      workdir: the run directory.
      step: which checkpoint: "latest", "best" (lowest validation loss) or a number.

    Returns:
      A ``Translator``, with methods ``translate`` and ``translate_ids``.

    Raises:
      ConfigError: no run was started there, or it is not of pairs.
      CheckpointError: there is no such checkpoint, or it does not fit the config.
    """
    workdir = Path(workdir)
    config = read_run(workdir)
    if not translates(config):
        raise ConfigError(f"the run in {workdir} is of data {config.data.name!r}, which are no pairs")
    model, params, model_state, _ = load_model(workdir, config, make_mesh(**config.mesh), step)
    return make_translator(RunDirectory(workdir), config, model, params, model_state)


def evaluate_run(
    workdir: str | Path,
    overrides: Sequence[str] = (),
    step: str = "latest",
    attention: str | None = None,
    attention_seed: int = 0,
) -> dict[str, Any]:
    """Evaluates a run's model on its validation data, or on all of other data.

    Args:
      workdir: the run directory.
      overrides: changes of `data`, `eval` and `mesh`, each `data.path=…`. Data of another name or path are scored
        whole, unless `data.validation_fraction` or `data.validation_bytes` say otherwise.
      step: which checkpoint: "latest", "best" or a number.
      attention: another attention of the same parameters, `name:argument=value,…` (as in `shared_query_key`, or
        `lsh:num_hashes=8,num_buckets=16,chunk_size=8`); what it draws is drawn anew. None = the run's own.
      attention_seed: of what it draws.

    Returns:
      The figures of `evaluate` with status, step and data, and by bucket, where the data have buckets; of a model
      whose tokens halt by themselves the folder of its ponder maps, which are written into the run directory; of a
      run of pairs the figures of its validation examples translated, and of test examples under ``test``: what was
      translated stands in the files named ``translations``, in the run directory. So too of a run that classifies, tags
      or answers, with ``predictions``.

    Raises:
      ConfigError: no run was started there, an override that would change the model, or an attention that has other
        parameters.
    """
    for override in overrides:
        if not override.startswith(_CHANGEABLE) or override.startswith(("data.tokenizer", "data.source_tokenizer")):
            raise ConfigError(f"eval may change data (not its tokenizers), eval and mesh only, got config.{override}")
    enable_compilation_cache()
    workdir = Path(workdir)
    if any(override.startswith(("data.name=", "data.path=")) for override in overrides):
        whole = {"validation_fraction": 1.0, "validation_bytes": None}
        own = read_run(workdir)
        # Pairs and tasks name their files split by split.
        known = () if translates(own) or predicts(own) else own.data
        overrides = [*(f"data.{name}={value}" for name, value in whole.items() if name in known), *overrides]
    config = read_run(workdir, overrides)
    mesh = make_mesh(**config.mesh)
    model, params, model_state, number = load_model(workdir, config, mesh, step)
    if attention is not None:
        model, model_state = with_attention(config, params, attention, attention_seed)
    data = load_data(config, RunDirectory(workdir))
    eval_step = jax.jit(make_eval_step(model, make_objective(config)))
    batches = batches_of(data.validation_rows, config, mesh)
    figures: dict[str, Any] = evaluate(eval_step, params, model_state, batches, mesh, data.bits_per)
    buckets = evaluate_buckets(eval_step, model, params, model_state, config, data, mesh)
    figures |= {"buckets": buckets} if buckets else {}
    figures |= _write_ponder_maps(workdir, number, model, params, model_state, config, data, mesh)
    if translates(config):
        translator = make_translator(RunDirectory(workdir), config, model, params, model_state)
        figures = _evaluate_translations(workdir, number, translator, eval_step, figures, config, data, mesh)
    if predicts(config):
        predictor = make_predictor(RunDirectory(workdir), config, model, params, model_state, mesh=mesh)
        folder = RunDirectory(workdir).predictions / f"step_{number:08}"
        figures = evaluate_splits(folder, predictor, eval_step, figures, config, data, mesh)
    return {"status": "completed", "step": number, "split": "validation", **figures, "data": data.summary}


def _evaluate_translations(
    workdir: Path,
    step: int,
    translator: Translator,
    eval_step: EvalStep,
    figures: dict[str, Any],
    config: ConfigDict,
    data: Any,
    mesh: Mesh,
) -> dict[str, Any]:
    """The figures with those of translated validation examples, and of test examples where there are any."""
    if config.eval.text_metrics:
        check_text_metrics()
    folder = RunDirectory(workdir).translations / f"step_{step:08}"
    for name, examples in data.splits.items():
        own = figures
        if name != "validation":
            batches = batches_of(data.rows[name], config, mesh)
            own = evaluate(eval_step, translator.params, translator.model_state, batches, mesh, {})
        translated = translate_examples(translator, examples, config.eval, None)
        own = {**own, **translated.figures}
        file = write_translations(folder, name, examples, translated, config.eval, own)
        own["translations"] = str(file)
        figures = own if name == "validation" else {**figures, name: own}
    return figures


def _write_ponder_maps(workdir: Path, *arguments: Any) -> dict[str, str]:
    """The folder of the ponder maps as a figure; an evaluation needs no right to write, so without it says why."""
    try:
        folder = write_ponder_maps(RunDirectory(workdir), *arguments)
    except OSError as error:
        return {"ponder_maps": f"not written: {error.strerror or error}"}
    return {} if folder is None else {"ponder_maps": str(folder)}
