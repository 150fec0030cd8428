"""A client that goes away frees its slot, whether it streams or not."""

import json
import time

import pytest

BODIES = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1900, "n": 3},
    "completions": {"prompt": "hi", "max_tokens": 1900, "n": 3},
    "responses": {"input": "hi", "max_output_tokens": 1900, "text": {"format": {"type": "json_object"}}},
}


def eventually(holds):
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
def test_a_slot_is_free_again(server, route, streams):
    never_ends = {} if route == "responses" else {"logit_bias": {"256": -100}}
    body = json.dumps({"model": "tiny", "stream": streams} | BODIES[route] | never_ends)
    connection = server.connect()
    connection.sendall(
        f"POST /v1/{route} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {server.key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
    )
    eventually(lambda: server.service.active > 0)
    if streams:
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    connection.close()
    eventually(lambda: server.service.active == server.service.waiting == 0)
