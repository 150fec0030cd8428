"""Add a trained task adapter to the catalog: `python tools/add_task_adapter.py FOLDER`, of `pippin train task-adapter`.

Notable here:
- factors are stored in float16, which takes half the space; the catalog has the hash of that file
- an adapter of the same model and task is replaced
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pippin.core.files import sha256_of
from pippin.language.adapter_files import BASE, CONFIG, WEIGHTS
from pippin.language.language_model import load
from pippin.language.task_adapters.catalog import FOLDER


def main() -> None:
    """Convert the folder that is named on the command line and rewrite the catalog."""
    source = Path(sys.argv[1])
    base = json.loads((source / BASE).read_text(encoding="utf-8"))
    model, task = base["name"], base["made"]["task"]
    config = load(model).config
    name = f"{model}-{task}"
    target = FOLDER / name
    target.mkdir(exist_ok=True)
    weights = {key: tensor.to(torch.float16) for key, tensor in load_file(source / WEIGHTS).items()}
    save_file(weights, target / WEIGHTS)
    for file in (CONFIG, BASE):
        (target / file).write_text(one_line_lists((source / file).read_text(encoding="utf-8")), encoding="utf-8")
    entry = {
        "name": name,
        "model": model,
        "task": task,
        "shape": [len(config.layers), config.hidden_size, config.vocab_size],
        "base_sha256": base["sha256"],
        "sha256": sha256_of(target / WEIGHTS),
        "size": (target / WEIGHTS).stat().st_size,
    }
    catalog = FOLDER / "catalog.json"
    kept = [each for each in json.loads(catalog.read_text(encoding="utf-8")) if each["name"] != name]
    text = json.dumps(sorted([*kept, entry], key=lambda each: each["name"]), indent=2)
    catalog.write_text(one_line_lists(text) + "\n", encoding="utf-8")
    print(f"{name}: {entry['size']:,} bytes, SHA-256 {entry['sha256']}")


def one_line_lists(text: str) -> str:
    """JSON with every innermost list on one line."""
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text)


if __name__ == "__main__":
    main()
