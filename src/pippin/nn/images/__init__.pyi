from .adaptive_norm import AdaptiveBlock as AdaptiveBlock, CrossAttention as CrossAttention
from .patches import patchify as patchify, unpatchify as unpatchify
from .time_embedding import TimeEmbedding as TimeEmbedding, sinusoidal as sinusoidal
