from . import composition as composition, diffusion as diffusion, flows as flows, methods as methods
from .composition.compose import composability as composability, compose as compose
from .composition.locality import locality_report as locality_report
from .conditions import Conditioning as Conditioning, ConditioningSpec as ConditioningSpec, Samples as Samples
from .contract import (
    Generator as Generator,
    GeneratorOptions as GeneratorOptions,
    HasLikelihood as HasLikelihood,
    SamplingStep as SamplingStep,
    sampling_progress as sampling_progress,
)
from .diffusion.diffusion import Denoising as Denoising, Diffusion as Diffusion, DiffusionConfig as DiffusionConfig
from .diffusion.dit import DiTConfig as DiTConfig
from .diffusion.local_network import LocalNetConfig as LocalNetConfig
from .diffusion.samplers import Langevin as Langevin
from .diffusion.schedules import NoiseSchedule as NoiseSchedule
from .diffusion.unet import UNetConfig as UNetConfig
from .flows.itarflow import IterativeDenoise as IterativeDenoise, IterativeTarFlow as IterativeTarFlow
from .flows.jacobi import Jacobi as Jacobi
from .flows.starflow.config import StarFlowConfig as StarFlowConfig
from .flows.starflow.loss import LikelihoodAndScore as LikelihoodAndScore
from .flows.starflow.model import StarFlow as StarFlow
from .flows.tarflow import FlowLikelihood as FlowLikelihood, TarFlow as TarFlow, TarFlowConfig as TarFlowConfig
from .methods.dart.loss import NoisyViews as NoisyViews
from .methods.dart.model import DART as DART, DartConfig as DartConfig
from .methods.simgan.model import RefinerConfig as RefinerConfig, SimRefiner as SimRefiner
