from .backends import backend_of as backend_of
from .concepts import (
    Drawing as Drawing,
    ExtractedText as ExtractedText,
    ImageRef as ImageRef,
    Label as Label,
    Mask as Mask,
    TextConcept as TextConcept,
    extract as extract,
)
from .creator import ImageCapabilities as ImageCapabilities, ImageCreator as ImageCreator
from .job import ImageBackend as ImageBackend, ImageJob as ImageJob
from .plan import Cost as Cost
from .request import (
    Blocked as Blocked,
    CreatedImage as CreatedImage,
    ImageRequest as ImageRequest,
    Progress as Progress,
    read_details as read_details,
)
from .styles import Style as Style
