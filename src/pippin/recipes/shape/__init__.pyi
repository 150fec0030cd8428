from . import (
    export as export,
    merge as merge,
    palettize as palettize,
    quantize as quantize,
    report as report,
    share as share,
    specialize as specialize,
)
