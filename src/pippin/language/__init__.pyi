from . import methods as methods, parallel as parallel
from .decoder import Decoder as Decoder
from .decoder_config import DecoderConfig as DecoderConfig, LayerSpec as LayerSpec
from .encoder import TextEncoder as TextEncoder, load_encoder as load_encoder
from .language_model import LanguageModel as LanguageModel, load as load
from .methods.afm import AFMConfig as AFMConfig
from .methods.masked_diffusion.model import MaskedDiffusionLM as MaskedDiffusionLM, to_diffusion as to_diffusion
from .methods.masked_diffusion.sample import UnmaskingOptions as UnmaskingOptions
from .neuron_predictor import NeuronPredictor as NeuronPredictor
from .parallel import PTMoEConfig as PTMoEConfig, TrackProcesses as TrackProcesses, divide as divide
