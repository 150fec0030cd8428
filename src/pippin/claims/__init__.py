"""The ledger of published claims: each file in a folder beside this one measures one claim; the verdict is computed.

A claim's file is named after its id (`two_bit_qat.py` holds `two-bit-qat`, or `two-bit-qat-...` where a system makes
several claims) and imports the names below. What several claims share (synthetic data, small networks) stands in
`worlds/`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
