"""Dates as people of many places write them, and the same dates in ISO 8601: pairs that need no download.

How a locale writes a date comes from the Unicode CLDR, through Babel (extra ``translation``).
"""

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxformer.data.character_tokenizer import CharacterTokenizer
from jaxformer.data.pairs import MadePairs, Pairs
from jaxformer.data.pipeline import permutation

if TYPE_CHECKING:
    from babel import Locale
else:
    # Named only for readers: Babel is loaded when dates are made.
    Locale = Any

LOCALES = (
    *("de", "en", "en_GB", "es", "fr", "it", "nl", "pt", "pl", "sv", "fi", "cs", "tr"),
    *("el", "ru", "hi", "ja", "ko", "zh"),
)
"""Locales by default: five scripts and more, and both orders of day and month."""

LENGTHS = ("short", "medium", "long", "full")
"""The formats that the CLDR has for each locale."""

# A leap year with every weekday, whose last digits are no day and no month.
_PROBE = 1996


def date_pairs(
    *,
    train_examples: int = 30_000,
    validation_examples: int = 1000,
    test_examples: int = 2000,
    locales: Sequence[str] = (),
    years: tuple[int, int] = (1900, 2099),
    split_seed: int = 0,
) -> MadePairs:
    """Dates in many locales' formats as sources, in ISO 8601 as targets: "<de> 3. Mai 2021" and "2021-05-03".

    Every split has dates of its own, each once, but that training goes round its dates where there are fewer than
    examples. A split has each locale as often as any other, up to one; the format is drawn. Formats are those of
    ``usable_formats``.

    Args:
        train_examples: training pairs.
        validation_examples: validation pairs.
        test_examples: test pairs.
        locales: names that Babel knows, as "pt" or "en_GB"; none = ``LOCALES``.
        years: first and last year of the dates, 1000 to 9999.
        split_seed: of all that is drawn, at least 0.

    Returns:
        Pairs of "train", "validation" and "test", labelled with their locales, and the tokenizer of both sides: the
        characters that the locales' dates can hold, and a tag for each locale.

    Raises:
        ValueError: a number out of range, too few dates, a locale that Babel does not know, or Babel is missing.
    """
    counts = {"validation": validation_examples, "test": test_examples, "train": train_examples}
    if split_seed < 0:
        raise ValueError(f"split_seed is {split_seed}, must be at least 0.")
    days = _days(years, counts)
    chosen = {str(locale): locale for locale in map(_parse_locale, locales or LOCALES)}
    formats = {name: usable_formats(locale) for name, locale in chosen.items()}
    order, start, splits = permutation(len(days), split_seed, 1), 0, {}
    for stream, (split, count) in enumerate(counts.items()):
        own = order[start : start + count]
        start += len(own)
        drawn = np.random.Philox(np.random.SeedSequence([split_seed, 2 + stream])).random_raw(count)
        splits[split] = _draw(split, [days[index] for index in own.tolist()], drawn.tolist(), chosen, formats)
    return MadePairs(splits, _tokenizer(formats))


def usable_formats(locale: Locale) -> dict[str, list[str]]:
    """A locale's formats that tell the date, and what they write for each day of one leap year.

    Of the CLDR's short, medium, long and full format those are left out that do not write the year with four digits,
    those equal to a shorter one, and those of which a text is also how the locale writes another date (see
    ``unambiguous``). A text that holds its year with four digits, and no other four, can be read as dates of that year
    alone, so a year of each kind of day shows all that there is.

    Args:
        locale: one of Babel's.

    Returns:
        By the name of the format, the text of each day from 1 January to 31 December.

    Raises:
        ValueError: none is left.
    """
    from babel.dates import format_date

    days = [datetime.date(_PROBE, 1, 1) + datetime.timedelta(number) for number in range(366)]
    patterns = {locale.date_formats[length].pattern: length for length in reversed(LENGTHS)}
    written = {
        length: [format_date(day, format=length, locale=locale) for day in days]
        for length in LENGTHS
        if length in patterns.values()
    }
    found = unambiguous(
        {
            length: texts
            for length, texts in written.items()
            if all(re.findall("[0-9]{4,}", text) == [str(_PROBE)] for text in texts)
        }
    )
    if not found:
        raise ValueError(f"locales holds {str(locale)!r}: none of its formats tells a date with a four-digit year.")
    return found


def unambiguous(written: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The formats none of whose texts stands for two days, in that format or in another one.

    Args:
        written: by format, the text of each of the same days.

    Returns:
        The formats that are left, with their texts.
    """
    readings: dict[str, set[int]] = {}
    for texts in written.values():
        for day, text in enumerate(texts):
            readings.setdefault(text, set()).add(day)
    return {name: texts for name, texts in written.items() if all(len(readings[text]) == 1 for text in texts)}


def _draw(
    split: str,
    days: list[datetime.date],
    drawn: list[int],
    locales: Mapping[str, Locale],
    formats: Mapping[str, dict[str, list[str]]],
) -> Pairs:
    """A pair for each number drawn, which chooses the format; days and locales go round."""
    from babel.dates import format_date

    names = list(locales)
    sources, targets, labels = [], [], []
    for index, number in enumerate(drawn):
        rounds, place = divmod(index, len(days))
        # Not the same locale for a day in every round.
        label = names[(index + rounds) % len(names)]
        usable = list(formats[label])
        text = format_date(days[place], format=usable[number % len(usable)], locale=locales[label])
        sources.append(f"<{label}> {text}")
        targets.append(days[place].isoformat())
        labels.append(label)
    source = f"dates of {days and min(days)} to {days and max(days)} in {len(names)} locales"
    return Pairs([f"{split}:{index}" for index in range(len(drawn))], sources, targets, source, labels)


def _tokenizer(formats: Mapping[str, dict[str, list[str]]]) -> CharacterTokenizer:
    """All that the locales' formats write, and all of ISO 8601, whatever was drawn."""
    characters = set(" 0123456789-")
    for written in formats.values():
        for texts in written.values():
            characters.update(*texts)
    return CharacterTokenizer(tuple(sorted(characters)), tuple(f"<{name}>" for name in formats))


def _days(years: tuple[int, int], counts: Mapping[str, int]) -> list[datetime.date]:
    """All dates of the years. Raises ValueError if they are too few, or a number is out of range."""
    if len(years) != 2 or not 1000 <= years[0] <= years[1] <= 9999:
        raise ValueError(f"years is {years!r}; must be the first and the last one, from 1000 to 9999.")
    for split, count in counts.items():
        if count < 1:
            raise ValueError(f"{split}_examples is {count}, must be at least 1.")
    first, last = datetime.date(years[0], 1, 1), datetime.date(years[1], 12, 31)
    days = [first + datetime.timedelta(number) for number in range((last - first).days + 1)]
    held_out = counts["validation"] + counts["test"]
    if held_out >= len(days):
        raise ValueError(
            f"validation_examples and test_examples are {held_out} together, must be below the {len(days)} dates of "
            f"the years {years[0]} to {years[1]}, of which training needs others."
        )
    return days


def _parse_locale(name: str) -> Locale:
    try:
        from babel import Locale, UnknownLocaleError
    except ImportError as error:
        raise ValueError("pairs 'dates' need Babel: pip install 'jaxformer[translation]'.") from error
    try:
        return Locale.parse(name.replace("-", "_"))
    except (ValueError, UnknownLocaleError) as error:
        raise ValueError(f"locales holds {name!r}, which Babel does not know: {error}.") from error
