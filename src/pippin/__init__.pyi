from . import (
    bayes as bayes,
    claims as claims,
    core as core,
    data as data,
    engine as engine,
    errors as errors,
    evaluate as evaluate,
    generate as generate,
    kits as kits,
    language as language,
    metrics as metrics,
    nn as nn,
    recipes as recipes,
    serve as serve,
    session as session,
    shape as shape,
    train as train,
)
from .bayes.laplace.laplace import Laplace as Laplace
from .bayes.uncertainty import quantify_uncertainty as quantify_uncertainty
from .engine.engine import Engine as Engine
from .engine.generation import Generation as Generation
from .kits.image.creator import ImageCreator as ImageCreator
from .language.availability import availability as availability
from .language.encoder import load_encoder as load_encoder
from .language.language_model import LanguageModel as LanguageModel
from .loading import load as load
from .session.generation_id import GenerationID as GenerationID
from .session.guardrails.guardrails import Guardrails as Guardrails
from .session.hooks import Allow as Allow, Deny as Deny, Hooks as Hooks, Replace as Replace
from .session.mcp_client import McpServer as McpServer
from .session.options import GenerationOptions as GenerationOptions
from .session.profile import Profile as Profile
from .session.providers.local import LocalModel as LocalModel
from .session.providers.openai import OpenAIProvider as OpenAIProvider
from .session.providers.provider import Provider as Provider
from .session.providers.remote import RemoteModel as RemoteModel
from .session.response import Response as Response, Snapshot as Snapshot
from .session.session import Session as Session
from .session.skills import Skill as Skill, Skills as Skills
from .session.tools import Tool as Tool, tool as tool
from .session.transcript import Transcript as Transcript
from .session.types.schema import (
    AnyOf as AnyOf,
    Choice as Choice,
    Lark as Lark,
    Regex as Regex,
    Schema as Schema,
    Verbatim as Verbatim,
)

__version__: str
