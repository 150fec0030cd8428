"""Recipes: what a training, shaping or evaluation run does, as a frozen `Config` and a function `run(config)`.

Notable here:
- one file per recipe, under the name of its verb; each has `Config` (every setting, typed and checked) and
  `run`, which returns a typed result
- the commands `pippin train`, `pippin shape`, `pippin evaluate` and `pippin laws` parse a `Config`, call `run`, and
  print what it returned: whatever a command does, Python can do with the same names
- importing a recipe imports nothing heavy; torch and the model families load when `run` is called

>>> from pippin.recipes.train import lora
>>> lora.Config(model="smollm2-135m", data=("chats.jsonl",), out="adapter", steps=200).rank
16
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
