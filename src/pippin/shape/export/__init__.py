"""One exported program as the source of every format, and reports of how each runs."""
