from .neuron_predictor import (
    NeuronPredictor as NeuronPredictor,
    PredictorQuality as PredictorQuality,
    fit_predictor as fit_predictor,
)
from .neuron_store import NeuronStats as NeuronStats, NeuronStore as NeuronStore
from .neuron_window import NeuronWindow as NeuronWindow
from .stored_feedforward import Attached as Attached, StoredFeedForward as StoredFeedForward
