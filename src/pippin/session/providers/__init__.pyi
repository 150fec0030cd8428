from .local import LocalModel as LocalModel
from .masked_diffusion import DiffusionModel as DiffusionModel
from .openai import OpenAIProvider as OpenAIProvider
from .provider import Capabilities as Capabilities, Provider as Provider, ProviderRequest as ProviderRequest
from .remote import QuotaUsage as QuotaUsage, RemoteAvailability as RemoteAvailability, RemoteModel as RemoteModel
