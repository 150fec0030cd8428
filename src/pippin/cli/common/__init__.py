"""Shared by the verbs: options, input, output and exit codes."""
