import json

import numpy as np
import pytest

from jaxformer.data import data_loader, eval_batches, load_tokenizer, train_batches
from jaxformer.data.pretraining import load_masked_language_data, load_span_corruption_data
from jaxformer.data.vocabulary import mask_id, ordinary_ids, sentinel_ids, special_ids

WORDS = ["the", "of", "a", "model", "reads", "walking", "sentences", "and", "unwalkable", "masks", "often", "talking"]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    random = np.random.default_rng(0)
    lines = []
    for _ in range(40):
        sentences = [" ".join(random.choice(WORDS, random.integers(2, 9))).capitalize() + "." for _ in range(9)]
        lines.append(json.dumps({"text": " ".join(sentences)}))
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture(scope="module")
def masked(file):
    return load_masked_language_data(
        name="masked:jsonl", path=file, tokenizer_size=120, length=32, validation_fraction=0.2, lowercase=True
    )


def test_masked_rows_of_pairs_have_what_a_bert_reads(masked):
    assert data_loader("masked:jsonl") is load_masked_language_data
    tokenizer = masked.tokenizer
    batch = next(train_batches(masked.train_rows, batch_size=64, seed=1))
    assert sorted(batch) == ["key_mask", "next_sentence", "targets", "token_types", "tokens"]
    chosen = batch["targets"] != -100
    assert not np.isin(batch["targets"][chosen], special_ids(tokenizer)).any()
    assert not chosen[~batch["key_mask"]].any()
    whole = np.where(chosen, batch["targets"], batch["tokens"])
    assert not (whole == mask_id(tokenizer)).any()
    assert (whole[:, 0] == tokenizer.bos_id).all()
    assert ((whole == tokenizer.eos_id).sum(axis=1) == 2).all()
    np.testing.assert_array_equal(whole == tokenizer.pad_id, ~batch["key_mask"])
    real = np.isin(whole, ordinary_ids(tokenizer))
    assert abs(chosen.sum() / real.sum() - 0.15) < 4 * np.sqrt(0.15 * 0.85 / real.sum())
    assert set(batch["next_sentence"].tolist()) == {0, 1}


def test_a_batch_is_filled_up_with_rows_that_have_neither_targets_nor_label(masked):
    rows = masked.validation_rows
    batch = rows.batch(np.array([0, len(rows)]))
    assert not batch["key_mask"][1].any()
    assert (batch["targets"][1] == -100).all()
    assert batch["next_sentence"][1] == -100
    assert batch["next_sentence"][0] >= 0


def _epochs(rows, count=3):
    """The rows of some epochs, each sorted."""
    batches = train_batches(rows, batch_size=len(rows), seed=2)
    return [sorted(np.hstack([b["tokens"], b["targets"]]).tolist()) for b in (next(batches) for _ in range(count))]


def test_dynamic_masks_are_drawn_in_every_epoch_and_static_once(file):
    arguments = {"name": "masked:jsonl", "path": file, "tokenizer": "bytes", "length": 64, "validation_fraction": 0.2}
    for sentences in ("pairs", "full"):
        dynamic, static = (
            load_masked_language_data(**arguments, sentences=sentences, masking=masking)
            for masking in ("dynamic", "static")
        )
        first, second, third = _epochs(dynamic.train_rows)
        assert not {tuple(row) for row in first} & {tuple(row) for row in second}
        assert second != third
        one, two, three = _epochs(static.train_rows)
        assert one == two == three
        # The first epoch of both is the same.
        assert one == first
        assert dynamic.hash != static.hash


def test_training_goes_on_exactly_and_validation_never_changes(masked):
    straight = train_batches(masked.train_rows, batch_size=7, seed=4)
    expected = [next(straight) for _ in range(40)][30:]
    going = train_batches(masked.train_rows, batch_size=7, seed=4)
    for _ in range(30):
        next(going)
    again = train_batches(masked.train_rows, batch_size=7, seed=4)
    again.set_state(json.loads(json.dumps(going.get_state())))
    for batch in expected:
        found = next(again)
        for name, array in batch.items():
            np.testing.assert_array_equal(found[name], array)
    one, two = (list(eval_batches(masked.validation_rows, batch_size=5)) for _ in range(2))
    for first, second in zip(one, two, strict=True):
        for name, array in first.items():
            np.testing.assert_array_equal(second[name], array)


def test_full_and_isolated_rows(file):
    arguments = {"name": "masked:jsonl", "path": file, "tokenizer": "bpe", "tokenizer_size": 320, "length": 48}
    full = load_masked_language_data(**arguments, sentences="full", whole_words=True)
    batch = next(train_batches(full.train_rows, batch_size=4, seed=0))
    assert sorted(batch) == ["key_mask", "targets", "tokens"]
    isolated = load_masked_language_data(**arguments, sentences="isolated")
    batch = next(train_batches(isolated.train_rows, batch_size=4, seed=0))
    assert sorted(batch) == ["positions", "segments", "targets", "tokens"]
    whole = np.where(batch["targets"] == -100, batch["tokens"], batch["targets"])
    np.testing.assert_array_equal(whole == isolated.tokenizer.pad_id, batch["segments"] == 0)
    np.testing.assert_array_equal(
        (batch["positions"] == 0) & (batch["segments"] > 0), whole == isolated.tokenizer.bos_id
    )
    assert isolated.tokenizer.backend.token_to_id("[MASK]") == isolated.tokenizer.vocab_size - 1


def test_the_unigram_predictor_by_hand(masked):
    rows, size = masked.train_rows, masked.tokenizer.vocab_size
    counts = np.ones(size)
    for token in rows.texts.sentences.tokens:
        counts[token] += rows.maskable[token]
    targets = np.concatenate([b["targets"].ravel() for b in eval_batches(masked.validation_rows, batch_size=3)])
    targets = targets[targets >= 0]
    loss, accuracy = masked.unigram
    assert loss == pytest.approx(-np.log(counts / counts.sum())[targets].mean())
    assert accuracy == pytest.approx(np.mean(targets == counts.argmax()))
    assert f"{loss:.4f}" in masked.baselines
    assert "wordpiece" in masked.summary


def test_span_rows_rebuild_the_text(file):
    data = data_loader("spans:jsonl")(name="spans:jsonl", path=file, tokenizer="bytes", length=40)
    tokenizer = data.tokenizer
    assert tokenizer.vocab_size == 359
    sentinels = sentinel_ids(tokenizer).tolist()
    assert sentinels == list(range(358, 258, -1))
    assert data.start_id == tokenizer.pad_id
    text = []
    for batch in eval_batches(data.validation_rows, batch_size=4):
        assert sorted(batch) == ["key_mask", "source", "source_mask", "targets", "tokens"]
        for source, target in zip(batch["source"], batch["targets"]):
            pieces = {}
            for token in target[(target >= 0) & (target != tokenizer.eos_id)].tolist():
                if token in sentinels:
                    pieces[token] = []
                    last = pieces[token]
                else:
                    last.append(token)
            for token in source.tolist():
                if token not in (tokenizer.eos_id, tokenizer.pad_id):
                    text += pieces.get(token, [token])
    assert tokenizer.decode(text) == "".join(data.validation_documents.texts)
    assert data.max_length == 40
    assert np.isfinite(data.unigram).all()


def test_a_prefix_and_its_rest_are_a_piece(file):
    data = load_span_corruption_data(
        name="jsonl", path=file, tokenizer="unigram", tokenizer_size=420, length=24, objective="prefix"
    )
    batch = data.train_rows.batch(np.arange(3))
    assert batch["source"].shape == batch["targets"].shape == (3, 24)
    end = data.tokenizer.eos_id
    for row in range(3):
        source = batch["source"][row][batch["source_mask"][row]].tolist()
        target = batch["targets"][row][batch["key_mask"][row]].tolist()
        assert source.pop() == end == target.pop()
        assert source + target == data.train_rows.tokens[row * 24 : row * 24 + 24].tolist()


@pytest.mark.parametrize(
    ("load", "arguments", "message"),
    [
        (load_masked_language_data, {"sentences": "three"}, "sentences is 'three'; must be one of pairs"),
        (load_masked_language_data, {"masking": "some"}, "masking is 'some'"),
        (load_masked_language_data, {"length": 7}, "length is 7"),
        (load_masked_language_data, {"validation_fraction": 1.0}, "validation_fraction is 1"),
        (load_masked_language_data, {"tokenizer": "bytes", "whole_words": True, "mask_fraction": 2.0}, "fraction is 2"),
        (load_span_corruption_data, {"objective": "masks"}, "objective is 'masks'"),
        (load_span_corruption_data, {"length": 999, "density": 0.5, "mean_span": 1.0}, "has 499 spans, but"),
    ],
)
def test_arguments_that_cannot_be_are_refused(file, load, arguments, message):
    with pytest.raises(ValueError, match=message):
        load(**{"name": "jsonl", "path": file, "tokenizer": "bytes", **arguments})


def test_a_run_reads_its_own_copy_of_a_trained_tokenizer(masked, file, tmp_path):
    masked.tokenizer.save(tmp_path)
    again = load_masked_language_data(
        name="masked:jsonl", path=file, tokenizer=str(tmp_path), length=32, validation_fraction=0.2, lowercase=True
    )
    assert again.hash == masked.hash
    assert load_tokenizer(tmp_path).vocab_size == masked.tokenizer.vocab_size
