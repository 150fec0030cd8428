"""The verbs of `pippin train`."""
