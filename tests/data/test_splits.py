import pytest

from jaxformer.data import Documents, limit_bytes, split_documents


def _documents(texts):
    return Documents([f"{index}.txt" for index in range(len(texts))], texts, "a test")


def test_adding_documents_moves_none_across():
    texts = [f"text number {index}" for index in range(300)]
    train, validation = split_documents(_documents(texts[:200]), 0.1)
    more_train, more_validation = split_documents(_documents(texts[::-1]), 0.1)
    assert set(train.texts) <= set(more_train.texts)
    assert set(validation.texts) <= set(more_validation.texts)
    assert 10 <= len(more_validation.texts) <= 60
    assert [*more_train.texts] == [text for text in texts[::-1] if text in set(more_train.texts)]


@pytest.mark.parametrize("fraction", [1e-9, 0.05, 0.5, 0.999999999])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_both_sides_have_a_document_when_there_are_two(fraction, count):
    for seed in range(20):
        train, validation = split_documents(_documents([f"{index}" for index in range(count)]), fraction, seed=seed)
        assert len(train.texts) >= 1
        assert len(validation.texts) >= 1
        assert len(train.texts) + len(validation.texts) == count


def test_equal_documents_are_on_one_side():
    texts = [f"text {index % 10}" for index in range(50)]
    train, validation = split_documents(_documents(texts), 0.3)
    assert not set(train.texts) & set(validation.texts)
    assert len(train.texts) + len(validation.texts) == 50


def test_another_seed_splits_otherwise():
    texts = [f"text number {index}" for index in range(100)]
    sides = {tuple(split_documents(_documents(texts), 0.2, seed=seed)[1].texts) for seed in range(5)}
    assert len(sides) == 5


@pytest.mark.parametrize("copies", [1, 3])
def test_a_single_text_is_cut_at_a_line(copies):
    text = "".join(f"line {index}\n" for index in range(1000))
    train, validation = split_documents(_documents([text] * copies), 0.1)
    for head, tail in zip(train.texts, validation.texts, strict=True):
        assert head + tail == text
        assert head.endswith("\n")
        assert len(tail) == pytest.approx(0.1 * len(text), rel=0.05)


@pytest.mark.parametrize("text", ["ab", "a\n", "\nb", "abcdef" * 50])
def test_a_text_without_fitting_line_is_cut_all_the_same(text):
    for fraction in (0.01, 0.5, 0.99):
        train, validation = split_documents(_documents([text]), fraction)
        assert train.texts[0] + validation.texts[0] == text
        assert train.texts[0]
        assert validation.texts[0]


def test_everything_may_be_validation():
    train, validation = split_documents(_documents(["a"]), 1.0)
    assert [*train.texts] == []
    assert [*validation.texts] == ["a"]


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1])
def test_fractions_out_of_range_are_refused(fraction):
    with pytest.raises(ValueError, match="validation_fraction is"):
        split_documents(_documents(["a", "b"]), fraction)


def test_one_character_cannot_be_split():
    with pytest.raises(ValueError, match=r"'0\.txt' has 1 character"):
        split_documents(_documents(["a"]), 0.5)


@pytest.mark.parametrize("most", [1, 5, 17, 50, 1000])
def test_the_cap_counts_bytes_and_keeps_characters_whole(most):
    documents = _documents(["ä" * 10, "🙂" * 3, "plain text", "more"])
    limited = limit_bytes(documents, most)
    assert limited.num_bytes <= most
    assert limited.num_bytes >= min(most, documents.num_bytes) - 3
    for name, text in zip(limited.names, limited.texts):
        assert documents.texts[documents.names.index(name)].startswith(text)


def test_no_cap_keeps_all_and_zero_is_refused():
    documents = _documents(["one", "two"])
    assert limit_bytes(documents, None) is documents
    with pytest.raises(ValueError, match="validation_bytes is 0"):
        limit_bytes(documents, 0)
