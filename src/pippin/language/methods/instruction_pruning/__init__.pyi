from .config import InstructionPruningConfig as InstructionPruningConfig, MaskPredictorConfig as MaskPredictorConfig
from .loss import (
    ChunkedPretraining as ChunkedPretraining,
    InstructionTuning as InstructionTuning,
    PromptExample as PromptExample,
    PruningSchedule as PruningSchedule,
)
from .model import (
    InstructionFollowingPruning as InstructionFollowingPruning,
    MaskPredictor as MaskPredictor,
    StaticMask as StaticMask,
)
from .pruned_model import PrunedModel as PrunedModel
