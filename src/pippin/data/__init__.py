"""Text for models: tokenisers and chat templates; files, packing and streams of training data."""

from pippin.data.chat import ChatTemplate
from pippin.data.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Tokenizer"]
