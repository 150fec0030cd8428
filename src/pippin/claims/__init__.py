"""The ledger of published claims: each file beside this one measures one claim, and the verdict is computed.

A claim's file is named after its id (`two_bit_qat.py` holds `two-bit-qat`, or `two-bit-qat-...` where a system makes
several claims) and imports the three names below. What two claims share stands in a file whose name begins with an
underscore.
"""

from pippin.claims.ledger import Evidence, Scale, claim

__all__ = ["Evidence", "Scale", "claim"]
