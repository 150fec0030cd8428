from .model import (
    HistoryBuffer as HistoryBuffer,
    PatchDiscriminator as PatchDiscriminator,
    RefinerConfig as RefinerConfig,
    SimRefiner as SimRefiner,
)
from .train import (
    LabelProbe as LabelProbe,
    RefinerTrainingConfig as RefinerTrainingConfig,
    RefinerTrainingResult as RefinerTrainingResult,
    fit as fit,
)
