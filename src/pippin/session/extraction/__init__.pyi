from .extract import Extraction as Extraction, SourceSpan as SourceSpan
from .form import Filled as Filled, Form as Form
from .source import SourceText as SourceText
from .values import Candidate as Candidate
