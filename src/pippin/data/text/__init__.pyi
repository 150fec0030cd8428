from . import refusals as refusals
from .chat_template import ChatTemplate as ChatTemplate
from .tokenizer import Tokenizer as Tokenizer
