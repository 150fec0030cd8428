from .sampling import ToolRequest as ToolRequest, sample as sample
from .tool_files import (
    LANGUAGES as LANGUAGES,
    ToolSpec as ToolSpec,
    is_held_out as is_held_out,
    library as library,
    read as read,
)
