"""The verbs below `pippin train`."""
