"""Text for models: tokenisers and chat templates."""

from pippin.data.chat import ChatTemplate
from pippin.data.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Tokenizer"]
