"""Typed answers from a model on this machine, in ten lines."""

from pathlib import Path

from forms import Invoice

import pippin

session = pippin.Session("smollm2-135m")  # fetched on first use, about 93 MB
letter = Path(__file__).with_name("letter.txt").read_text()
invoice = session.respond(f"{letter}\n\nFill in the invoice.", generating=Invoice).content
print(f"{invoice.company} wants {invoice.total} {invoice.currency} by {invoice.payment_due:%d %B %Y}.")
