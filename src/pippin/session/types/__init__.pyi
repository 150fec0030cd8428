from .dynamic_schema import SchemaPart as SchemaPart
from .schema import Choice as Choice, Lark as Lark, Regex as Regex, Schema as Schema, Verbatim as Verbatim
