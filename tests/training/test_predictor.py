"""Predictions of models whose logits are looked up by token, so that they can be worked out by hand."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.data import Question, encode_labelled, load_labelled, load_tokenizer
from jaxformer.models import HeadConfig, TaskModel, TransformerConfig
from jaxformer.models.task_heads import TaskOutput
from jaxformer.training import predictor as predictor_module
from jaxformer.training.predictor import Predictor, RowLayout
from jaxformer.training.task_outputs import class_predictions

BYTES = load_tokenizer("bytes")


@dataclasses.dataclass(frozen=True)
class Shape:
    positions: str = "none"
    max_length: int = 99
    num_token_types: int = 2


class Lookup(nn.Module):
    """Logits of a token are a row of a table; those of a text the sum over its tokens, the second text's ten times."""

    config: Shape
    outputs: int
    of_texts: bool

    @nn.compact
    def __call__(self, tokens, *, token_types=None, key_mask=None, deterministic=True):
        each = self.param("table", nn.initializers.zeros, (259, self.outputs))[tokens]
        if self.of_texts:
            weights = jnp.where(key_mask, 1.0, 0.0) * jnp.where(token_types == 1, 10.0, 1.0)
            each = jnp.sum(each * weights[..., None], axis=1)
            each = each[:, 0] if self.outputs == 1 else each
        return TaskOutput(each, None)


def _table(outputs, seed=0):
    return np.random.default_rng(seed).normal(size=(259, outputs)).astype(np.float32)


def _predictor(task, table, classes=(), **options):
    model = Lookup(Shape(), table.shape[1], task in ("classification", "regression"))
    options = {"layout": RowLayout(20), "batch_size": 3, **options}
    return Predictor(model, {"table": table}, {}, BYTES, task, classes, **options)


TEXTS = ["b", "für", "", "日本", "a longer text, to be cut at its end", "one", "b", "exactly eighteen b"]


def _by_hand(table, *texts, length=20):
    ids = [list(text.encode()) for text in texts]
    while sum(map(len, ids)) > length - 1 - len(ids):
        # The longer side, the second where both are as long.
        ids[0 if len(ids) == 1 or len(ids[0]) > len(ids[1]) else 1].pop()
    weighted = [(BYTES.bos_id, 1.0)]
    for side, weight in zip(ids, (1.0, 10.0)):
        weighted += [(token, weight) for token in [*side, BYTES.eos_id]]
    return sum(weight * table[token].astype(np.float64) for token, weight in weighted)


def test_classes_and_their_probabilities_by_hand():
    table, classes = _table(3), ("no", "so", "yes")
    found = _predictor("classification", table, classes).predict(TEXTS)
    assert len(found) == len(TEXTS)
    for text, prediction in zip(TEXTS, found):
        scores = _by_hand(table, text)
        shares = np.exp(scores) / np.exp(scores).sum()
        assert prediction.label == classes[int(scores.argmax())]
        assert prediction.probability == pytest.approx(shares.max(), rel=1e-4)
        assert list(prediction.probabilities) == list(classes)
        np.testing.assert_allclose(list(prediction.probabilities.values()), shares, rtol=1e-4)


def test_none_and_one():
    predictor = _predictor("classification", _table(2), ("a", "b"))
    assert predictor.predict([]) == []
    assert predictor.predict(["one"]) == predictor.predict(TEXTS)[5:6]
    assert _predictor("tagging", _table(2), ("O", "B-x")).predict([]) == []
    assert _predictor("answers", _table(2)).predict([]) == []


def test_numbers_of_pairs_by_hand():
    table = _table(1)
    pairs = [("ab", "c"), ("", "x"), ("long enough to be cut", "longer still than that one"), ("short", "a" * 40)]
    found = _predictor("regression", table).predict(pairs)
    expected = [_by_hand(table, *pair)[0] for pair in pairs]
    assert all(isinstance(number, float) for number in found)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_rows_are_those_of_training(tmp_path):
    path = tmp_path / "x.tsv"
    path.write_text("".join(f"{text}\t{index % 2}\n" for index, text in enumerate(TEXTS)), encoding="utf-8")
    texts = load_labelled("tsv_labels", str(path), ("0",), "1")
    predictor = _predictor("classification", _table(2), ("0", "1"))
    examples = encode_labelled(texts, BYTES, length=20, classes=("0", "1"))
    assert predictor.predict_examples(examples) == predictor.predict_texts(texts) == predictor.predict(TEXTS)


def test_one_program_for_each_width():
    predictor = _predictor("classification", _table(5), tuple("abcde"), layout=RowLayout(50), batch_size=2)
    before = predictor_module._apply._cache_size()
    predictor.predict(["x" * size for size in range(48)])
    assert predictor_module._apply._cache_size() - before == 3  # 16, 32 and 50 tokens
    predictor.predict(["x" * size for size in (3, 47, 20)])
    assert predictor_module._apply._cache_size() - before == 3


def test_tags_are_those_of_first_tokens():
    table, classes = np.zeros((259, 3), np.float32), ("O", "B-x", "I-x")
    table[ord("B"), 1] = table[ord("I"), 2] = 1.0
    table[ord(" ")] = table[ord("o")] = [0.5, 0.0, 0.0]
    predictor = _predictor("tagging", table, classes, layout=RowLayout(12))
    # A word but the first begins with its blank.
    given = [["Bo", "o"], ["Io"], [], ["o", "B", "o", "B", "Bcut off"], ["Büß", "ü"]]
    assert predictor.predict(given) == [["B-x", "O"], ["I-x"], [], ["O"] * 5, ["B-x", "O"]]
    table[ord(" ")] = [0.0, 2.0, 0.0]
    assert predictor.predict(given)[3] == ["O", "B-x", "B-x", "B-x", "O"]


QUESTIONS = [
    ("Where?", "Nothing here, then much more of nothing; [found] at last, and again nothing to the end."),
    ("Who?", "[Émile]"),
    ("What?", "No bracket in here, so that no answer is better than any that there is."),
    ("When?", ""),
]


def _brackets(outputs):
    """Answers begin at [ and end at ]; elsewhere something below that of the first token, which is none."""
    table = np.zeros((259, outputs), np.float32)
    table[:, :2] = -3.0
    table[BYTES.bos_id, :2] = 1.0
    table[ord("["), 0] = table[ord("]"), 1] = 4.0
    return table


def test_answers_are_the_best_of_all_windows():
    layout = RowLayout(32, stride=5, question_length=9)
    predictor = _predictor("answers", _brackets(2), layout=layout)
    found = predictor.predict(QUESTIONS)
    assert [answer.text for answer in found][:2] == ["[found]", "[Émile]"]
    assert found[2].text != ""
    assert found[3].text == ""
    assert found[0].candidates[0].score == 8.0
    assert found[0].candidates[0].first == QUESTIONS[0][1].index("[")
    assert [answer.null_score for answer in found] == [2.0] * 4
    strict = dataclasses.replace(predictor, threshold=0.0)
    assert [answer.text for answer in strict.predict(QUESTIONS)] == ["[found]", "[Émile]", "", ""]
    named = [Question("q1", *QUESTIONS[1])]
    assert [(answer.name, answer.text) for answer in predictor.predict(named)] == [("q1", "[Émile]")]
    assert [answer.text for answer in dataclasses.replace(predictor, most_tokens=3, threshold=0.0).predict(named)] == [
        ""
    ]


def test_start_end_and_neither_of_each_token_give_answers():
    table = _brackets(3)
    layout = RowLayout(32, stride=5, question_length=9)
    predictor = _predictor("answer_tokens", table, layout=layout, threshold=0.0)
    found = predictor.predict(QUESTIONS)
    assert [answer.text for answer in found] == ["[found]", "[Émile]", "", ""]
    # How much likelier the two marks are than none.
    assert [answer.candidates[0].score for answer in found[:2]] == [8.0, 8.0]
    assert [answer.null_score for answer in found] == [0.0] * 4


@pytest.mark.parametrize(
    ("task", "given", "message"),
    [
        ("classification", "text", r"must be a sequence: \[text\]"),
        ("classification", ["a", ("b", "c")], "given holds 'a', must be texts, or pairs"),
        ("classification", [("a", "b", "c")], "must be texts, or pairs"),
        ("tagging", ["a b"], r"given\[0\] is 'a b', must be the words"),
        ("answers", [("q", "c", "x")], r"given\[0\] is .*, must be a Question, or"),
    ],
)
def test_what_is_of_another_kind_is_refused(task, given, message):
    with pytest.raises(ValueError, match=message):
        _predictor(task, _table(2), ("a", "b")).predict(given)


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="task is 'parsing', must be one of"):
        _predictor("parsing", _table(2))
    with pytest.raises(ValueError, match="batch_size is 0"):
        _predictor("answers", _table(2), batch_size=0)
    with pytest.raises(ValueError, match="classes has 3 names, must have one or more, at most 2"):
        _predictor("classification", _table(2), tuple("abc")).predict(["a"])


def test_equal_scores_give_the_first_class_and_large_ones_no_nan():
    (tie, large) = class_predictions([np.array([1.0, 1.0]), np.array([-1e5, 1e5])], ("a", "b"))
    assert (tie.label, tie.probability) == ("a", 0.5)
    assert (large.label, large.probability) == ("b", 1.0)


@pytest.mark.slow
def test_a_padded_batch_gives_what_single_rows_give():
    config = TransformerConfig(
        architecture="encoder",
        vocab_size=259,
        num_layers=1,
        embed_dim=8,
        num_heads=2,
        max_length=40,
        positions="learned",
    )
    model = TaskModel(config, HeadConfig(task="classification", num_classes=3))
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 5), jnp.int32))["params"]
    params = jax.tree.map(lambda leaf: 30 * leaf, params)
    apply = jax.jit(model.apply)
    predictor = Predictor(model, params, {}, BYTES, "classification", tuple("abc"), RowLayout(40), batch_size=3)
    texts = ["", "für", "four", ""]
    for text, found in zip(texts, predictor.predict(texts)):
        ids = jnp.array([[BYTES.bos_id, *text.encode(), BYTES.eos_id]], jnp.int32)
        scores = np.asarray(jax.nn.softmax(apply({"params": params}, ids).logits[0]))
        np.testing.assert_allclose(list(found.probabilities.values()), scores, atol=1e-5)
