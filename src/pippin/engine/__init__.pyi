from . import cache as cache, experts as experts, grammar as grammar, runners as runners, speculation as speculation
from .engine import Engine as Engine
from .engine_stats import EngineStats as EngineStats
from .expert_recording import ExpertRecorder as ExpertRecorder, record_expert_trace as record_expert_trace
from .options import ModelOptions as ModelOptions, SamplingOptions as SamplingOptions
from .prompt_extras import PromptEmbeddings as PromptEmbeddings
from .request import Finished as Finished, Request as Request, Token as Token
from .runners.leading_runner import follow as follow
from .shared import shared_engine as shared_engine
