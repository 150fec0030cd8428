from .calibration import LabelCalibration as LabelCalibration
from .classify import TextClassification as TextClassification, TextClassifier as TextClassifier
from .edits import Edit as Edit, Revision as Revision, apply_edits as apply_edits, compare as compare
from .proofread import Margins as Margins
from .rewrite import Rewriting as Rewriting
from .spans import TextSpan as TextSpan, protected_spans as protected_spans, sentences as sentences
from .summarize import Passage as Passage, SummaryDraft as SummaryDraft
from .tags import Emotion as Emotion, Entity as Entity, Tags as Tags, Topic as Topic
from .tasks import ExtractedTable as ExtractedTable, Reply as Reply, TextTasks as TextTasks
from .trained_classifier import TrainedClassifier as TrainedClassifier
