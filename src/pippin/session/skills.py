"""Skills: instructions and tools that use no context until the model loads them.

Notable here:
- the model sees one line for each skill and a tool to load it; the instructions are that tool's output
- a skill's own tools can be called from the next round on, and for the rest of the conversation
- a folder with a SKILL.md is a skill; its text is read when it is loaded, not before
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.core.text_files import read_text
from pippin.session.tools import Tool, as_tools

LOADER = "load_skill"


@dataclass(frozen=True)
class Skill:
    """Instructions and tools that the model loads when it needs them.

    Args:
        name: the name by which the model loads it.
        description: one line: its purpose and when to load it.
        instructions: the text that the model reads after loading it, or a function that returns it.
        tools: tools that it may call from then on.
    """

    name: str
    description: str
    instructions: str | Callable[[], str]
    tools: Sequence[Tool[..., Any] | Callable[..., Any]] = ()

    @classmethod
    def from_folder(cls, folder: str | Path, *, tools: Sequence[Tool[..., Any] | Callable[..., Any]] = ()) -> Skill:
        """A skill from a folder's ``SKILL.md``: ``name`` and ``description`` between two lines of dashes, then text.

        Raises:
            InvalidInput: there is no such file, or it has no such header.
        """
        path = Path(folder) / "SKILL.md"
        head, _ = _split(read_text(path, "skill"))
        missing = [key for key in ("name", "description") if not head.get(key)]
        if missing:
            raise InvalidInput(f"{path} must begin with a line ---, then name: and description:, and a line ---")
        return cls(head["name"], head["description"], lambda: _split(read_text(path, "skill"))[1], tools)


class Skills:
    """The skills of a session, and which of them are loaded.

    Raises:
        InvalidArgument: no skill, or two with one name.
    """

    def __init__(self, skills: Sequence[Skill]) -> None:
        self.skills = {skill.name: skill for skill in skills}
        if not self.skills or len(self.skills) < len(skills):
            raise InvalidArgument("give at least one skill, and every skill a name of its own")
        self.loaded: list[str] = []
        lines = "; ".join(f"{skill.name}: {skill.description}" for skill in skills)
        schema = {
            "type": "object",
            "properties": {"name": {"enum": list(self.skills)}},
            "required": ["name"],
            "additionalProperties": False,
        }
        self._loader = Tool.from_schema(LOADER, f"Load instructions for a task. {lines}", schema, self.load)

    @property
    def tools(self) -> dict[str, Tool[..., Any]]:
        """The tool that loads skills while some are not loaded, and the tools of the loaded ones."""
        left = [self._loader] if len(self.loaded) < len(self.skills) else []
        return as_tools([*left, *(tool for name in self.loaded for tool in self.skills[name].tools)])

    def load(self, name: str) -> str:
        """Load a skill and return its instructions.

        Raises:
            InvalidArgument: there is no such skill.
        """
        skill = self.skills.get(name)
        if skill is None:
            raise InvalidArgument(f"there is no skill {name!r}; there are: {', '.join(self.skills)}")
        if name not in self.loaded:
            self.loaded.append(name)
        return skill.instructions if isinstance(skill.instructions, str) else skill.instructions()

    def unload(self) -> None:
        """Mark all skills as not loaded."""
        self.loaded.clear()


def _split(text: str) -> tuple[dict[str, str], str]:
    """The ``key: value`` lines between the two lines of dashes, and the text after them."""
    lines = text.splitlines()
    if not lines or lines[0].strip() != "---" or "---" not in [line.strip() for line in lines[1:]]:
        return {}, text
    end = next(i for i, line in enumerate(lines[1:], 1) if line.strip() == "---")
    pairs = (line.partition(":") for line in lines[1:end])
    return {key.strip(): value.strip().strip("\"'") for key, colon, value in pairs if colon}, "\n".join(
        lines[end + 1 :]
    ).strip()
