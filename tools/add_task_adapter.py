"""Add a trained task adapter to the catalog: `python tools/add_task_adapter.py FOLDER...`, of `pippin train`.

Notable here:
- factors are stored in float16, which takes half the space; the catalog has the hash of that file
- an adapter of the same model and task is replaced
- the factors of several folders are averaged (Wortsman et al. 2022, model soups): of runs that went on from another,
  the average fills in forms of unseen kinds better than the last one
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pippin.core.files import sha256_of
from pippin.core.store.catalog import entries
from pippin.language.adapter_files import BASE, CONFIG, WEIGHTS
from pippin.language.language_model import load
from pippin.language.task_adapters.catalog import FOLDER


def main() -> None:
    """Convert the folders that are named on the command line, the last run last, and rewrite the catalog."""
    sources = [Path(each) for each in sys.argv[1:]]
    source = sources[-1]
    base = json.loads((source / BASE).read_text(encoding="utf-8"))
    model, task = catalog_name(base["sha256"]), base["made"]["task"]
    config = load(model).config
    name = f"{model}-{task}"
    target = FOLDER / name
    target.mkdir(exist_ok=True)
    runs = [load_file(each / WEIGHTS) for each in sources]
    weights = {key: torch.stack([run[key].float() for run in runs]).mean(0).to(torch.float16) for key in runs[0]}
    save_file(weights, target / WEIGHTS)
    base["name"] = model
    if len(sources) > 1:
        made = [json.loads((each / BASE).read_text(encoding="utf-8"))["made"] for each in sources]
        base["made"]["average_of"] = [{"seed": each["seed"], "steps": each["steps"]} for each in made]
    (target / BASE).write_text(one_line_lists(json.dumps(base, indent=2)) + "\n", encoding="utf-8")
    adapter = json.loads((source / CONFIG).read_text(encoding="utf-8")) | {"base_model_name_or_path": model}
    (target / CONFIG).write_text(one_line_lists(json.dumps(adapter, indent=2)) + "\n", encoding="utf-8")
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


def catalog_name(sha256: str) -> str:
    """Name of the catalog's model whose file has a hash; the training may have been given the file."""
    names = [name for name, entry in entries().items() if any(file.sha256 == sha256 for file in entry.files)]
    if not names:
        raise SystemExit(f"no model of the catalog has a file with the SHA-256 {sha256}")
    return names[0]


def one_line_lists(text: str) -> str:
    """JSON with every innermost list on one line."""
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text)


if __name__ == "__main__":
    main()
