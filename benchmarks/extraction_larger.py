"""The benchmark of extraction for larger models, on the kinds that no adapter saw and on the letters.

    EXTRACTION_MODELS=FILE.gguf,FILE.gguf EXTRACTION_ADAPTERS=auto,FOLDER python benchmarks/extraction_larger.py

It takes an hour and more for 1.5 billion parameters. Qwen2.5 Coder 0.5B and 1.5B have adapters that come with
Pippin (auto); this trains one for another model:

    pippin train task-adapter FILE.gguf --task extraction --batch-tokens 1024 --out FOLDER --held-out-layouts thread
        --held-out-languages it --held-out-kinds recipe,event_invitation,lab_report
"""

from __future__ import annotations

import os

from extraction import main

if __name__ == "__main__":
    if "EXTRACTION_MODELS" not in os.environ:
        raise SystemExit("EXTRACTION_MODELS must name the models, with commas; EXTRACTION_ADAPTERS their adapters")
    main(
        os.environ["EXTRACTION_MODELS"].split(","),
        os.environ.get("EXTRACTION_ADAPTERS", "none").split(","),
        ("kinds", "letters"),
        items=30,
        peer_items=2,
    )
