"""The verbs below `pippin evaluate`."""
