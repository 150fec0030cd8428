"""Generators of pictures and clips: flows, diffusion and what lies between, behind one contract."""

from pippin.generate.composition import composability, compose
from pippin.generate.condition import Condition, ConditionSpec, Samples
from pippin.generate.contract import Generator, HasLikelihood, Step, shown
from pippin.generate.dart import DART, DartConfig
from pippin.generate.dart_training import NoisyViews
from pippin.generate.diffusion import Denoising, Diffusion, DiffusionConfig
from pippin.generate.dit import DiTConfig
from pippin.generate.flow_score import LikelihoodAndScore
from pippin.generate.folder import is_generator, load, save
from pippin.generate.iterative import IterativeDenoise, IterativeTarFlow
from pippin.generate.jacobi import Jacobi
from pippin.generate.local_net import LocalNetConfig
from pippin.generate.locality import locality_report
from pippin.generate.recipes import recipe
from pippin.generate.refiner import RefinerConfig, SimRefiner
from pippin.generate.samplers import Langevin
from pippin.generate.schedules import NoiseSchedule
from pippin.generate.starflow import StarFlow, StarFlowConfig
from pippin.generate.tarflow import Likelihood, TarFlow, TarFlowConfig
from pippin.generate.unet import UNetConfig

__all__ = [
    "DART",
    "Condition",
    "ConditionSpec",
    "DartConfig",
    "Denoising",
    "DiTConfig",
    "Diffusion",
    "DiffusionConfig",
    "Generator",
    "HasLikelihood",
    "IterativeDenoise",
    "IterativeTarFlow",
    "Jacobi",
    "Langevin",
    "Likelihood",
    "LikelihoodAndScore",
    "LocalNetConfig",
    "NoiseSchedule",
    "NoisyViews",
    "RefinerConfig",
    "Samples",
    "SimRefiner",
    "StarFlow",
    "StarFlowConfig",
    "Step",
    "TarFlow",
    "TarFlowConfig",
    "UNetConfig",
    "composability",
    "compose",
    "is_generator",
    "load",
    "locality_report",
    "recipe",
    "save",
    "shown",
]
