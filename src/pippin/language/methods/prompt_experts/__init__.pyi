from .objective import (
    ExpertForecast as ExpertForecast,
    PromptRoutedDecoder as PromptRoutedDecoder,
    PromptRouting as PromptRouting,
)
from .router import PromptRouter as PromptRouter, PromptRouterConfig as PromptRouterConfig
