"""The verbs below `pippin shape`."""
