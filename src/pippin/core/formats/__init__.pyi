from . import checkpoint as checkpoint, gguf as gguf, model_types as model_types
