"""A browser, and a server with a script instead of a model: the same protocol, and exactly the words a test needs."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from pippin.serve.page import page

ATTACK = """<img src=x onerror="window.stolen=1"> <script>window.stolen=1</script>

[press me](javascript:window.stolen=1) [data](data:text/html,<script>window.stolen=1</script>) **<b>bold</b>**

![picture](https://outside.example/pixel.png)

```html
<iframe src="https://outside.example"></iframe>
```

| <svg onload="window.stolen=1"> | b |
|---|---|
| <style>body{display:none}</style> | c |

- <a href="javascript:window.stolen=1">item</a>
> <form action="https://outside.example"><input></form>
https://outside.example/page"onmouseover="window.stolen=1
"""

TOUR = """# A bicycle, upright

A moving bicycle **steers itself** *into* the fall, as measured in [2011](https://example.org/bike):

1. it leans,
2. the front wheel turns the same way,
   - because of its *trail*
   - and its mass
3. the ground pushes back under it.

| Speed | What holds it |
|---|---|
| slow | the rider |
| fast | the wheel |

```python
def lean(angle, speed):
    return angle * speed ** 2  # not a law of nature
```

> Never ~~always~~ trust `one` model.
"""

PERSON = {
    "name": 'Ada "Countess" Lovelace 🍏',
    "birth_year": 1815,
    "birthplace": "London",
    "occupations": ["mathematician", "writer"],
}
RECIPE = {
    "title": "Apple and leek soup",
    "minutes": 35,
    "vegetarian": True,
    "ingredients": [{"name": "apples", "amount": "2"}, {"name": "leeks", "amount": "1 large"}],
    "steps": ["Soften the leek.", "Add apple and stock.", "Simmer, then blend."],
}


@dataclass
class Scripted:
    """The running server: its address, what it was asked, how many streams were cut by the client."""

    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    cut: int = 0
    pause: float = 0.002
    key: str | None = None

    @property
    def last(self) -> dict[str, Any]:
        return self.asked[-1]


def create_app(state: Scripted) -> FastAPI:
    app = FastAPI()
    app.include_router(page.router)

    def refused(request: Request) -> Response | None:
        if state.key is None or request.headers.get("authorization") == f"Bearer {state.key}":
            return None
        return failure(401, "an API key of this server is needed", "invalid_api_key")

    @app.get("/v1/models")
    async def models(request: Request) -> Any:
        kinds = [("smollm2-135m", "chat"), ("qwen3-0.6b", "chat"), ("all-minilm-l6-v2", "encoder")]
        listed = [{"id": name, "object": "model", "created": 0, "owned_by": "pippin", "kind": k} for name, k in kinds]
        return refused(request) or {"object": "list", "data": listed}

    @app.get("/v1/stats")
    async def stats(request: Request) -> Any:
        return refused(request) or figures(len(state.asked))

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Any:
        if answer := refused(request):
            return answer
        body = await request.json()
        state.asked.append(body)
        prompt = [message for message in body["messages"] if message["role"] == "user"][-1]["content"]
        if prompt == "busy":
            return failure(429, "too many requests of this key", "rate_limit_exceeded", {"retry-after": "7"})
        if prompt == "too long":
            return failure(400, "the prompt has 9000 tokens, 8192 fit", "context_length_exceeded", param="messages")
        return StreamingResponse(stream(state, body, prompt), media_type="text/event-stream")

    @app.post("/v1/extractions")
    async def extract(request: Request) -> Any:
        body = await request.json()
        state.asked.append(body)
        first = re.search(r"\w+", body["input"])
        assert first is not None
        span = {"path": ["name"], "text": first[0], "start": first.start(), "end": first.end(), "confidence": 0.876}
        return {"value": {"name": first[0]}, "spans": [span], "notes": ["a note"]}

    return app


def failure(status: int, message: str, code: str, headers: Any = None, param: str | None = None) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return JSONResponse({"error": error}, status, headers)


def figures(requests: int) -> dict[str, Any]:
    beat = [11.2, 34.9, 35.4, 30.2, 0.0, 17.7, 35.1, 33.0][requests % 8]
    models = [
        {"id": "smollm2-135m", "kind": "chat", "loaded": True, "context_size": 8192, "bytes": 651_000_000},
        {"id": "qwen3-0.6b", "kind": "chat", "loaded": False, "context_size": 32768, "bytes": 0},
    ]
    now = {
        "tokens_per_second": beat,
        "active": requests % 3,
        "waiting": requests % 2,
        "max_num_seqs": 8,
        "max_queued_requests": 64,
    }
    cache = {"tokens_used": 1234 + 97 * requests, "tokens_capacity": 65536}
    memory = {"models": 651_000_000, "budget": 8_000_000_000}
    return now | {"draining": False, "cache": cache, "memory": memory, "models": models}


def pieces(text: str) -> list[str]:
    return re.findall(r"\s*\S{1,7}|\s+", text)


def deltas(body: dict[str, Any], prompt: str) -> tuple[list[dict[str, Any]], str]:
    """What is streamed for a prompt, and why it ends."""
    after = body["messages"][-1]
    if after["role"] == "tool":
        outputs = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        return [{"content": piece} for piece in pieces(f"The tool says: {' / '.join(outputs)}")], "stop"
    if called := re.match(r"call (\w+) (.*)", prompt, re.DOTALL):
        return calls(called[1], called[2]), "tool_calls"
    if "response_format" in body:
        schema = body["response_format"]["json_schema"]["schema"]
        example = RECIPE if "minutes" in schema["properties"] else PERSON
        text = prompt if prompt.startswith("{") else json.dumps(example)
        return [{"content": text[at : at + 3]} for at in range(0, len(text), 3)], "stop"
    texts = {"attack": ATTACK, "tour": TOUR, "endless": "word " * 4000, "cut": "This breaks", "short": "Too sh"}
    said = [{"content": piece} for piece in pieces(texts.get(prompt, f"You said: {prompt}"))]
    if prompt == "think":
        said = [{"reasoning_content": piece} for piece in pieces("First I look at it from all sides.")] + said
    return said, "length" if prompt == "short" else "stop"


def calls(names: str, arguments: str) -> list[dict[str, Any]]:
    found = []
    for index, name in enumerate(names.split("_and_")):
        first = {"index": index, "id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": ""}}
        found.append({"tool_calls": [first]})
        for at in range(0, len(arguments), 4):
            found.append({"tool_calls": [{"index": index, "function": {"arguments": arguments[at : at + 4]}}]})
    return found


async def stream(state: Scripted, body: dict[str, Any], prompt: str) -> AsyncIterator[str]:
    def chunk(delta: dict[str, Any], reason: str | None = None) -> str:
        data = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": body["model"]}
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        return f"data: {json.dumps(data | {'choices': [choice]})}\n\n"

    said, reason = deltas(body, prompt)
    done = False
    try:
        yield chunk({"role": "assistant", "content": ""})
        for delta in said:
            yield chunk(delta)
            await asyncio.sleep(state.pause)
        if prompt == "cut":
            done = True
            return
        yield chunk({}, reason)
        usage = {"prompt_tokens": 24, "completion_tokens": len(said), "total_tokens": 24 + len(said)}
        usage |= {"prompt_tokens_details": {"cached_tokens": 12}}
        yield f"data: {json.dumps({'id': 'c', 'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"
        done = True
    finally:
        state.cut += not done


# --- running it -------------------------------------------------------------------------------------------------------


@contextmanager
def serve(state: Scripted) -> Iterator[Scripted]:
    """Run the server in a thread of this process."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        state.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(create_app(state), log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        yield state
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="package")
def scripted_server() -> Iterator[Scripted]:
    with serve(Scripted()) as state:
        yield state


@pytest.fixture
def scripted(scripted_server: Scripted) -> Scripted:
    """The scripted server, as if nothing had been asked yet."""
    scripted_server.asked.clear()
    scripted_server.cut, scripted_server.pause, scripted_server.key = 0, 0.001, None
    return scripted_server


# A package is left before the next test runs, and with it Playwright's event loop, which tests with `await` would meet.
@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Debian's Chromium without a window; Playwright brings no browser of its own."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("there is no chromium here")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        # No name is ever resolved: the page must do with the address it came from.
        offline = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", offline])
        yield browser
        browser.close()


@dataclass
class Watch:
    """What a page did that it should not: tests add to ``expected`` what they provoke."""

    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)

    def unexpected(self) -> list[str]:
        return [error for error in self.errors if not any(part in error for part in self.expected)]


def until(page: Any, expression: str, seconds: float = 10) -> None:
    """Wait until an expression is true; Playwright's own way needs `eval`, which the page's policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"{expression} did not come true within {seconds} s"
        page.wait_for_timeout(10)


@pytest.fixture
def open_page(browser: Any, scripted: Scripted) -> Iterator[Any]:
    """Open the page: ``open_page(url=..., size=..., **options of the context)``; the rest is watched.

    After the test, nothing may have stood in the console and nothing may have been asked of any other server.
    """
    opened: list[tuple[Any, Watch]] = []

    def open_(
        url: str | None = None, *, size: tuple[int, int] = (1280, 800), ready: bool = True, **options: Any
    ) -> Any:
        home = url or scripted.url
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
        context.set_default_timeout(10_000)
        watch = Watch()
        opened.append((context, watch))
        page = context.new_page()
        own = (home + "/", "blob:")
        page.on("request", lambda request: request.url.startswith(own) or watch.outside.append(request.url))
        page.on("console", lambda message: message.type in ("error", "warning") and watch.errors.append(message.text))
        page.on("pageerror", lambda error: watch.errors.append(str(error)))
        page.watch = watch
        page.until = lambda expression: until(page, expression)
        page.goto(home + "/")
        if ready:
            page.wait_for_selector("#status.ready", state="attached")
        return page

    yield open_
    for context, watch in opened:
        context.close()
        assert watch.outside == []
        assert watch.unexpected() == []


@pytest.fixture
def ui(open_page: Any) -> Any:
    """The page of the scripted server on a desktop."""
    return open_page()


@pytest.fixture(scope="package")
def script(browser: Any, scripted_server: Scripted) -> Iterator[Any]:
    """Run JavaScript with one of the page's modules: ``script("json.js", "(module, argument) => ...", argument)``."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(scripted_server.url + "/")

    def run(module: str, code: str, argument: Any = None) -> Any:
        wrapped = f"async ([path, argument]) => ({code})(await import(path), argument)"
        return page.evaluate(wrapped, [f"/page/{module}", argument])

    yield run
    context.close()
