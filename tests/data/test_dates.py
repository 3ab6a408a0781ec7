import datetime
import re
import sys

import numpy as np
import pytest

from jaxformer.data import CharacterTokenizer, load_pair_data, load_tokenizer
from jaxformer.data.dates import LENGTHS, LOCALES, _parse_locale, date_pairs, unambiguous, usable_formats

SMALL = {"train_examples": 400, "validation_examples": 60, "test_examples": 90}


@pytest.fixture(scope="module")
def made():
    return date_pairs(**SMALL)


@pytest.mark.parametrize(
    ("locale", "lengths", "days"),
    [
        ("de", ("medium", "long", "full"), {122: ("02.05.1996", "2. Mai 1996", "Donnerstag, 2. Mai 1996")}),
        ("en_GB", ("short", "medium", "long", "full"), {0: ("01/01/1996", "1 Jan 1996", "1 January 1996")}),
        ("ja", ("short", "long", "full"), {365: ("1996/12/31", "1996年12月31日", "1996年12月31日火曜日")}),
        ("ru", ("short", "long", "full"), {59: ("29.02.1996",)}),
    ],
)
def test_formats_with_a_four_digit_year_are_used_each_once(locale, lengths, days):
    found = usable_formats(_parse_locale(locale))
    assert set(lengths) <= set(found) <= set(LENGTHS)
    for day, texts in days.items():
        assert tuple(found[length][day] for length in lengths)[: len(texts)] == texts


def _readings(locale, years):
    """By text, the dates that the locale's usable formats write so: every date of the years tried."""
    from babel.dates import format_date

    usable = usable_formats(locale)
    readings = {}
    for year in years:
        day = datetime.date(year, 1, 1)
        while day.year == year:
            for length in usable:
                readings.setdefault(format_date(day, format=length, locale=locale), set()).add(day)
            day += datetime.timedelta(1)
    return readings


@pytest.mark.parametrize(
    "years", [(2019,), pytest.param(tuple(range(1900, 2100)), marks=pytest.mark.slow)], ids=["a year", "all years"]
)
def test_no_text_of_a_locale_stands_for_two_dates(years):
    for name in LOCALES:
        readings = _readings(_parse_locale(name), years)
        assert {len(days) for days in readings.values()} == {1}, name
        for text, (day,) in readings.items():
            assert re.findall("[0-9]{4,}", text) == [str(day.year)]


def test_formats_that_have_two_readings_are_left_out():
    formats = {
        "day first": ["1/2/1996", "2/1/1996", "3/4/1996"],
        "month first": ["2/1/1996", "1/2/1996", "4/3/1996"],
        "named": ["1 Feb 1996", "2 Jan 1996", "3 Apr 1996"],
        "two days alike": ["a", "b", "a"],
    }
    assert list(unambiguous(formats)) == ["named"]
    del formats["month first"]
    assert list(unambiguous(formats)) == ["day first", "named"]
    # The same text for the same day is one reading.
    assert len(unambiguous({"short": ["1", "2"], "long": ["1", "2"]})) == 2


def test_a_locale_of_two_digit_years_is_refused(monkeypatch):
    import babel.dates

    monkeypatch.setattr(babel.dates, "format_date", lambda day, format, locale: f"{day.day}/{day.month}/96")
    with pytest.raises(ValueError, match="locales holds 'de': none of its formats tells a date"):
        usable_formats(_parse_locale("de"))


def test_each_source_is_its_target_in_a_format_of_its_locale(made):
    from babel.dates import format_date

    seen = set()
    for pairs in made.splits.values():
        for source, target, label in zip(pairs.sources, pairs.targets, pairs.labels):
            tag, _, text = source.partition(" ")
            day = datetime.date.fromisoformat(target)
            written = {length: format_date(day, format=length, locale=label) for length in LENGTHS}
            assert tag == f"<{label}>"
            assert text in written.values()
            assert f"{day.year:04}" in text
            seen.update((label, length) for length in LENGTHS if written[length] == text)
    assert {label for label, _ in seen} == set(LOCALES)
    assert {(name, length) for name in LOCALES for length in usable_formats(_parse_locale(name))} <= seen


@pytest.mark.parametrize("years", [(1900, 2099), (2000, 2001)])
def test_splits_share_no_date(years):
    splits = date_pairs(**{**SMALL, "train_examples": 800}, years=years).splits
    days = {split: set(pairs.targets) for split, pairs in splits.items()}
    assert [len(splits[split]) for split in ("train", "validation", "test")] == [800, 60, 90]
    assert len(days["validation"]) == 60
    assert len(days["test"]) == 90
    assert not days["train"] & days["validation"]
    assert not days["train"] & days["test"]
    assert not days["validation"] & days["test"]
    # Of 731 dates training has 581, and meets some of them again, in another locale.
    assert len(days["train"]) == (800 if years == (1900, 2099) else 581)
    assert {day[:4] for each in days.values() for day in each} <= set(map(str, range(years[0], years[1] + 1)))


def test_locales_are_equally_many_in_each_split(made):
    for pairs in made.splits.values():
        counts = [list(pairs.labels).count(name) for name in LOCALES]
        assert max(counts) - min(counts) <= 1


def test_a_seed_decides_all_that_is_drawn(made):
    again, other = date_pairs(**SMALL), date_pairs(**SMALL, split_seed=1)
    for split, pairs in made.splits.items():
        assert again.splits[split] == pairs
        assert other.splits[split].targets != pairs.targets
    assert again.tokenizer == other.tokenizer
    # Stated as text: a run resumed after an upgrade must go on with the same pairs.
    assert list(made.splits["test"].targets[:3]) == ["2081-05-03", "1965-05-17", "1983-07-23"]


def test_the_tokenizer_knows_all_that_any_seed_can_draw(made):
    for pairs in date_pairs(**SMALL, split_seed=1).splits.values():
        for text in (*pairs.sources, *pairs.targets):
            ids = made.tokenizer.encode(text)
            assert made.tokenizer.unknown_id not in ids
            assert made.tokenizer.decode(ids) == text


def test_dates_as_data_are_labelled_by_locale():
    data = load_pair_data(name="dates", locales=("de", "ja"), years=(1999, 2003), **SMALL)
    assert data.tokenizer is data.source_tokenizer
    assert data.start_id == data.tokenizer.bos_id
    assert set(data.splits["test"].labels) == {"de", "ja"}
    assert [len(data.splits[split]) for split in ("validation", "test")] == [60, 90]
    first = data.splits["test"]
    assert data.tokenizer.decode(first.sources[0]) == first.source_texts[0]
    assert first.sources[0][-1] == data.tokenizer.eos_id
    with pytest.raises(ValueError, match="pairs 'dates' bring their own tokenizer; tokenizer is 'bytes', must be None"):
        load_pair_data(name="dates", locales=("de",), tokenizer="bytes", **SMALL)
    same = load_pair_data(name="dates", locales=("de", "ja"), years=(1999, 2003), tokenizer=data.tokenizer, **SMALL)
    assert same.hash == data.hash


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"locales": ("de", "klingon")}, "locales holds 'klingon', which Babel does not know"),
        ({"locales": ("de", "xx")}, "locales holds 'xx', which Babel does not know"),
        ({"years": (999, 2000)}, r"years is \(999, 2000\)"),
        ({"years": (2001, 2000)}, r"years is \(2001, 2000\)"),
        ({"years": (2001, 2001), "test_examples": 400}, "are 460 together, must be below the 365 dates"),
        ({"train_examples": 0}, "train_examples is 0"),
        ({"split_seed": -1}, "split_seed is -1"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_the_reason(arguments, message):
    with pytest.raises(ValueError, match=message):
        date_pairs(**{**SMALL, **arguments})


def test_dates_without_babel_say_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "babel", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxformer\[translation\]'"):
        date_pairs(**SMALL)


@pytest.fixture
def characters():
    return CharacterTokenizer(tuple("<> .abé月\u202f"), ("<de>", "<en_GB>"))


@pytest.mark.parametrize(
    ("text", "ids", "back"),
    [
        ("<de> ab", [4, 8, 10, 11], None),
        ("<en_GB>月é\u202f.", [5, 13, 12, 14, 9], None),
        ("<fr>a", [6, 3, 3, 7, 10], "<\ufffd\ufffd>a"),
        ("a<de>", [10, 6, 3, 3, 7], "a<\ufffd\ufffd>"),
        ("zx<pad>", [3, 3, 6, 3, 10, 3, 7], "\ufffd\ufffd<\ufffda\ufffd>"),
        ("", [], None),
        ("<", [6], None),
    ],
)
def test_characters_and_a_tag_before_them_are_tokens(characters, text, ids, back):
    assert characters.encode(text) == ids
    assert characters.encode_batch([text])[0].tolist() == ids
    assert characters.decode([1, *ids, 2, 0, 0]) == (text if back is None else back)
    assert characters.vocab_size == 15


def test_a_tokenizer_of_characters_is_saved_and_loaded(characters, tmp_path):
    characters.save(tmp_path)
    assert load_tokenizer(tmp_path) == characters
    assert "15" in characters.summary
    assert "<de>" in characters.summary
    with pytest.raises(ValueError, match="token id 15 is outside"):
        characters.decode(np.array([15]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((("a", "bc"),), "must be different single characters"),
        ((("a", "a"),), "must be different single characters"),
        ((("a",), ("de",)), "tags is"),
        ((("a",), ("<de>", "<de>")), "tags is"),
        ((("a",), ("<unk>",)), "tags is"),
        ((("a",), ("<a>b>",)), "tags is"),
    ],
)
def test_characters_and_tags_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        CharacterTokenizer(*arguments)
