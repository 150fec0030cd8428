"""Tasks on text: summaries, rewriting, proofreading, extraction, classification with calibrated probabilities, tags.

Notable here:
- one object, `TextTasks`, with a method for each task; presets on one model, from 135 million parameters up
- results are data: edits with places, probabilities, tables, checked passages
"""

from pippin.kits.text.calibration import Calibration, expected_calibration_error
from pippin.kits.text.classify import Classification, Classifier
from pippin.kits.text.edits import Edit, Revision, apply, compare
from pippin.kits.text.learned import LearnedClassifier
from pippin.kits.text.proofread import Margins
from pippin.kits.text.rewrite import Rewriting
from pippin.kits.text.spans import Range, protected_ranges, sentences
from pippin.kits.text.summarise import Draft, Passage
from pippin.kits.text.tags import Emotion, Entity, Tags, Topic
from pippin.kits.text.tasks import Reply, Table, TextTasks

__all__ = [
    "Calibration",
    "Classification",
    "Classifier",
    "Draft",
    "Edit",
    "Emotion",
    "Entity",
    "LearnedClassifier",
    "Margins",
    "Passage",
    "Range",
    "Reply",
    "Revision",
    "Rewriting",
    "Table",
    "Tags",
    "TextTasks",
    "Topic",
    "apply",
    "compare",
    "expected_calibration_error",
    "protected_ranges",
    "sentences",
]
