"""Recipes: training, model conversion and evaluation runs, each as a frozen `Config` and a function `run(config)`.

Notable here:
- one file per recipe, named like its command; each has `Config` (all settings, typed and checked) and `run`, which
  returns a typed result
- the commands `pippin train`, `pippin shape`, `pippin evaluate` and `pippin laws` parse a `Config`, call `run` and
  print its result, so everything that a command does is available from Python under the same names
- importing a recipe is cheap; torch and the models are imported when `run` is called

>>> from pippin.recipes.train import lora
>>> lora.Config(model="smollm2-135m", data=("chats.jsonl",), out="adapter", steps=200).rank
16
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
