"""What is done with a run after its training: evaluating it, and generating text with it."""

from collections.abc import Iterator, Sequence
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
from jaxformer.training.evaluate import batches_of, evaluate
from jaxformer.training.other_attention import with_attention
from jaxformer.training.overrides import ConfigError
from jaxformer.training.pondering import write_ponder_maps
from jaxformer.training.run_directory import RunDirectory
from jaxformer.training.sampling import TextStream, prompt_tokens
from jaxformer.training.sharding import make_mesh, state_shardings
from jaxformer.training.state import abstract_state
from jaxformer.training.step import make_eval_step

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
    state = abstract_state(model, optax.identity(), example_batch(config.data.length))
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
      whose tokens halt by themselves the folder of its ponder maps, which are written into the run directory.

    Raises:
      ConfigError: no run was started there, an override that would change the model, or an attention that has other
        parameters.
    """
    for override in overrides:
        if not override.startswith(_CHANGEABLE) or override.startswith("data.tokenizer"):
            raise ConfigError(f"eval may change data (not its tokenizer), eval and mesh only, got config.{override}")
    enable_compilation_cache()
    workdir = Path(workdir)
    if any(override.startswith(("data.name=", "data.path=")) for override in overrides):
        whole = {"validation_fraction": 1.0, "validation_bytes": None}
        known = read_run(workdir).data
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
    return {"status": "completed", "step": number, "split": "validation", **figures, "data": data.summary}


def _write_ponder_maps(workdir: Path, *arguments: Any) -> dict[str, str]:
    """The folder of the ponder maps as a figure; an evaluation needs no right to write, so without it says why."""
    try:
        folder = write_ponder_maps(RunDirectory(workdir), *arguments)
    except OSError as error:
        return {"ponder_maps": f"not written: {error.strerror or error}"}
    return {} if folder is None else {"ponder_maps": str(folder)}


def generate_from_run(
    workdir: str | Path,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 200,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    num_samples: int = 1,
    seed: int = 0,
    step: str = "latest",
) -> Iterator[str]:
    """Continues prompts with a run's model; yields text as it comes.

    A single output is yielded as it is. Several are one a line, in the prompts' order: then a line break in the text is
    written as backslash and n, and a backslash twice. All are generated together; the first streams, the others follow.

    Args:
      workdir: the run directory.
      prompts: the texts to continue; empty = the start of a document.
      max_new_tokens: tokens to generate for each, at most.
      temperature: of the softmax; 0 = always the likeliest.
      top_k: sample from that many likeliest tokens; None = all.
      top_p: sample from the smallest set of that probability; None = all.
      num_samples: outputs for each prompt.
      seed: of the samples.
      step: which checkpoint: "latest", "best" or a number.

    Yields:
      Pieces of text, prompts included.

    Raises:
      ConfigError: no run was started there.
      CheckpointError: there is no such checkpoint.
      ValueError: a number is out of range, or a prompt is too long for the model.
    """
    from jaxformer.data import load_tokenizer
    from jaxformer.inference import stream

    if num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}, must be at least 1")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed is {seed}, must be in [-2^63, 2^63)")
    enable_compilation_cache()
    workdir = Path(workdir)
    config = read_run(workdir)
    tokenizer = load_tokenizer(RunDirectory(workdir).tokenizer(tokenizer_name(config)))
    model, params, model_state, _ = load_model(workdir, config, make_mesh(data=1, devices=jax.devices()[:1]), step)
    texts = [prompt for prompt in prompts for _ in range(num_samples)]
    tokens = stream(
        model,
        params,
        [prompt_tokens(tokenizer, text) for text in texts],
        max_new_tokens=max_new_tokens,
        rng=jax.random.key(seed),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eos_id=tokenizer.eos_id,
        vocab_size=tokenizer.vocab_size,
        model_state=model_state,
    )
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
