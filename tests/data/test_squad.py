import json
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from jaxformer.data import (
    choose_answers,
    choose_token_answers,
    data_loader,
    encode_questions,
    load_question_data,
    load_questions,
    load_tokenizer,
    train_tokenizer,
)
from jaxformer.data.answers import best_spans
from jaxformer.data.offsets import encode_with_offsets
from jaxformer.data.questions import hub_questions
from jaxformer.data.squad import token_targets

SHARED = Path(os.environ.get("JAXFORMER_SHARED_DATA", Path(__file__).parents[3] / "shared/data"))
CONTEXT = "In 1912 Émile built a 20-metre tower near Orléans, then sold it.  Nobody knows why he did."


def _file(path, questions, version="1.1"):
    content = {"version": version, "data": [{"title": "t", "paragraphs": [{"context": CONTEXT, "qas": questions}]}]}
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def _entry(name, answer, **more):
    answers = [{"text": answer, "answer_start": CONTEXT.index(answer)}] if answer else []
    return {"id": name, "question": f"What is {name}?", "answers": answers, **more}


@pytest.fixture
def file(tmp_path):
    entries = [
        _entry("a", "Émile"),
        _entry("b", "20-metre tower"),
        _entry("c", "", is_impossible=True),
        _entry("d", "he did"),
    ]
    return _file(tmp_path / "squad.json", entries, "v2.0")


def _tokenizers():
    kinds = [train_tokenizer(kind, [CONTEXT] * 3, 400) for kind in ("wordpiece", "bpe", "unigram")]
    return [load_tokenizer("bytes"), *kinds]


def test_both_versions_are_read_and_answers_that_are_elsewhere_left_out(file, tmp_path):
    read = load_questions(file)
    assert [question.name for question in read.questions] == ["a", "b", "c", "d"]
    assert read.questions[0].answers == (("Émile", 8),)
    assert read.questions[2].answers == ()
    wrong = _entry("e", "sold")
    wrong["answers"] += [{"text": "sold", "answer_start": 3}]
    read = load_questions(_file(tmp_path / "wrong.json", [wrong]))
    assert len(read.questions[0].answers) == 1
    assert read.skipped == 1


def _one(context, question, start):
    """A file of one question, from its fields as JSON."""
    asked = f'{{"id": "q", "question": {question}, "answers": [{{"text": "b", "answer_start": {start}}}]}}'
    return f'{{"data": [{{"paragraphs": [{{"context": {context}, "qas": [{asked}]}}]}}]}}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "x.json: not JSON"),
        ('{"data": [{}]}', "KeyError"),
        ('{"data": []}', "no question"),
        (_one("null", '"a"', 0), "x.json is not in the form of SQuAD: TypeError context of 'q' is None, must be text"),
        (_one('"b"', "3", 0), "question of 'q' is 3, must be text"),
        (_one('"b"', '"a"', '"x"'), "x.json is not in the form of SQuAD: ValueError"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path, text, message):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_questions(str(path))


def test_offsets_are_those_of_the_text():
    for tokenizer in _tokenizers():
        ids, spans = encode_with_offsets(tokenizer, CONTEXT)
        assert ids.tolist() == tokenizer.encode(CONTEXT)
        covered = set()
        for first, end in spans.tolist():
            piece = CONTEXT[first:end]
            assert piece == piece.strip()
            covered |= set(range(first, end))
        assert covered == {place for place, character in enumerate(CONTEXT) if not character.isspace()}


@pytest.mark.parametrize("stride", [1, 7, 500])
def test_windows_overlap_and_answers_map_back(file, stride):
    questions = load_questions(file)
    for tokenizer in _tokenizers():
        length = 48 if tokenizer.name == "bytes" else 36
        examples = encode_questions(questions, tokenizer, length=length, stride=stride, question_length=20)
        starts, ends = (examples.rows.per_row[name][0] for name in ("starts", "ends"))
        ids, _ = encode_with_offsets(tokenizer, CONTEXT)
        for number, question in enumerate(questions.questions):
            rows = examples.rows_of[number]
            for row in rows:
                place = int(examples.windows.place[row])
                tokens, mask = examples.rows.tokens[row], examples.rows.per_token["answer_mask"][0][row]
                size = len(examples.windows.spans[row])
                assert len(tokens) == place + size + 1 <= length
                assert np.flatnonzero(mask).tolist() == [0, *range(place, place + size)]
                if starts[row]:
                    first, end = examples.characters(row, int(starts[row]), int(ends[row]))
                    assert CONTEXT[first:end] == question.answers[0][0]
            # The windows hold every token, and one of those that step by one token the whole answer.
            assert tokens[-2] == ids[-1]
            if stride == 1:
                assert any(starts[row] for row in rows) == bool(question.answers)


def test_the_best_span_by_trying_all():
    random = np.random.default_rng(0)
    for _ in range(20):
        starts, ends = random.normal(size=(2, 12))
        allowed = random.random(12) < 0.7
        tried = [
            (starts[first] + ends[last], first, last)
            for first in range(12)
            for last in range(first, min(12, first + 4))
            if allowed[first] and allowed[last]
        ]
        found = best_spans(starts, ends, allowed, n_best=12, most_tokens=4)
        assert [span[1:] for span in found] == [span[1:] for span in sorted(tried, reverse=True)][:12]


def test_answers_are_the_best_over_all_windows_and_none_beyond_the_threshold(file):
    questions = load_questions(file)
    tokenizer = load_tokenizer("bytes")
    examples = encode_questions(questions, tokenizer, length=48, stride=11, question_length=20)
    size = examples.rows.length + 3
    starts = [np.zeros(size) for _ in range(len(examples.rows))]
    ends = [np.zeros(size) for _ in range(len(examples.rows))]
    wanted = {0: "Émile", 1: "20-metre tower", 3: "he did"}
    for row in range(len(examples.rows)):
        number = int(examples.windows.question[row])
        places = [examples.rows.per_row[name][0][row] for name in ("starts", "ends")]
        if places[0]:
            starts[row][places[0]], ends[row][places[1]] = 5.0, 4.0
        starts[row][0] = 2.0 + row % 2 if number != 2 else 6.0
        # A better place outside the context, and one in padding, are not looked at.
        starts[row][1], ends[row][-1] = 50.0, 50.0
    always = choose_answers(examples, starts, ends)
    assert {number: always[number].text for number in wanted} == wanted
    assert always[2].text != ""
    assert always[0].candidates[0].score == 9.0
    assert always[0].null_score in (2.0, 3.0)
    assert [answer.name for answer in always] == ["a", "b", "c", "d"]
    scores = [candidate.score for candidate in always[1].candidates]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) <= 20
    chosen = choose_answers(examples, starts, ends, threshold=0.0)
    assert [answer.text for answer in chosen] == ["Émile", "20-metre tower", "", "he did"]
    assert all(answer.text == "" for answer in choose_answers(examples, starts, ends, threshold=-99.0))
    assert all(len(answer.text) <= 2 for answer in choose_answers(examples, starts, ends, most_tokens=2))
    with pytest.raises(ValueError, match="one for a row"):
        choose_answers(examples, starts[1:], ends)


def test_what_each_token_is_to_the_answer_is_right_and_leads_back(file):
    questions = load_questions(file)
    tokenizer = load_tokenizer("bytes")
    shape = {"length": 60, "stride": 20, "question_length": 20}
    examples = encode_questions(questions, tokenizer, targets="tokens", **shape)
    plain = encode_questions(questions, tokenizer, **shape)
    assert set(examples.rows.per_token) - set(plain.rows.per_token) == {"targets"}
    logits = []
    for row, targets in enumerate(examples.rows.per_token["targets"][0]):
        start, end = (int(examples.rows.per_row[name][0][row]) for name in ("starts", "ends"))
        for place, kind in enumerate(targets.tolist()):
            in_context = place > 0 and examples.rows.per_token["answer_mask"][0][row][place]
            wanted = {start: 0, end: 1}.get(place, 2) if start else 2
            assert kind == (wanted if in_context else -100)
        # Certain of the targets, and of an end in what is not looked at.
        certain = np.full((examples.rows.length, 3), -5.0)
        certain[np.arange(len(targets)), np.where(targets == -100, 1, targets)] = 5.0
        logits.append(certain)
    batch = examples.rows.batch(np.array([0, len(examples.rows)]), 0)
    assert (batch["targets"][1] == -100).all()
    found = choose_token_answers(examples, logits, threshold=0.0)
    assert [answer.text for answer in found] == ["Émile", "20-metre tower", "", "he did"]
    assert [answer.null_difference for answer in found] == [-20.0, -20.0, 10.0, -20.0]
    assert choose_token_answers(examples, logits)[2].text != ""
    with pytest.raises(ValueError, match="logits are 1; must be"):
        choose_token_answers(examples, logits[:1])
    with pytest.raises(ValueError, match="targets is 'both'; must be one of spans, tokens"):
        encode_questions(questions, tokenizer, targets="both", **shape)


def test_an_answer_of_one_token_is_a_start_without_an_end():
    assert token_targets(7, slice(2, 6), 3, 3).tolist() == [-100, -100, 2, 0, 2, 2, -100]
    assert token_targets(7, slice(2, 6), 3, 5).tolist() == [-100, -100, 2, 0, 2, 1, -100]
    assert token_targets(7, slice(2, 6), 0, 0).tolist() == [-100, -100, 2, 2, 2, 2, -100]
    random = np.random.default_rng(1)
    for _ in range(20):
        logits = random.normal(size=(7, 3))
        log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        # What is likelier than no answer, by the likelihoods of all the targets that may be.
        tried = []
        for first in range(2, 6):
            for last in range(first, 6):
                targets = token_targets(7, slice(2, 6), first, last)
                tried.append((sum(log_probs[place, targets[place]] for place in range(2, 6)), first, last))
        none = log_probs[2:6, 2].sum()
        starts, ends = (logits[:, kind] - logits[:, 2] for kind in range(2))
        found = best_spans(starts, ends, np.arange(7) // 2 % 3 > 0, starts, n_best=20, most_tokens=9)
        assert [span[1:] for span in found] == [span[1:] for span in sorted(tried, reverse=True)]
        np.testing.assert_allclose([span[0] + none for span in found], sorted([t[0] for t in tried], reverse=True))


def test_data_of_a_run(file):
    data = data_loader("squad")(train=(file,), validation=(file,), length=48, stride=16, question_length=20)
    batch = data.train_rows.batch(
        np.array([int(data.train_rows.groups[-1][0]), len(data.train_rows)]), len(data.train_rows.groups) - 1
    )
    assert sorted(batch) == ["answer_mask", "ends", "key_mask", "starts", "token_types", "tokens"]
    assert batch["starts"][1] == batch["ends"][1] == -100
    assert not batch["answer_mask"][1].any()
    assert "exact match of 0.2500" in data.baselines
    tokens = load_question_data(
        train=(file,), validation=(file,), length=48, stride=16, question_length=20, targets="tokens"
    )
    assert {kind for ids in tokens.train_rows.per_token["targets"][0] for kind in ids.tolist()} == {0, 1, 2, -100}
    assert tokens.hash != data.hash
    with pytest.raises(ValueError, match="not two different examples"):
        load_question_data(train=(file,))
    with pytest.raises(ValueError, match="length is 20"):
        load_question_data(train=(file,), validation=(file,), length=20, question_length=20)


class _Table(dict):
    """The part of the Hub library's table that is used: columns and their names."""

    column_names = property(list)


def test_the_hub_gives_questions_in_the_columns_of_squad(file, monkeypatch):
    whole = load_questions(file)
    asked = []
    table = _Table(
        id=[question.name for question in whole.questions],
        question=[question.question for question in whole.questions],
        context=[question.context for question in whole.questions],
        answers=[
            {"text": [text for text, _ in question.answers], "answer_start": [start for _, start in question.answers]}
            for question in whole.questions
        ],
    )

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return table

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    path, shape = ("owner/name",), {"length": 60, "stride": 20, "question_length": 20}
    data = load_question_data(name="huggingface_questions", train=path, validation=path, **shape)
    assert data_loader("huggingface_questions") is load_question_data
    assert asked == [("owner/name", None, "train"), ("owner/name", None, "validation")]
    assert data.splits["train"].questions.questions == whole.questions
    assert data.hash == load_question_data(train=(file,), validation=(file,), **shape).hash
    table["answers"][1]["answer_start"] = [3]
    assert hub_questions("owner/name").skipped == 1
    for wrong in ({"text": ["a"]}, {"text": ["a"], "answer_start": []}, 5):
        table["answers"][1] = wrong
        with pytest.raises(ValueError, match="answers are not in the form of SQuAD"):
            hub_questions("owner/name")
    del table["answers"]
    assert not any(question.answers for question in hub_questions("owner/name").questions)
    del table["context"]
    with pytest.raises(ValueError, match="no column 'context'; they have id, question"):
        hub_questions("owner/name")
    with pytest.raises(ValueError, match="name is 'squat'; must be one of squad, huggingface_questions"):
        load_question_data(name="squat", train=(file,))


@pytest.mark.data
def test_all_answers_of_xquad_map_back():
    if not SHARED.is_dir():
        pytest.skip(f"there is no folder {SHARED}")
    questions = load_questions(str(SHARED / "xquad/xquad.en.json"))
    assert len(questions) == 1190
    assert questions.skipped == 0
    contexts = sorted({question.context for question in questions.questions})
    for kind in ("wordpiece", "bytes"):
        tokenizer = load_tokenizer("bytes") if kind == "bytes" else train_tokenizer(kind, contexts, 4000)
        # Windows short enough that contexts have several, and overlapping by more than the longest answer.
        length, stride = (1600, 400) if kind == "bytes" else (200, 40)
        examples = encode_questions(questions, tokenizer, length=length, stride=stride, question_length=50)
        starts, ends = (examples.rows.per_row[name][0] for name in ("starts", "ends"))
        exact = 0
        for question, rows in zip(questions.questions, examples.rows_of):
            text, first = question.answers[0]
            held = [row for row in rows if starts[row]]
            assert held
            for row in held:
                begin, end = examples.characters(row, int(starts[row]), int(ends[row]))
                # All of the answer, and no token more: each end is in a token that the answer has a part of.
                assert begin <= first
                assert end >= first + len(text)
                ours, last = (
                    examples.windows.spans[row][place[row] - examples.windows.place[row]] for place in (starts, ends)
                )
                assert ours[1] > first
                assert last[0] < first + len(text)
            exact += question.context[begin:end] == text
        assert exact / 1190 > (0.999 if kind == "bytes" else 0.97), exact
