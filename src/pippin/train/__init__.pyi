from . import laws as laws
from .checkpoints import Checkpoints as Checkpoints, load_weights as load_weights
from .ema import EMA as EMA
from .objective import CountsSteps as CountsSteps, Loss as Loss, Objective as Objective
from .optimizers import AdamW as AdamW, Muon as Muon
from .processes import Processes as Processes
from .result import TrainingResult as TrainingResult
from .schedules import (
    ConstantSchedule as ConstantSchedule,
    CosineSchedule as CosineSchedule,
    LinearSchedule as LinearSchedule,
    WSDSchedule as WSDSchedule,
)
from .trainer import Evaluation as Evaluation, Trainer as Trainer
