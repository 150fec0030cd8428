from . import starflow as starflow
from .itarflow import IterativeDenoise as IterativeDenoise, IterativeTarFlow as IterativeTarFlow
from .jacobi import Jacobi as Jacobi, SolveInfo as SolveInfo
from .tarflow import FlowLikelihood as FlowLikelihood, TarFlow as TarFlow, TarFlowConfig as TarFlowConfig
