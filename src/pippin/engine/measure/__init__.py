"""Speed and memory of models on this machine, measured."""
