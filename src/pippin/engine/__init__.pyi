from . import cache as cache, grammar as grammar, runners as runners, speculation as speculation
from .engine import Engine as Engine, EngineStats as EngineStats, shared_engine as shared_engine
from .options import ModelOptions as ModelOptions, SamplingOptions as SamplingOptions
from .prompt_extras import PromptEmbeddings as PromptEmbeddings
from .request import Finished as Finished, Request as Request, Token as Token
