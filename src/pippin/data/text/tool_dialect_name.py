"""The names of the tool dialects; pippin.session.tool_dialects has what each stands for."""

from __future__ import annotations

from typing import Literal

ToolDialectName = Literal[
    "hermes", "llama", "pythonic", "lfm2", "olmo", "mistral", "mistral-args", "gemma", "gemma-4", "harmony",
    "deepseek-v3", "deepseek-v3.1", "qwen3-coder", "seed-oss", "glm-4.5", "glm-4.7", "minimax-m2", "granite",
    "phi-4-mini", "kimi-k2", "nemotron",
]  # fmt: skip
"""How a model writes the calls of tools."""
