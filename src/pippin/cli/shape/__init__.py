"""The verbs of `pippin shape`."""
