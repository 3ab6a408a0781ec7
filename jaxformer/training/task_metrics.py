"""How good predictions of fine-tuned tasks are: classes, numbers, entities and answers."""

import collections
import importlib
import re
import string
from collections.abc import Sequence, Sized

import numpy as np
from jaxtyping import Float

from jaxformer.training.overrides import ConfigError

_NEEDED = {
    "classification": ("sklearn",),
    "regression": ("scipy",),
    "tagging": ("seqeval",),
    "answers": (),
}


def check_task_metrics(task: str) -> None:
    """Refuses to begin without the library that computes a task's figures.

    Raises:
      ConfigError: it is not installed.
    """
    for library in _NEEDED[task]:
        try:
            importlib.import_module(library)
        except ImportError:
            raise ConfigError(f"the figures of {task} need {library}: pip install 'jaxformer[finetune]'") from None


def classification_metrics(predictions: Sequence[str], labels: Sequence[str]) -> dict[str, float]:
    """Accuracy, F1 and Matthews correlation, by scikit-learn.

    Args:
      predictions: classes as predicted.
      labels: as they are.

    Returns:
      accuracy, f1_macro (the mean of all classes that occur in either), matthews (0 where one side is all of one
      class), and of two classes f1, that of the last in order of their names ("1", "positive", "true", "yes").
    """
    from sklearn import metrics

    _check_counts(predictions, labels)
    classes = sorted(set(labels) | set(predictions))
    each = metrics.f1_score(labels, predictions, labels=classes, average=None, zero_division=0.0)
    figures = {
        "accuracy": float(metrics.accuracy_score(labels, predictions)),
        "f1_macro": float(np.mean(each)),
        # Of one class alone scikit-learn says 0 too, with a warning.
        "matthews": float(metrics.matthews_corrcoef(labels, predictions)) if len(classes) > 1 else 0.0,
    }
    if len(classes) == 2:
        figures["f1"] = float(each[1])
    return figures


def regression_metrics(
    predictions: Sequence[float] | Float[np.ndarray, " N"], labels: Sequence[float] | Float[np.ndarray, " N"]
) -> dict[str, float]:
    """Pearson's and Spearman's correlation, by SciPy, and the mean squared error.

    Returns:
      pearson and spearman (nan where one side is constant), and squared_error.
    """
    from scipy import stats

    _check_counts(predictions, labels)
    ours, theirs = np.asarray(predictions, np.float64), np.asarray(labels, np.float64)
    figures = {"pearson": np.nan, "spearman": np.nan, "squared_error": float(np.mean((ours - theirs) ** 2))}
    if len(ours) > 1 and np.ptp(ours) > 0 and np.ptp(theirs) > 0:
        figures["pearson"] = float(stats.pearsonr(ours, theirs)[0])
        figures["spearman"] = float(stats.spearmanr(ours, theirs)[0])
    return figures


def entity_metrics(predictions: Sequence[Sequence[str]], labels: Sequence[Sequence[str]]) -> dict[str, float]:
    """Precision, recall and F1 of whole entities, and the accuracy of tags, by seqeval (as CoNLL's own script).

    An entity is right if its class, first and last word are.

    Args:
      predictions: BIO tags of each word of each sentence.
      labels: as they are.

    Returns:
      precision, recall, f1 (of all classes together; 0 where nothing is found), tag_accuracy.

    Raises:
      ValueError: a sentence has not as many tags on both sides.
    """
    from seqeval import metrics

    _check_counts(predictions, labels)
    for place, (ours, theirs) in enumerate(zip(predictions, labels)):
        if len(ours) != len(theirs):
            raise ValueError(f"sentence {place} has {len(ours)} predicted tags, must have {len(theirs)}.")
    pair = ([list(tags) for tags in labels], [list(tags) for tags in predictions])
    return {
        "precision": float(metrics.precision_score(*pair, zero_division=0)),
        "recall": float(metrics.recall_score(*pair, zero_division=0)),
        "f1": float(metrics.f1_score(*pair, zero_division=0)),
        "tag_accuracy": float(metrics.accuracy_score(*pair)),
    }


def normalized_answer(text: str) -> str:
    """An answer as SQuAD compares it: small letters, no ASCII punctuation, no articles, single blanks.

    Rajpurkar et al. 2016, arXiv:1606.05250, section 6.
    """
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def answer_f1(prediction: str, answer: str) -> float:
    """F1 of the words that two answers share, each as often as both have it; 1 if both are empty."""
    ours, theirs = (normalized_answer(text).split() for text in (prediction, answer))
    if not ours or not theirs:
        return float(ours == theirs)
    same = (collections.Counter(ours) & collections.Counter(theirs)).total()
    return 2.0 * same / (len(ours) + len(theirs))


def answer_metrics(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> dict[str, float]:
    """SQuAD's exact match and F1, of the best of each question's answers.

    Args:
      predictions: the answer to each question; empty = the context has none.
      answers: all that are right; none = the context has none. Answers of which nothing is left (as "the") count only
        where a question has no other.

    Returns:
      exact_match and f1, 0 to 100, and where questions without an answer are among others the same of those with one
      (answered_exact_match, answered_f1) and the share of those without that are told (unanswered_exact_match).
    """
    _check_counts(predictions, answers)
    exact, scores, given = [], [], []
    for ours, theirs in zip(predictions, answers):
        right = [text for text in theirs if normalized_answer(text)] or [""]
        exact.append(max(float(normalized_answer(ours) == normalized_answer(text)) for text in right))
        scores.append(max(answer_f1(ours, text) for text in right))
        given.append(right != [""])
    figures = {"exact_match": 100.0 * float(np.mean(exact)), "f1": 100.0 * float(np.mean(scores))}
    if any(given) and not all(given):
        answered = np.array(given)
        figures["answered_exact_match"] = 100.0 * float(np.mean(np.array(exact)[answered]))
        figures["answered_f1"] = 100.0 * float(np.mean(np.array(scores)[answered]))
        figures["unanswered_exact_match"] = 100.0 * float(np.mean(np.array(exact)[~answered]))
    return figures


def best_threshold(
    differences: Sequence[float], texts: Sequence[str], answers: Sequence[Sequence[str]]
) -> tuple[float, float]:
    """The threshold of no answer that gives the best F1 (the 2.0 script's "best F1 threshold").

    Args:
      differences: of each question how much no answer is better than the best one (``Answer.null_difference``).
      texts: the best answer of each.
      answers: all that are right; none = there is none.

    Returns:
      The threshold, one of ``differences`` or below all of them (then nothing is answered), and its F1, 0 to 100.
    """
    _check_counts(texts, answers)
    with_text = np.array([answer_metrics([ours], [theirs])["f1"] for ours, theirs in zip(texts, answers)])
    without = np.array([answer_metrics([""], [theirs])["f1"] for theirs in answers])
    order = np.argsort(np.asarray(differences, np.float64), kind="stable")
    # After k of the order, those k are answered and the others are not.
    totals = without.sum() + np.concatenate([[0.0], np.cumsum((with_text - without)[order])])
    sizes = np.asarray(differences, np.float64)[order]
    # Equal differences are all answered or all not.
    possible = np.concatenate([[True], np.append(sizes[1:] != sizes[:-1], True)])
    best = int(np.argmax(np.where(possible, totals, -np.inf)))
    threshold = float(sizes[best - 1]) if best else float(np.nextafter(sizes[0], -np.inf))
    return threshold, float(totals[best] / len(totals[1:]))


def _check_counts(predictions: Sized, labels: Sized) -> None:
    if len(predictions) != len(labels) or not len(labels):
        raise ValueError(f"predictions and labels are {(len(predictions), len(labels))}; must be as many, one or more.")
