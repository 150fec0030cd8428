from .neuron_reader import NeuronReader as NeuronReader
from .neuron_store import NeuronStats as NeuronStats, NeuronStore as NeuronStore
from .neuron_window import NeuronWindow as NeuronWindow
from .stored_feedforward import Attached as Attached, StoredFeedForward as StoredFeedForward
