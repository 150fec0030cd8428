"""The errors under their short name: ``from pippin.errors import ContextOverflow``."""

from pippin.core.errors import *  # noqa: F403
