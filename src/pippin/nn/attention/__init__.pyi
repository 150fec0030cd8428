from .attention import Attention as Attention, AttentionSpec as AttentionSpec
from .rotary import Rotary as Rotary, apply_rotary as apply_rotary
