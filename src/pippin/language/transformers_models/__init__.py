"""Models of families that Pippin has no decoder for, computed by Hugging Face's transformers (extra `transformers`).

Notable here:
- such a model only runs (sessions, typed answers, tools, batches, the server); whatever changes or rewrites weights
  needs a decoder of Pippin's own
- transformers computes the layers, Pippin keeps what they remember: prefixes are reused, and requests share passes
"""
