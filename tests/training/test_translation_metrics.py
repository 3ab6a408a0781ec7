"""Figures of translated texts, against values worked out by hand."""

import math

import pytest

from jaxformer.training.translation_metrics import by_length, exact_match, exact_match_by, text_metrics


def test_bleu_is_the_brevity_penalty_times_the_mean_of_precisions():
    # Of "a b c d e f" against "a b c d e g h": 5/6 words, 4/5 pairs, 3/4 triples, 2/3 fours are right; 7 words wanted.
    figures = text_metrics(["a b c d e f"], ["a b c d e g h"])
    precision = (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25
    assert figures["bleu"] == pytest.approx(100 * math.exp(1 - 7 / 6) * precision, rel=1e-6)
    assert "tok:13a" in figures["bleu_signature"]
    assert figures["chrf_signature"].startswith("nrefs:1")


def test_what_is_right_scores_a_hundred():
    figures = text_metrics(["Ein Mann läuft über die Straße."], ["Ein Mann läuft über die Straße."])
    assert figures["bleu"] == pytest.approx(100)
    assert figures["chrf"] == pytest.approx(100)


def test_exact_match_does_not_see_blanks_around():
    assert exact_match(["a b", " c", "D"], ["a b ", "c", "d"]) == pytest.approx(2 / 3)


def test_exact_match_by_group_and_by_length():
    hypotheses, references = ["a", "b", "c", "d"], ["a", "x", "c", "d"]
    groups = exact_match_by(["de", "de", "en", "de"], hypotheses, references)
    assert groups == {
        "de": {"exact_match": pytest.approx(2 / 3), "examples": 3},
        "en": {"exact_match": 1.0, "examples": 1},
    }
    lengths = by_length([5, 6, 10, 101], hypotheses, references)
    assert list(lengths) == ["1-5", "6-10", "101-105"]
    assert lengths["6-10"] == {"exact_match": 0.5, "examples": 2}
