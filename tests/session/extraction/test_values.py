"""Values in texts: spellings by language, what others format read back, places, and texts made to be slow."""

import datetime
import random
import time
from decimal import Decimal

import pytest
from babel.dates import format_date, format_datetime
from babel.numbers import format_currency, format_decimal
from hypothesis import given, settings, strategies as st
from num2words import num2words
from tests.machine import slowness

from pippin.core.errors import InvalidArgument
from pippin.session.extraction.values import find_dates, find_datetimes, find_durations, find_numbers, find_times
from pippin.session.extraction.values_dates import LANGUAGES

FINDERS = [find_dates, find_times, find_datetimes, find_numbers, find_durations]


def read(finder, text, **given):
    return [(text[each.start : each.end], each.value) for each in finder(text, **given)]


def values(finder, text, **given):
    return [each.value for each in finder(text, **given)]


# --- dates ------------------------------------------------------------------------------------------------------------

MARCH_12 = {
    "en": "12 March 2024|March 12, 2024|March 12th, 2024|the 12th of March, 2024|Tue, 12 Mar 2024|Mar. 12 2024|"
    "12-Mar-24|12 March '24|Tuesday, March 12, 2024|2024 March 12",
    "de": "12. März 2024|Dienstag, 12. März 2024|12.3.2024|12.03.24|12. 3. 2024|den 12. Mrz. 2024|12. Maerz 2024",
    "fr": "12 mars 2024|mardi 12 mars 2024|12/03/2024|le 12/3/24",
    "es": "12 de marzo de 2024|12 de marzo del 2024|martes, 12 mar. 2024|12/3/2024|12-03-2024",
    "it": "12 marzo 2024|martedì 12 marzo 2024|12/03/2024|12 mar 2024",
    "pt": "12 de março de 2024|12/03/2024|12 de mar. de 2024|12 de marco de 2024",
    "nl": "12 maart 2024|dinsdag 12 mrt. 2024|12-03-2024",
    "pl": "12 marca 2024|12 marca 2024 r.|12.03.2024|12 mar 2024|12 III 2024",
    "cs": "12. března 2024|12. 3. 2024",
    "hu": "2024. március 12.|2024. 03. 12.",
    "ru": "12 марта 2024 г.|12.03.2024",
    "fi": "12. maaliskuuta 2024|12.3.2024",
    "sv": "12 mars 2024|den 12 mars 2024|2024-03-12",
    "tr": "12 Mart 2024",
    "vi": "ngày 12 tháng 3 năm 2024|12 tháng 3, 2024",
    "zh": "2024年3月12日|2024 年 3 月 12 日|2024/3/12",
    "ja": "2024年3月12日|令和6年3月12日|2024/03/12",
    "ko": "2024년 3월 12일|2024. 3. 12.",
    "ar": "١٢ مارس ٢٠٢٤",
}


@pytest.mark.parametrize(("language", "spellings"), MARCH_12.items())
def test_a_date_is_read_in_the_spellings_of_its_language(language, spellings):
    for spelling in spellings.split("|"):
        for text in (spelling, f"({spelling})", f"abc {spelling}, xyz"):
            assert values(find_dates, text, language=language) == ["2024-03-12"], text


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("due on 2024-03-12T14:30:00Z at last", "2024-03-12"),
        ("report-20240312.pdf", None),
        ("as of 20240312.", "20240312"),
        ("week 2024-W11-2", "2024-W11-2"),
        ("Tue, 12 Mar 2024", "12 Mar 2024"),
        ("14:30 March 12, 2024", "March 12, 2024"),
        ("from 12.03.2024-31.03.2024", "12.03.2024"),
        ("paragraph 12. 03. 2024.", "12. 03. 2024"),
    ],
)
def test_the_span_is_the_date_alone(text, span):
    assert [part for part, _ in read(find_dates, text)][:1] == ([span] if span else [])


@pytest.mark.parametrize("language", LANGUAGES)
def test_dates_that_babel_formats_are_read_back(language):
    for width in ("short", "medium", "long", "full"):
        for month in range(1, 13):
            for day in (1, 5, 14, 28):
                date = datetime.date(2024, month, day)
                text = format_date(date, width, locale=language)
                assert values(find_dates, text, language=language) == [date.isoformat()], text


def test_without_a_language_only_few_names_of_months_are_misread():
    failed = []
    for language in ("en", "de", "fr", "es", "it", "pt", "nl", "pl", "sv", "cs", "ru", "tr"):
        for month in range(1, 13):
            date = datetime.date(2024, month, 14)
            found = find_dates(format_date(date, "long", locale=language))
            if [each.value for each in found] != [date.isoformat()]:
                failed.append((language, month))
    assert failed == []


@pytest.mark.parametrize(
    ("text", "given", "value", "ambiguous"),
    [
        ("03/04/2024", {}, "2024-04-03", True),
        ("03/04/2024", {"region": "US"}, "2024-03-04", False),
        ("03/04/2024", {"region": "GB"}, "2024-04-03", False),
        ("03/04/2024", {"language": "en"}, "2024-03-04", True),
        ("03/04/2024", {"language": "en-GB"}, "2024-04-03", False),
        ("03/04/2024", {"language": "de"}, "2024-04-03", False),
        ("03/04/2024", {"language": "de", "region": "US"}, "2024-03-04", False),
        ("03.04.2024", {}, "2024-04-03", False),
        ("03/04/2024 and 31/12/2024", {"region": "US"}, "2024-04-03", False),
        ("03/04/2024 and 12/31/2024", {"language": "de"}, "2024-03-04", False),
        ("03/04/2024, 31/12/2024, 12/31/2024", {}, "2024-04-03", True),
        ("Wed 03/04/2024", {"language": "en"}, "2024-04-03", False),
        ("Mon 03/04/2024", {}, "2024-03-04", False),
        ("05/05/2024", {}, "2024-05-05", False),
        ("03/04/2024, that is March 4, 2024", {}, "2024-03-04", True),
        ("24/03/12", {"language": "ja"}, "2024-03-12", False),
        ("12.03.55", {}, "1955-03-12", False),
        ("12.03.49", {}, "2049-03-12", False),
        ("12 listopada 2024", {"language": "pl"}, "2024-11-12", False),
        ("12 listopada 2024", {"language": "hr"}, "2024-10-12", False),
        ("12 listopada 2024", {}, "2024-11-12", True),
    ],
)
def test_what_decides_between_two_readings_of_a_date(text, given, value, ambiguous):
    first = find_dates(text, **given)[0]
    assert (first.value, first.ambiguous) == (value, ambiguous)


def test_days_of_a_range_share_what_is_written_once():
    assert read(find_dates, "12–14 March 2024") == [("12", "2024-03-12"), ("14 March 2024", "2024-03-14")]
    assert read(find_dates, "March 12-14, 2024") == [("March 12", "2024-03-12"), ("14, 2024", "2024-03-14")]
    assert values(find_dates, "vom 12. bis 14. März 2024") == ["2024-03-12", "2024-03-14"]


@pytest.mark.parametrize(
    "text",
    [
        "12 March",
        "Friday",
        "30.02.2024",
        "13/13/2024",
        "192.168.1.10",
        "1.2.3",
        "March 2024",
        "2024",
        "99999999",
        "v1.2.3.2024",
    ],
)
def test_what_is_no_date(text):
    assert find_dates(text) == []


# --- times ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "span", "value"),
    [
        ("at 14:30.", "14:30", "14:30:00"),
        ("14:30:05", "14:30:05", "14:30:05"),
        ("10:30:15.25", "10:30:15.25", "10:30:15.250000"),
        ("at 2:30 pm", "2:30 pm", "14:30:00"),
        ("12 a.m. today", "12 a.m.", "00:00:00"),
        ("2PM", "2PM", "14:00:00"),
        ("um 14 Uhr", "14 Uhr", "14:00:00"),
        ("um 14.30 Uhr", "14.30 Uhr", "14:30:00"),
        ("14 Uhr 30", "14 Uhr 30", "14:30:00"),
        ("à 14h30", "14h30", "14:30:00"),
        ("à 9 heures", "9 heures", "09:00:00"),
        ("kl. 14.30", "14.30", "14:30:00"),
        ("下午2:30", "下午2:30", "14:30:00"),
        ("14時30分", "14時30分", "14:30:00"),
        ("오후 2시 30분", "오후 2시 30분", "14:30:00"),
        ("at noon", "noon", "12:00:00"),
        ("14:30Z", "14:30Z", "14:30:00+00:00"),
        ("14:30 UTC+2", "14:30 UTC+2", "14:30:00+02:00"),
        ("14:30:00-05:00", "14:30:00-05:00", "14:30:00-05:00"),
        ("14:30 EST", "14:30 EST", "14:30:00-05:00"),
    ],
)
def test_times_of_day(text, span, value):
    assert read(find_times, text) == [(span, value)]


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        ("Einlass 18.30, Beginn 19.00.", "de", ["18:30:00", "19:00:00"]),
        ("10.30–12.00", "nl", ["10:30:00", "12:00:00"]),
        ("18.30", "en", []),
        ("18.30 EUR, 12.50 €, 5.30 kg, 2.10m, -18.30, $7.15", "de", []),
        ("am 18.03. oder 18.03.2024, 192.168.10.30, 18.300", "de", []),
    ],
)
def test_a_time_with_a_point_alone_is_ambiguous_and_still_a_number(text, language, expected):
    found = find_times(text, language=language)
    assert [each.value for each in found] == expected
    assert all(each.ambiguous for each in found)
    assert {text[each.start : each.end] for each in found} <= {span for span, _ in read(find_numbers, text)}


def test_a_time_with_a_point_behind_a_date_is_the_time_of_that_day():
    (found,) = find_datetimes("am Dienstag, 12. März 2024, 18.30 im Saal", language="de")
    assert found.value == "2024-03-12T18:30:00"


def test_opening_hours_are_two_times_without_an_offset():
    assert values(find_times, "08:00-12:00") == ["08:00:00", "12:00:00"]
    assert [each.ambiguous for each in find_times("the doors open at 8:00 or at 14:00", language="en")] == [True, False]


@pytest.mark.parametrize("text", ["25:00", "14:60", "1:2:3", "13 pm", "14", "14.30", "10:30:00:00", "12:301"])
def test_what_is_no_time(text):
    assert find_times(text) == []


@pytest.mark.parametrize(
    ("text", "span", "value"),
    [
        ("at 2024-03-12T14:30:00Z.", "2024-03-12T14:30:00Z", "2024-03-12T14:30:00+00:00"),
        ("20240312T143000Z", "20240312T143000Z", "2024-03-12T14:30:00+00:00"),
        ("Tue, 12 Mar 2024 14:30:00 +0100", "12 Mar 2024 14:30:00 +0100", "2024-03-12T14:30:00+01:00"),
        ("am 12. März 2024 um 14 Uhr", "12. März 2024 um 14 Uhr", "2024-03-12T14:00:00"),
        ("le 12 mars 2024 à 14h30", "12 mars 2024 à 14h30", "2024-03-12T14:30:00"),
        ("14:30 on Tuesday, 12 March 2024", "14:30 on Tuesday, 12 March 2024", "2024-03-12T14:30:00"),
        ("12/Mar/2024:14:30:00 +0000", "12/Mar/2024:14:30:00 +0000", "2024-03-12T14:30:00+00:00"),
        ("2 de mayo de 2024 a las 14:30", "2 de mayo de 2024 a las 14:30", "2024-05-02T14:30:00"),
        ("2024年3月12日 14时30分", "2024年3月12日 14时30分", "2024-03-12T14:30:00"),
        ("12.03.2024 24:00", "12.03.2024 24:00", "2024-03-13T00:00:00"),
    ],
)
def test_dates_with_a_time(text, span, value):
    assert read(find_datetimes, text) == [(span, value)]


def test_a_date_and_a_time_that_do_not_belong_together_are_none():
    assert find_datetimes("12 March 2024 was cold. We met at 14:30") == []
    assert find_datetimes("12 March 2024") == []


@pytest.mark.parametrize("locale", ["en_US", "en_GB", "de", "fr", "es", "it", "nl", "pl", "sv", "ja", "zh"])
def test_date_times_that_babel_formats_are_read_back(locale):
    when = datetime.datetime(2024, 10, 5, 14, 30, 15)
    for width in ("short", "medium"):
        text = format_datetime(when, width, locale=locale)
        expected = when if width == "medium" else when.replace(second=0)
        assert values(find_datetimes, text, language=locale.replace("_", "-")) == [expected.isoformat()], text


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "span", "value"),
    [
        ("1.234,50", "1.234,50", "1234.50"),
        ("1,234.50", "1,234.50", "1234.50"),
        ("1 234,50", "1 234,50", "1234.50"),
        ("1\u00a0234,50", "1\u00a0234,50", "1234.50"),
        ("1\u202f234,50", "1\u202f234,50", "1234.50"),
        ("1'234.50", "1'234.50", "1234.50"),
        ("12,34,567.00", "12,34,567.00", "1234567.00"),
        ("1234.5", "1234.5", "1234.5"),
        ("-5", "-5", "-5"),
        ("−5", "−5", "-5"),
        ("(5.00)", "(5.00)", "-5.00"),
        ("($1,000)", "($1,000)", "-1000"),
        ("+3", "+3", "3"),
        ("5 %", "5", "5"),
        ("1e6", "1e6", "1000000"),
        ("12e63", "12e63", "12" + "0" * 63),
        ("1.5e-3", "1.5e-3", "0.0015"),
        ("1.5 × 10⁶", "1.5 × 10⁶", "1500000"),
        ("1.5 x 10^6", "1.5 x 10^6", "1500000"),
        ("€12", "12", "12"),
        ("12€", "12", "12"),
        ("$1,234.50", "1,234.50", "1234.50"),
        ("-€5", "-€5", "-5"),
        ("12kg", "12", "12"),
        ("5x", "5", "5"),
        ("EUR 12", "12", "12"),
        ("EUR12", "12", "12"),
        ("5.", "5", "5"),
        ("007", "007", "7"),
        ("٣٫١٤", "٣٫١٤", "3.14"),
        ("5 million", "5 million", "5000000"),
        ("2,5 Mio. €", "2,5 Mio.", "2500000"),
        ("$5M", "5M", "5000000"),
        ("a 12-month term", "12", "12"),
        ("(see 5)", "5", "5"),
        ("1.234,50-mal", "1.234,50", "1234.50"),
    ],
)
def test_numbers_in_digits(text, span, value):
    assert [(text[c.start : c.end], c.value, c.inner) for c in find_numbers(text)] == [(span, value, False)]


def test_a_price_after_a_quantity_is_no_power_of_ten():
    assert [each.value for each in find_numbers("19 x 106.92 EUR, 3 x 105 EUR")] == ["19", "106.92", "3", "105"]


@pytest.mark.parametrize(("text", "language"), [("fino al 10.05.2026", "it"), ("jusqu'au 10.05.2026", "fr"),
                                                ("al 10-05-2026", "es")])  # fmt: skip
def test_a_small_word_is_no_weekday_of_another_language(text, language):
    assert [each.value for each in find_dates(text, language=language)] == ["2026-05-10"]


@pytest.mark.parametrize(
    ("text", "language"), [("19.09.2026 / Dès 15 h", "fr"), ("am 19.09.2026 des 15. Jahres", "de")]
)
def test_a_small_word_is_no_month_of_another_language(text, language):
    assert [each.value for each in find_dates(text, language=language)] == ["2026-09-19"]


def test_the_end_of_a_number_of_a_document_is_no_year():
    found = find_dates("invoice X71/3681 of 24 Aug '27", language="en")
    assert [each.value for each in found] == ["2027-08-24"]


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        ("INV-2024-117", "2024 117"),
        ("DE89 3704 0044 0532 0130 00", "89 3704 44 532 130 0"),
        ("+49 30 123456", "49 30 123456"),
        ("a1@x9.org", "1 9"),
        ("https://x.org/12/a?b=3", "12 3"),
        ("version 1.2.3", "1 2 3"),
        ("12.03.2024", "12 3 2024"),
        ("12 March 2024", "12 2024"),
        ("14:30", "14 30"),
        ("3/4", "3 4"),
        ("AB12CD", "12"),
        ("555-0123", "555 123"),
    ],
)
def test_digits_within_something_longer_are_marked(text, inner):
    assert [(c.value, c.inner) for c in find_numbers(text)] == [(value, True) for value in inner.split()]


@pytest.mark.parametrize(
    ("text", "given", "expected", "ambiguous"),
    [
        ("1.234", {}, "1.234", True),
        ("1,234", {}, "1234", True),
        ("€1.234", {}, "1234", True),
        ("1.234", {"language": "de"}, "1234", False),
        ("1.234", {"language": "en"}, "1.234", False),
        ("1,234", {"language": "en"}, "1234", False),
        ("1.234", {"region": "DE"}, "1234", False),
        ("1.234", {"language": "es", "region": "MX"}, "1.234", False),
        ("1.234", {"language": "fr"}, "1234", True),
        ("1.234 of 1.234,50", {}, "1234", False),
        ("1.234 of 1.234,50", {"language": "en"}, "1234", False),
        ("1.234 of 1,234.50", {"language": "de"}, "1.234", False),
        ("1.234 and 12,50", {}, "1234", False),
        ("1.234 and 3.5", {"language": "de"}, "1234", True),
        ("1.234 and 1,234.5 and 1.234,5", {}, "1.234", True),
        ("1.234 of 7.654.321", {}, "1234", False),
        ("0.123", {"language": "de"}, "0.123", False),
        ("1234.567", {"language": "de"}, "1234.567", False),
    ],
)
def test_what_decides_between_two_readings_of_a_number(text, given, expected, ambiguous):
    first = find_numbers(text, **given)[0]
    assert (first.value, first.ambiguous) == (expected, ambiguous)


def test_lists_are_not_one_number():
    assert values(find_numbers, "100 200 300") == ["100", "200", "300"]
    assert values(find_numbers, "in 2024 150 people") == ["2024", "150"]
    assert values(find_numbers, "1, 2, 3") == ["1", "2", "3"]
    assert values(find_numbers, "100 200 300", language="fr") == ["100200300"]
    assert read(find_numbers, "5-10 or 5–10 %") == [("5", "5"), ("10", "10")] * 2


def test_ordinals_are_no_numbers():
    for text, language in (("the 3rd", "en"), ("le 2e", "fr"), ("1º", "es"), ("the third", "en"), ("der dritte", "de")):
        assert find_numbers(text, language=language) == []


LOCALES = (
    "en", "de", "fr", "es", "it", "pt", "nl", "pl", "sv", "da", "nb", "fi", "cs", "ru", "tr", "el", "hu",
    "de_AT", "en_IN", "hi", "ja", "he", "ar", "pt_PT", "es_MX",
)  # fmt: skip


@pytest.mark.parametrize("locale", LOCALES)
def test_numbers_that_babel_formats_are_read_back(locale):
    source = random.Random(locale)
    language = locale.replace("_", "-")
    for _ in range(200):
        number = Decimal(source.randrange(-(10 ** source.randint(1, 11)), 10 ** source.randint(1, 11))).scaleb(
            -source.choice((0, 2))
        )
        for text in (format_decimal(number, locale=locale), format_currency(number, "EUR", locale=locale)):
            found = [each for each in find_numbers(f"{text}", language=language) if not each.inner]
            assert [Decimal(each.value) for each in found] == [number], text


@pytest.mark.parametrize("language", ["en", "de", "fr", "es", "it"])
def test_numbers_in_words_are_read_back(language):
    for number in [*range(101), 200, 365, 500, 1000, 2024]:
        text = num2words(number, lang=language).replace(", ", " ")
        assert read(find_numbers, text, language=language) == [(text, str(number))]


def test_words_for_one_may_be_articles_and_languages_are_told_apart():
    assert [each.ambiguous for each in find_numbers("one of three", language="en")] == [True, False]
    assert read(find_numbers, "the amount due is five and that is for once") == [("five", "5")]
    assert values(find_numbers, "vingt-deux", language="en") == []
    assert values(find_numbers, "vingt-deux") == ["22"]


# --- durations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "span", "value"),
    [
        ("PT1H30M", "PT1H30M", "PT1H30M"),
        ("1h30", "1h30", "PT1H30M"),
        ("1h30m", "1h30m", "PT1H30M"),
        ("1 h 30 min", "1 h 30 min", "PT1H30M"),
        ("1 hour and 30 minutes", "1 hour and 30 minutes", "PT1H30M"),
        ("90 minutes", "90 minutes", "PT90M"),
        ("2 days, 3 hours", "2 days, 3 hours", "P2DT3H"),
        ("1,5 Stunden", "1,5 Stunden", "PT1H30M"),
        ("1:30 h", "1:30 h", "PT1H30M"),
        ("within two weeks", "two weeks", "P2W"),
        ("half an hour", "half an hour", "PT30M"),
        ("thirty (30) days", "thirty (30) days", "P30D"),
        ("a 5-year plan", "5-year", "P5Y"),
        ("zwei Wochen", "zwei Wochen", "P2W"),
        ("2 Jahre und 3 Monate", "2 Jahre und 3 Monate", "P2Y3M"),
        ("trois mois", "trois mois", "P3M"),
        ("dos semanas", "dos semanas", "P2W"),
        ("tre giorni", "tre giorni", "P3D"),
        ("1 week 2 days", "1 week 2 days", "P9D"),
        ("1.5 years", "1.5 years", "P1Y6M"),
        ("2.5 s", "2.5 s", "PT2.5S"),
        ("two and a half years", "two and a half years", "P2Y6M"),
        ("3 godziny", "3 godziny", "PT3H"),
    ],
)
def test_durations(text, span, value):
    assert read(find_durations, text) == [(span, value)]


@pytest.mark.parametrize("text", ["5 m", "2.3 months", "-3 days", "5 people", "P", "PT", "hours"])
def test_what_is_no_duration(text):
    assert find_durations(text) == []


# --- all of them ------------------------------------------------------------------------------------------------------

PIECES = (
    "12", "3", "2024", "1.234,50", "1,234.5", "12.03.2024", "2024-03-12", "14:30", "T", "Z", "pm", "March",
    "März", "mars", "one", "twenty", "zwei", "hours", "h", "min", "P1D", "€", "$", "-", "(", ")", ".", ",",
    "'", "/", ":", "%", "+", "年", "月", "日", "٣", "İ", "ß", "😀", "million", "e6", "to",
    "\n", "\u00a0", "e\u0301",
)  # fmt: skip


@given(st.lists(st.sampled_from([*PIECES, " ", " "]), max_size=25).map("".join) | st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_candidates_are_in_order_and_do_not_overlap(text):
    for finder in FINDERS:
        end = 0
        for each in finder(text):
            assert end <= each.start < each.end <= len(text)
            assert not text[each.start].isspace()
            assert not text[each.end - 1].isspace()
            end = each.end


@given(st.lists(st.sampled_from([*PIECES, " ", " "]), max_size=25).map("".join))
@settings(max_examples=200, deadline=None)
def test_values_are_what_python_reads(text):
    for each in find_dates(text):
        datetime.date.fromisoformat(each.value)
    for each in find_times(text):
        datetime.time.fromisoformat(each.value)
    for each in find_datetimes(text):
        datetime.datetime.fromisoformat(each.value)
    for each in find_numbers(text):
        assert "E" not in each.value
        assert Decimal(each.value).is_finite()


@pytest.mark.parametrize("finder", FINDERS)
def test_arguments_are_checked(finder):
    for given_arguments in ({"language": "??"}, {"language": ""}, {"region": "USA"}):
        with pytest.raises(InvalidArgument):
            finder("1", **given_arguments)
    assert finder("", language="xx", region="ZZ") == []


ENDLESS = (
    "1", "1.", "1,", "1 ", "1:", "12/", " ", ". ", "-", "(", "1.1.11 ", "2024-03-12", "a@", "a.b-", "A1B2 ", "DE89 ",
    "www.", "+1 ", "(0", "1h", "1 h ", "one ", "mar 1 ", "March ", "P1", "1 000 ", "a", "’1", "$", "\n", "\u0301",
    "hundert",
)  # fmt: skip


@pytest.mark.parametrize("piece", ENDLESS)
def test_time_grows_with_length_and_not_faster(piece):
    for finder in FINDERS:
        finder(piece * 10)
        durations = []
        for length in (2_000, 16_000):
            text = piece * (length // len(piece))
            runs = []
            for _ in range(2):
                start = time.process_time()
                finder(text)
                runs.append(time.process_time() - start)
            durations.append(min(runs))
        # 8 times the text: quadratic time would be 64 times as much
        assert durations[1] < 25 * durations[0] + 0.1, finder.__name__


@pytest.mark.nightly
@pytest.mark.parametrize("finder", FINDERS)
def test_a_megabyte_of_digits_is_read_in_seconds(finder):
    for piece in ("1", "1.", " "):
        start = time.process_time()
        finder(piece * (1_000_000 // len(piece)))
        assert time.process_time() - start < 30 * slowness(), piece


def test_ordinary_text_is_read_fast():
    sentence = "the quick brown fox jumps on 12 March 2024 14:30 over the dogs, for 1,234.50 in 2 hours or so. "
    text = sentence * (100_000 // len(sentence))
    for finder in FINDERS:
        finder(sentence)
        start = time.process_time()
        assert len(finder(text)) >= 900
        assert time.process_time() - start < 2 * slowness()


def test_the_number_of_a_document_does_not_outvote_the_amounts():
    """231.613.078 alone would mean that points separate thousands, which the amounts of the same text deny."""
    text = "Document 231.613.078. The meter moved from 41,743 to 43,556. Pay 139.17 USD and 124.70 USD."
    found = {each.value: each.ambiguous for each in find_numbers(text, language="en")}
    assert {"41743", "43556", "139.17", "124.70"} <= set(found)
    assert not any(found.values())
    german = {each.value for each in find_numbers("Gesamt 1.234.567 kg, davon 41,743 t und 2.5 kg", language="de")}
    assert {"1234567", "41.743"} <= german
