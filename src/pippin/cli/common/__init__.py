"""What several verbs share: options, input, output and exit codes."""
