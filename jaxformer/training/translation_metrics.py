"""How good translations are: BLEU and chrF of sacrebleu, and exact match, of all, by label and by source length."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxformer.training.overrides import ConfigError


def check_text_metrics() -> None:
    """Refuses to begin without the library that computes BLEU.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        import sacrebleu  # noqa: F401
    except ImportError:
        raise ConfigError(
            "BLEU and chrF need sacrebleu: pip install 'jaxformer[translation]', or set config.eval.text_metrics=False"
        ) from None


def text_metrics(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """BLEU and chrF of detokenised texts.

    Post 2018, "A Call for Clarity in Reporting BLEU Scores", arXiv:1804.08771; Popović 2015, "chrF", W15-3049.

    Args:
      hypotheses: what was translated.
      references: what is right, one for each.

    Returns:
      bleu and chrf, 0 to 100, and their signatures bleu_signature and chrf_signature, which say all settings.
    """
    from sacrebleu.metrics import BLEU, CHRF

    figures: dict[str, Any] = {}
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        figures[name] = metric.corpus_score(list(hypotheses), [list(references)]).score
        figures[f"{name}_signature"] = str(metric.get_signature())
    return figures


def exact_match(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Share of texts that are exactly right, but for blanks around them."""
    right = [ours.strip() == theirs.strip() for ours, theirs in zip(hypotheses, references, strict=True)]
    return sum(right) / len(right)


def exact_match_by(
    groups: Sequence[Any], hypotheses: Sequence[str], references: Sequence[str]
) -> dict[str, dict[str, float]]:
    """``exact_match`` of each group of examples, with their number.

    Args:
      groups: the group of each example, such as its label.
      hypotheses: what was translated.
      references: what is right.

    Returns:
      By group, in order, exact_match and examples.
    """
    places: dict[Any, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(group, []).append(place)
    figures = {}
    for group in sorted(places):
        chosen = places[group]
        match = exact_match([hypotheses[place] for place in chosen], [references[place] for place in chosen])
        figures[str(group)] = {"exact_match": match, "examples": len(chosen)}
    return figures


def length_range(length: int, width: int = 5) -> tuple[int, int]:
    """The range of ``width`` lengths that a length is in: 11 to 15 for 13."""
    first = (length - 1) // width * width + 1
    return first, first + width - 1


def by_length(
    lengths: Sequence[int], hypotheses: Sequence[str], references: Sequence[str]
) -> dict[str, dict[str, float]]:
    """``exact_match_by`` ranges of source lengths in tokens, the end included: "11-15"."""
    figures: Mapping[str, dict[str, float]] = exact_match_by(
        [length_range(length) for length in lengths], hypotheses, references
    )
    return {"-".join(name.strip("()").split(", ")): values for name, values in figures.items()}
