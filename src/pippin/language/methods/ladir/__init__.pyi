from .autoencoder import ThoughtVAE as ThoughtVAE
from .config import LatentReasonerConfig as LatentReasonerConfig, ThoughtVAEConfig as ThoughtVAEConfig
from .data import Problem as Problem, read_problems as read_problems
from .loss import Reconstruction as Reconstruction, RolloutTraining as RolloutTraining, TeacherForcing as TeacherForcing
from .model import LatentReasoner as LatentReasoner
from .sample import DenoisingStep as DenoisingStep, ReasonerAnswer as ReasonerAnswer
from .train import (
    fit_reasoner as fit_reasoner,
    fit_vae as fit_vae,
    training_batches as training_batches,
    training_examples as training_examples,
)
