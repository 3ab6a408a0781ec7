"""Figures of each test length: loss over its answers, and what greedy decoding answers."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxformer.training.evaluate import EvalStep, batches_of, evaluate
from jaxformer.training.pondering import answer_steps, ponder_maps, ponders


def evaluate_buckets(
    eval_step: EvalStep, model: nn.Module, params: Any, model_state: Any, config: ConfigDict, data: Any, mesh: Mesh
) -> dict[str, dict[str, float]]:
    """Evaluates the rows that data keep apart, each bucket for itself.

    Args:
      eval_step: jitted, from `make_eval_step`.
      model: the module.
      params: its parameters.
      model_state: its other variables.
      config: the whole config; read only where there are buckets: `eval.batch_size`, and `eval.decode`, whether
        questions are answered by greedy decoding too (one process only; several spread the parameters).
      data: with ``buckets``, rows by name.
      mesh: the mesh.

    Returns:
      By bucket, the figures of `evaluate`; with decoding those of `decode_rows`; and of a model whose tokens halt by
      themselves answer_ponder_steps, the mean steps of the tokens from which the answers are read (ponder_steps are
      those of all tokens).
    """
    figures: dict[str, dict[str, float]] = {}
    for name, rows in data.buckets.items():
        figures[name] = evaluate(eval_step, params, model_state, batches_of(rows, config, mesh), mesh, {})
        if ponders(model):
            maps = ponder_maps(model, params, model_state, rows, config, mesh)
            figures[name]["answer_ponder_steps"] = answer_steps(maps)
        if config.eval.decode and jax.process_count() == 1:
            figures[name] |= decode_rows(
                model, params, model_state, rows, batch_size=config.eval.batch_size, eos_id=data.tokenizer.eos_id
            )
    return figures


def decode_rows(
    model: nn.Module, params: Any, model_state: Any, rows: Any, *, batch_size: int, eos_id: int | None
) -> dict[str, float]:
    """Answers the questions of some rows by greedy decoding, a token at a time from the cache.

    A row's question ends at its first target; its answer are its targets.

    Args:
      model: a module that decodes.
      params: its parameters.
      model_state: its other variables.
      rows: with ``batch``, as a `jaxformer.data.Rows`.
      batch_size: rows decoded together.
      eos_id: the token that ends an answer; None = the answer's length does.

    Returns:
      exact_match: share of rows with every token of the answer right, its end included; decoded_accuracy: share of the
      answers' tokens that are right at their place.

    Raises:
      ValueError: the model cannot decode.
    """
    from jaxformer.inference import generate

    exact, right, total = 0, 0, 0
    for start in range(0, len(rows), batch_size):
        # The last batch is filled up, so that one shape is compiled.
        wanted = np.arange(start, start + batch_size)
        batch = rows.batch(np.where(wanted < len(rows), wanted, start))
        questions, answers = questions_and_answers(batch)
        longest = max(map(len, answers))
        tokens = generate(
            model, params, questions, max_new_tokens=longest, eos_id=eos_id, pad_id=-1, model_state=model_state
        )
        for index in np.flatnonzero(wanted < len(rows)):
            correct = tokens[index, : len(answers[index])] == answers[index]
            exact, right, total = exact + bool(correct.all()), right + int(correct.sum()), total + correct.size
    return {"exact_match": exact / len(rows), "decoded_accuracy": right / total}


def questions_and_answers(batch: Mapping[str, np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What each row asks, up to and with the place of its first target, and its targets in order."""
    questions, answers = [], []
    for tokens, targets in zip(batch["tokens"], batch["targets"]):
        places = np.flatnonzero(targets >= 0)
        questions.append(tokens[: places[0] + 1])
        answers.append(targets[places])
    return questions, answers


def say_buckets(say: Callable[[str], None], figures: Mapping[str, Mapping[str, float]]) -> None:
    """Says the figures of each bucket on a line."""
    for name, values in figures.items():
        shown = [f"{figure.replace('_', ' ')} {values[figure]:.4f}" for figure in _SHOWN if figure in values]
        say(f"  {name.replace('_', ' ')}  {'  '.join(shown)}")


_SHOWN = ("loss", "accuracy", "exact_match", "decoded_accuracy", "ponder_steps", "answer_ponder_steps")
