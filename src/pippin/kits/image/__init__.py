"""Pictures from descriptions, classes, pictures and drawings: one creator over every generator of this library.

Notable here:
- `ImageCreator` draws, edits, fills in and animates with flows, diffusion, autoregressive diffusion and compositions
- what it costs is measured before it is drawn, and what a picture is made of stands in its metadata
"""

from pippin.kits.image.backends import Backend, Job, backend_of
from pippin.kits.image.concepts import Drawing, ExtractedText, ImageRef, Label, Mask, Text, extract
from pippin.kits.image.creator import Capabilities, ImageCreator
from pippin.kits.image.plan import Cost
from pippin.kits.image.request import Blocked, Picture, Progress, Request, details_of
from pippin.kits.image.styles import Style
from pippin.kits.image.text import TextEncoder

__all__ = [
    "Backend",
    "Blocked",
    "Capabilities",
    "Cost",
    "Drawing",
    "ExtractedText",
    "ImageCreator",
    "ImageRef",
    "Job",
    "Label",
    "Mask",
    "Picture",
    "Progress",
    "Request",
    "Style",
    "Text",
    "TextEncoder",
    "backend_of",
    "details_of",
    "extract",
]
