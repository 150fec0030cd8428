from .deep_ensemble import DeepEnsemble as DeepEnsemble
from .map_network import MAPNetwork as MAPNetwork
from .mc_dropout import MCDropout as MCDropout
from .predictor import (
    Predictor as Predictor,
    mix_predictions as mix_predictions,
    predict_with_targets as predict_with_targets,
)
from .sghmc import SGHMC as SGHMC, SGHMCConfig as SGHMCConfig
from .swag import SWAG as SWAG, SWAGConfig as SWAGConfig
from .temperature_scaling import TemperatureScaling as TemperatureScaling, fit_temperature as fit_temperature
