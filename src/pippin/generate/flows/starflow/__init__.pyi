from .config import StarFlowConfig as StarFlowConfig
from .loss import LikelihoodAndScore as LikelihoodAndScore
from .model import StarFlow as StarFlow
from .score_network import ScoreConfig as ScoreConfig, ScoreNetwork as ScoreNetwork
