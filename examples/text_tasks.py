"""Text tasks on the default model: corrections, labels with probabilities, sentences that matter, a form."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from pippin.kits.text import TextTasks

HERE = Path(__file__).resolve().parent


class Payment(BaseModel):
    """What a letter says about paying."""

    invoice_number: str
    total: int
    currency: Literal["EUR", "GBP", "USD"]


tasks = TextTasks("smollm2-135m")

revision = tasks.proofread("I recieved your letter on monday, it was to late. Run `teh tool` again.")
print(revision.text)
for edit in revision.edits:
    print(f"  {edit.original} -> {edit.replacement}  ({edit.kind})")

mail = "The heating has been cold for three days and nobody calls me back!"
result = tasks.classify(mail, ["complaint", "question", "praise"], about="the purpose of a message")
print(result.label, {label: round(chance, 2) for label, chance in result.probabilities.items()})

print(tasks.summarize((HERE / "article.txt").read_text(), length=2, method="select"))
found = tasks.extract((HERE / "letter.txt").read_text(), Payment)
for span in found.spans:
    print(f"  {span.name}: {span.text!r} at {span.start}, {span.confidence:.0%} sure")
print(found.content)
