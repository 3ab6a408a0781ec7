import math
import time

import numpy as np
import pytest

from jaxformer.data import ByteTokenizer, load_language_model_data, load_tokenizer, train_tokenizer

TEXTS = [f"Document {index} says: {'ja ' * (index % 7)}{'é' * (index % 3)}\n" for index in range(60)]


@pytest.fixture
def folder(tmp_path):
    for index, text in enumerate(TEXTS):
        (tmp_path / f"{index:02}.txt").write_text(text)
    return str(tmp_path)


def _documents(rows):
    """Whole documents put together again from rows, by their positions."""
    batch = rows.batch(np.arange(len(rows)))
    scored = batch["targets"].reshape(-1) != -100
    tokens, targets = batch["tokens"].reshape(-1)[scored], batch["targets"].reshape(-1)[scored]
    starts = np.flatnonzero(tokens == ByteTokenizer.bos_id)
    for start, end in zip(starts, [*starts[1:], len(tokens)]):
        assert targets[end - 1] == ByteTokenizer.eos_id
        assert (tokens[start + 1 : end] == targets[start : end - 1]).all()
        yield ByteTokenizer().decode(targets[start:end])


@pytest.mark.parametrize("packing", ["packed", "contiguous"])
def test_rows_hold_the_documents_of_each_side_from_start_to_end(folder, packing):
    data = load_language_model_data(name="text", path=folder, length=11, packing=packing, validation_fraction=0.3)
    train, validation = list(_documents(data.train_rows)), list(_documents(data.validation_rows))
    assert sorted(train + validation) == sorted(TEXTS)
    assert train == list(data.train_documents.texts)
    assert data.validation_bytes == sum(len(text.encode()) for text in validation)
    batch = data.train_rows.batch(np.arange(3))
    assert ("segments" in batch) == ("positions" in batch) == (packing == "packed")


def test_a_separator_that_is_start_and_end_stands_once_between_documents(folder, tmp_path):
    tokenizer = train_tokenizer("bpe", TEXTS, 300)
    tokenizer.save(tmp_path / "one")
    config = tmp_path / "one" / "tokenizer_config.json"
    config.write_text('{"bos_token": "<eos>", "eos_token": "<eos>"}')
    data = load_language_model_data(
        name="text", path=folder, tokenizer=str(tmp_path / "one"), length=7, packing="contiguous"
    )
    batch = data.train_rows.batch(np.arange(len(data.train_rows)))
    tokens = batch["tokens"][batch["targets"] != -100]
    (places,) = np.nonzero(tokens == load_tokenizer(tmp_path / "one").eos_id)
    assert len(places) == len(data.train_documents.texts)
    assert (np.diff(places) > 1).all()


def test_the_cap_shortens_validation_and_leaves_training_as_it_is(folder):
    whole = load_language_model_data(name="text", path=folder, validation_fraction=0.3)
    capped = load_language_model_data(name="text", path=folder, validation_fraction=0.3, validation_bytes=100)
    assert capped.validation_bytes in range(97, 101)
    assert capped.train_documents.hash == whole.train_documents.hash
    assert whole.validation_bytes > 200


def test_a_cap_on_training_leaves_validation_as_it_is(folder):
    whole = load_language_model_data(name="text", path=folder, validation_fraction=0.3)
    capped = load_language_model_data(name="text", path=folder, validation_fraction=0.3, training_bytes=100)
    assert sum(len(text.encode()) for text in capped.train_documents.texts) in range(97, 101)
    assert capped.validation_documents.hash == whole.validation_documents.hash
    assert capped.train_documents.hash != whole.train_documents.hash


def test_the_hash_follows_everything_that_training_reads(folder):
    arguments = {"name": "text", "path": folder, "length": 11}
    changes = [{}, {"length": 12}, {"packing": "contiguous"}, {"split_seed": 1}, {"validation_fraction": 0.5}]
    hashes = {load_language_model_data(**{**arguments, **change}).hash for change in changes}
    assert len(hashes) == len(changes)
    assert load_language_model_data(**arguments).hash == load_language_model_data(**arguments).hash


def test_baselines_are_of_the_validation_text(folder):
    data = load_language_model_data(name="text", path=folder, length=11, validation_fraction=0.3)
    tokens = sum(len(text.encode()) + 1 for text in data.validation_documents.texts)
    expected = data.unigram_loss * tokens / math.log(2) / data.validation_bytes
    assert data.unigram_bits_per_byte == pytest.approx(expected, rel=1e-9)
    assert 2.0 < data.unigram_loss < math.log(259)
    assert 0.5 < data.lzma_bits_per_byte < 8.0


def test_everything_may_be_evaluated(folder):
    data = load_language_model_data(name="text", path=folder, validation_fraction=1.0)
    assert len(data.train_rows) == 0
    assert data.validation_bytes == sum(len(text.encode()) for text in TEXTS)
    assert data.unigram_loss == pytest.approx(math.log(259))
    assert len(data.hash) == 16


def test_a_model_of_fewer_ids_refuses_the_text_by_document(folder):
    with pytest.raises(ValueError, match=r"dataset 'text', document '\d\d\.txt': token id 256 at position 0 .* of 200"):
        load_language_model_data(name="text", path=folder, vocab_size=200)


def test_text_that_is_no_unicode_is_refused_by_document(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": "bad \\ud800"}\n{"text": "also good"}\n')
    with pytest.raises(ValueError, match=r"dataset 'jsonl', document 'a\.jsonl:2': text holds the lone surrogate"):
        load_language_model_data(name="jsonl", path=str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packing": "loose"}, "packing is 'loose'; must be one of packed, contiguous"),
        ({"length": 0}, "length is 0"),
        ({"validation_fraction": 0.0}, "validation_fraction is 0"),
        ({"validation_bytes": 0}, "validation_bytes is 0"),
        ({"training_bytes": 0}, "training_bytes is 0"),
        ({"tokenizer": "nowhere.json"}, "tokenizer 'nowhere.json' is not"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(folder, change, message):
    with pytest.raises(ValueError, match=message):
        load_language_model_data(**{"name": "text", "path": folder, **change})


def test_the_default_loads_fast_and_says_what_it_is():
    start = time.process_time()
    data = load_language_model_data(validation_bytes=100_000)
    assert time.process_time() - start < 4.0
    assert "standard library of Python" in data.summary
    assert f"{len(data.train_rows):,} rows of 256" in data.summary
    assert data.train_rows.fill > 0.9999
    assert len(data.validation_documents.texts) > 1
