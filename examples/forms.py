"""Types to fill from the documents beside this file.

pippin ask "Fill in the invoice." --file examples/letter.txt --type examples/forms.py:Invoice
"""

from datetime import date
from typing import Annotated, Literal

from pydantic import BaseModel, Field


class Invoice(BaseModel):
    """What a bookkeeper wants to know of an invoice."""

    company: Annotated[str, Field(max_length=60, description="company that sends the invoice")]
    invoice_number: Annotated[str, Field(pattern=r"^\d{4}-\d{3}$")]
    total: Annotated[int, Field(ge=0, le=1_000_000)]
    currency: Literal["EUR", "GBP", "USD"]
    payment_due: date


class Card(BaseModel):
    """A card for the archive of a newspaper."""

    title: Annotated[str, Field(max_length=80)]
    place: Annotated[str, Field(max_length=40)]
    mood: Literal["cheerful", "wistful", "angry"]
