"""The verbs of `pippin evaluate`."""
