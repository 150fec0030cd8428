from .sampling import KINDS as KINDS, LANGUAGES as LANGUAGES, fields as fields, layouts as layouts, sample as sample
from .schema import Document as Document, Fact as Fact, FieldSpec as FieldSpec
