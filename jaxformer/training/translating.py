"""A run's examples translated: figures of text, and files of hypotheses, references and scores."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxformer.training.run_directory import write_json
from jaxformer.training.translation_metrics import by_length, exact_match, exact_match_by, text_metrics
from jaxformer.training.translator import TextHypothesis, Translator


class Translated(NamedTuple):
    """Some examples with what became of them.

    Attributes:
      hypotheses: of each example, best first.
      figures: exact_match, and where they are asked for bleu and chrf with their signatures; of examples with labels
        exact_match_by_label, and exact_match_by_length of the source in tokens.
    """

    hypotheses: list[list[TextHypothesis]]
    figures: dict[str, Any]


def translate_examples(translator: Translator, examples: Any, settings: ConfigDict, count: int | None) -> Translated:
    """Translates examples and compares them with what is right.

    Args:
      translator: the model.
      examples: a `jaxformer.data.PairExamples`.
      settings: `config.eval`: batch_size, num_beams, length_penalty, early_stopping, max_new_tokens, text_metrics.
      count: how many examples, from the first on; None = all.
    """
    names = ("batch_size", "num_beams", "length_penalty", "early_stopping", "max_new_tokens")
    sources = examples.sources[:count]
    hypotheses = translator.translate_ids(sources, **{name: settings[name] for name in names})
    best = [row[0].text for row in hypotheses]
    references = list(examples.target_texts[:count])
    figures: dict[str, Any] = {"exact_match": exact_match(best, references)}
    if settings.text_metrics:
        figures |= text_metrics(best, references)
    if examples.labels is not None:
        figures["exact_match_by_label"] = exact_match_by(examples.labels[:count], best, references)
    figures["exact_match_by_length"] = by_length([len(source) for source in sources], best, references)
    return Translated(hypotheses, figures)


def write_translations(
    folder: Path, name: str, examples: Any, translated: Translated, settings: ConfigDict, figures: dict[str, Any]
) -> Path:
    """Writes what an evaluation translated into a run directory.

    Args:
      folder: of the step.
      name: of the split.
      examples: a `jaxformer.data.PairExamples`.
      translated: what became of them.
      settings: `config.eval`.
      figures: of the split, its loss among them.

    Returns:
      The JSON-lines file: of each example source, hypothesis, reference, score, and its label where it has one. Beside
      it stand the hypotheses and the references as plain text, a line each, and the figures.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name}_beam{settings.num_beams}" if settings.num_beams > 1 else f"{name}_greedy"
    best = [row[0] for row in translated.hypotheses]
    records = []
    for place, hypothesis in enumerate(best):
        record: dict[str, Any] = {"source": examples.source_texts[place], "hypothesis": hypothesis.text}
        record["reference"] = examples.target_texts[place]
        record["score"] = hypothesis.score if math.isfinite(hypothesis.score) else None
        if examples.labels is not None:
            record["label"] = examples.labels[place]
        records.append(record)
    file = folder / f"{stem}.jsonl"
    file.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    texts = {"hypotheses": [hypothesis.text for hypothesis in best], "references": examples.target_texts}
    for kind, lines in texts.items():
        content = "".join(" ".join(line.splitlines()) + "\n" for line in lines)
        (folder / f"{stem}.{kind}.txt").write_text(content, encoding="utf-8")
    asked = {field: settings[field] for field in ("num_beams", "length_penalty", "early_stopping", "max_new_tokens")}
    write_json(folder / f"{stem}.json", {**asked, **figures})
    return file


def shown_translations(translator: Translator, examples: Any, settings: ConfigDict, count: int) -> str:
    """The first examples of some, each with its translation and what is right."""
    hypotheses = translate_examples(translator, examples, settings, count).hypotheses
    rows = zip(examples.source_texts, hypotheses, examples.target_texts)
    return "".join(f"{source}\n  → {row[0].text}\n  = {right}\n" for source, row, right in rows)
