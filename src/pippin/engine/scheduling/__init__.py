"""Which tokens of which requests a pass computes, and where their keys and values lie."""
