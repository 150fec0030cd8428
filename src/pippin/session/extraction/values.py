"""The values in a text, each with its place: dates, times, numbers and durations as people write them.

Every finder takes a text and gives candidates in its order, none of which overlap; what a candidate means is `value`,
in one spelling. ``language`` ("de", "pt-BR") and ``region`` ("US") help where a text can be read in several ways; what
the text itself shows goes before both.

Notable here:
- what has two readings is marked as ambiguous and has the likeliest
- a text is read in time proportional to its length, whatever it holds
- digits of all scripts count; names of months are those of 45 languages, numbers in words those of eight

>>> [each.value for each in find_dates("signed on 12. März 2024, valid until 03/04/2025", language="de")]
['2024-03-12', '2025-04-03']
>>> [each.value for each in find_numbers("1.234,50 € for 1.000 pieces")]
['1234.50', '1000']
>>> [each.value for each in find_datetimes("Tue, 12 Mar 2024 14:30:00 +0100")]
['2024-03-12T14:30:00+01:00']
>>> [each.value for each in find_durations("an hour and 30 minutes, or two weeks")]
['PT1H30M', 'P2W']
"""

from pippin.session.extraction.values_base import Candidate
from pippin.session.extraction.values_dates import find_dates
from pippin.session.extraction.values_durations import find_durations
from pippin.session.extraction.values_numbers import find_numbers
from pippin.session.extraction.values_times import find_datetimes, find_times

__all__ = ["Candidate", "find_dates", "find_datetimes", "find_durations", "find_numbers", "find_times"]
