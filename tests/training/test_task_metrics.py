import math
import warnings

import numpy as np
import pytest

from jaxformer.training import task_metrics
from jaxformer.training.overrides import ConfigError
from jaxformer.training.task_metrics import (
    answer_f1,
    answer_metrics,
    best_threshold,
    check_task_metrics,
    classification_metrics,
    entity_metrics,
    normalized_answer,
    regression_metrics,
)


def test_two_classes_by_their_counts():
    labels = ["no"] * 5 + ["yes"] * 7
    predictions = ["no"] * 3 + ["yes"] * 2 + ["no"] * 1 + ["yes"] * 6
    right, wrong_yes, wrong_no, other = 6, 2, 1, 3
    figures = classification_metrics(predictions, labels)
    yes = 2 * right / (2 * right + wrong_yes + wrong_no)
    no = 2 * other / (2 * other + wrong_yes + wrong_no)
    square = (right + wrong_yes) * (right + wrong_no) * (other + wrong_yes) * (other + wrong_no)
    assert figures == pytest.approx(
        {
            "accuracy": 9 / 12,
            "f1": yes,
            "f1_macro": (yes + no) / 2,
            "matthews": (right * other - wrong_yes * wrong_no) / math.sqrt(square),
        }
    )


def test_more_classes_have_no_f1_of_one_and_one_class_no_correlation():
    assert "f1" not in classification_metrics(["a", "b", "c"], ["a", "b", "b"])
    assert classification_metrics(["a", "a", "a"], ["a", "b", "a"])["matthews"] == 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert classification_metrics(["a", "a"], ["a", "a"]) == {"accuracy": 1.0, "f1_macro": 1.0, "matthews": 0.0}


def test_numbers_by_numpy():
    random = np.random.default_rng(0)
    labels = random.normal(size=31)
    predictions = labels + random.normal(size=31)
    figures = regression_metrics(predictions, labels)
    assert figures["pearson"] == pytest.approx(np.corrcoef(predictions, labels)[0, 1])
    ranks = [np.argsort(np.argsort(side)) for side in (predictions, labels)]
    assert figures["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert figures["squared_error"] == pytest.approx(np.mean((predictions - labels) ** 2))
    assert math.isnan(regression_metrics([1.0, 1.0], [1.0, 2.0])["pearson"])


def test_entities_are_right_as_a_whole():
    labels = [["B-a", "I-a", "O", "B-b"], ["O", "B-a"]]
    predictions = [["B-a", "I-a", "O", "B-a"], ["O", "O"]]
    # Of three entities one is found, and two are said to be there.
    assert entity_metrics(predictions, labels) == pytest.approx(
        {"precision": 1 / 2, "recall": 1 / 3, "f1": 2 / 5, "tag_accuracy": 4 / 6}
    )
    cut = entity_metrics([["B-a", "O", "O", "O"], ["O", "O"]], labels)
    assert cut["f1"] == 0.0
    with pytest.raises(ValueError, match="sentence 1 has 1 predicted tags, must have 2"):
        entity_metrics([["O"] * 4, ["O"]], labels)


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The  U.S. (of) A.", "us of"),
        ("an apple, another\nAnd the theory", "apple another and theory"),
        ("a", ""),
        ("“Ünïcode” – kept", "“ünïcode” – kept"),
    ],
)
def test_answers_as_squad_compares_them(text, normalized):
    assert normalized_answer(text) == normalized


def test_words_of_answers_are_shared_as_often_as_both_have_them():
    assert answer_f1("the very very old man", "very old old house") == pytest.approx(2 * 2 / (4 + 4))
    assert answer_f1("x", "y") == 0.0
    assert answer_f1("", "the") == 1.0
    assert answer_f1("", "x") == 0.0


def test_the_best_of_a_questions_answers_counts():
    predictions = ["in the house", "", "nothing", "The Cat!"]
    answers = [["house", "in house"], [], [], ["dog", "cat"]]
    figures = answer_metrics(predictions, answers)
    assert figures["exact_match"] == pytest.approx(75.0)
    assert figures["f1"] == pytest.approx(75.0)
    assert figures["answered_exact_match"] == 100.0
    assert figures["unanswered_exact_match"] == 50.0
    assert sorted(answer_metrics(["x"], [["x y"]])) == ["exact_match", "f1"]
    assert answer_metrics(["x"], [["x y"]])["f1"] == pytest.approx(100 * 2 / 3)


def test_the_best_threshold_by_trying_all():
    random = np.random.default_rng(1)
    answers = [["one"] if number < 0.6 else [] for number in random.random(30)]
    texts = ["one" if number < 0.7 else "two" for number in random.random(30)]
    differences = np.round(random.normal(size=30), 1).tolist()
    tried = {
        threshold: answer_metrics(
            ["" if difference > threshold else text for difference, text in zip(differences, texts)], answers
        )["f1"]
        for threshold in [*differences, -99.0]
    }
    threshold, f1 = best_threshold(differences, texts, answers)
    assert f1 == pytest.approx(max(tried.values()))
    found = ["" if difference > threshold else text for difference, text in zip(differences, texts)]
    assert answer_metrics(found, answers)["f1"] == pytest.approx(f1)


def test_a_library_that_is_missing_is_named(monkeypatch):
    def missing(name):
        raise ImportError(name)

    check_task_metrics("answers")
    monkeypatch.setattr(task_metrics.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match="seqeval"):
        check_task_metrics("tagging")


def test_as_many_predictions_as_labels():
    with pytest.raises(ValueError, match="as many"):
        classification_metrics(["a"], ["a", "b"])
