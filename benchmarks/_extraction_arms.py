"""Those with a model that the benchmark of extraction compares, each in its own process (`_sides.Side`).

Notable here:
- every one gets the text and the JSON Schema, greedily, and nothing else: no language, and no example of the form
- llama.cpp is held to the schema by its own grammar, as its Python package applies it; LangExtract calls the same
  llama.cpp, with the answer held to JSON
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pippin.claims.worlds.form_baselines import inner, read_as, type_of

INSTRUCTIONS = (
    "Fill in the form with values from the document. Copy texts exactly as the document says them. Write dates as "
    "YYYY-MM-DD, times as HH:MM:SS and numbers as plain numbers. Leave out, or write null for, what the document does "
    "not say."
)
CONTEXT, MOST = 8192, 768
"""Tokens of llama.cpp's context, and most tokens of its answer; the longest right one of 200 has 562."""


class Pippin:
    """`Session.extract`.

    Args:
        model: a reference.
        adapter: None for the model itself, "auto" for the adapter that comes with Pippin, or a folder.
        threads: number of threads; None for those of the library.
    """

    def __init__(self, model: str, adapter: str | None, threads: int | None) -> None:
        import pippin
        from pippin.core.threads import use_threads
        from pippin.session.session import Session

        if threads:
            use_threads(threads)
        loaded = pippin.load(model, device="cpu")
        self.adapter = adapter
        if adapter not in (None, "auto"):
            loaded.load_adapter("measured", adapter)
            self.adapter = "measured"
        self.session = Session(loaded)

    def fill(self, text: str, schema: dict[str, Any]) -> tuple[Any, float]:
        """The value, None if there is no answer, and the seconds."""
        from pippin.core.errors import PippinError

        began = time.perf_counter()
        try:
            found = self.session.extract(text, schema, adapter=self.adapter).content
        except PippinError:  # counted: every field of the document is wrong
            found = None
        return found, time.perf_counter() - began


class LlamaCppSchema:
    """llama.cpp with the schema as the response format.

    Args:
        path: a GGUF file.
        threads: number of threads; None for those of the library.
    """

    def __init__(self, path: str, threads: int | None) -> None:
        from llama_cpp import Llama

        self.model = Llama(path, n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, verbose=False)

    def fill(self, text: str, schema: dict[str, Any]) -> tuple[Any, float]:
        """See `Pippin.fill`; an answer that is no whole JSON is none."""
        began = time.perf_counter()
        prompt = f"Form:\n{json.dumps(schema, ensure_ascii=False)}\n\nDocument:\n{text}"
        messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": prompt}]
        said = self.answer(messages, {"type": "json_object", "schema": schema})
        try:
            found = json.loads(said)
        except ValueError:
            found = None
        return found, time.perf_counter() - began

    def answer(self, messages: list[dict[str, str]], response_format: dict[str, Any]) -> str:
        """The text of an answer; empty where the prompt is too long."""
        try:
            done = self.model.create_chat_completion(
                messages, response_format=response_format, temperature=0.0, max_tokens=MOST
            )
        except ValueError:
            return ""
        return done["choices"][0]["message"]["content"] or ""


class LangExtract:
    """LangExtract over llama.cpp; its classes are the fields, and its texts are read in their types by our finders.

    Args:
        path: a GGUF file.
        threads: number of threads; None for those of the library.
        example_kind: kind of the document of its one example, which has a form of its own.
    """

    def __init__(self, path: str, threads: int | None, example_kind: str) -> None:
        import langextract
        from langextract.core import base_model, types

        self.library, self.seconds = langextract, 0.0
        llama = LlamaCppSchema(path, threads)

        class Model(base_model.BaseLanguageModel):
            def infer(self, batch_prompts: Any, **_: Any) -> Iterator[list[Any]]:
                for prompt in batch_prompts:
                    said = llama.answer([{"role": "user", "content": prompt}], {"type": "json_object"})
                    yield [types.ScoredOutput(score=1.0, output=said)]

        self.model = Model()
        self.example = self._example(example_kind)

    def _example(self, kind: str) -> Any:
        """An English document with a form and its right values."""
        data, (text, known) = self.library.data, example(kind)
        found = [data.Extraction(name, said, attributes=attributes or None) for name, said, attributes in known]
        return data.ExampleData(text=text, extractions=found)

    def fill(self, text: str, schema: dict[str, Any]) -> tuple[Any, float]:
        """See `Pippin.fill`."""
        began = time.perf_counter()
        wanted = "\n".join(_described(schema))
        try:
            done = self.library.extract(
                text,
                prompt_description=f"{INSTRUCTIONS.split('. Write')[0]}, in their order. The fields are:\n{wanted}",
                examples=[self.example],
                model=self.model,
                max_char_buffer=2 * CONTEXT,  # the whole document at once
                fence_output=False,
                use_schema_constraints=False,
                resolver_params={"suppress_parse_errors": False},
                show_progress=False,
            )
        except Exception:  # of several kinds, all of them no answer
            return None, time.perf_counter() - began
        return _assembled(schema, done.extractions or []), time.perf_counter() - began


def example(kind: str) -> tuple[str, list[tuple[str, str, dict[str, str]]]]:
    """An English document of a kind, and field, text and attributes of what it says, with a list of records in it."""
    from pippin.recipes.train.task_data import extraction

    rng = random.Random("example")
    while True:
        task = extraction.sample_task(rng, [kind], ["en"], lambda _: ["lines"])
        text = task.document.text
        known = sorted(_known(task.schema, task.answers, text), key=lambda each: text.find(each[1]))
        if any(attributes for *_, attributes in known):
            return text, known


def _leaf_paths(schema: dict[str, Any], at: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Dotted names of fields with their schemas; a list is one field."""
    for name, each in schema["properties"].items():
        own, path = inner(each)[0], f"{at}{name}"
        if type_of(own) == "object":
            yield from _leaf_paths(own, f"{path}.")
        else:
            yield path, own | ({"description": each["description"]} if "description" in each else {})


def _described(schema: dict[str, Any]) -> Iterator[str]:
    """A line for each field."""
    for path, each in _leaf_paths(schema):
        said = f": {each['description']}" if "description" in each else ""
        if type_of(each) == "enum":
            said += f" (one of {', '.join(map(str, each['enum']))})"
        if type_of(each) == "array" and "properties" in each["items"]:
            said += f" (several, with the attributes {', '.join(each['items']['properties'])})"
        yield f"- {path}{said}"


def _known(schema: dict[str, Any], answers: Any, text: str, at: str = "") -> Iterator[tuple[str, str, dict[str, str]]]:
    """Field, text and attributes of what a document says of a form."""
    for name, each in schema["properties"].items():
        own, answer, path = inner(each)[0], (answers or {}).get(name), f"{at}{name}"
        if type_of(own) == "object":
            yield from _known(own, answer, text, f"{path}.")
        elif type_of(own) == "array":
            for item in answer or ():
                if isinstance(item, dict):
                    said = {key: text[value.start : value.end] for key, value in item.items() if value is not None}
                    if said:
                        yield path, next(iter(said.values())), said
                elif item is not None:
                    yield path, text[item.start : item.end], {}
        elif answer is not None:
            yield path, text[answer.start : answer.end], {}


def _assembled(schema: dict[str, Any], extractions: list[Any], at: str = "") -> dict[str, Any]:
    """The value of a schema from extractions by field."""
    value: dict[str, Any] = {}
    for name, each in schema["properties"].items():
        own, path = inner(each)[0], f"{at}{name}"
        found = [one for one in extractions if one.extraction_class == path]
        texts = [str(one.extraction_text or "") for one in found]
        if type_of(own) == "object":
            value[name] = _assembled(own, extractions, f"{path}.")
        elif type_of(own) != "array":
            value[name] = read_as(texts[0], own) if texts else None
        elif "properties" in own["items"]:
            records = [one.attributes or {} for one in found]
            value[name] = [
                {key: read_as(str(record.get(key) or ""), inner(column)[0])
                 for key, column in own["items"]["properties"].items()}
                for record in records
            ]  # fmt: skip
        else:
            value[name] = [read for one in texts if (read := read_as(one, own["items"])) is not None]
    return value


def model_file(reference: str) -> tuple[str, Path | None]:
    """The name of a model, and its GGUF file; None where it is not one."""
    from pippin.core.store.reference import resolve

    found = resolve(reference)
    return found.name, found.path if found.kind == "gguf" else None
