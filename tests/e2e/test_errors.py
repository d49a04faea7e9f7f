"""Bad requests: each gets an OpenAI error object that names the thing, and nothing dies of it."""
import json
import socket
import threading

import pytest

from cluster import SLOW, chat

CHAT = "/v1/chat/completions"

BAD = [  # body changes, status, param, code
    ({"messages": []}, 400, "messages", None),
    ({"messages": "hi"}, 400, "messages", None),
    ({"messages": [{"role": "alien", "content": "x"}]}, 400, "messages", None),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, "messages", "unsupported"),
    ({"model": "gpt-4"}, 404, "model", "model_not_found"),
    ({"model": 7}, 400, "model", None),
    ({"temperature": -1}, 400, "temperature", None),
    ({"temperature": "hot"}, 400, "temperature", None),
    ({"top_p": 0}, 400, "top_p", None),
    ({"top_p": 1.5}, 400, "top_p", None),
    ({"top_k": -2}, 400, "top_k", None),
    ({"min_p": 2}, 400, "min_p", None),
    ({"presence_penalty": 9}, 400, "presence_penalty", None),
    ({"repetition_penalty": 0}, 400, "repetition_penalty", None),
    ({"max_tokens": 0}, 400, "max_tokens", None),
    ({"max_tokens": 9000}, 400, None, "context_length_exceeded"),
    ({"max_tokens": 9000, "stream": True}, 400, None, "context_length_exceeded"),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias", None),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias", None),
    ({"top_logprobs": 3}, 400, "top_logprobs", None),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", None),
    ({"seed": "x"}, 400, "seed", None),
    ({"stream": "yes"}, 400, "stream", None),
    ({"n": 2}, 400, "n", "unsupported"),
    ({"stop": ["x"]}, 400, "stop", "unsupported"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools", "unsupported"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format", "unsupported"),
    ({"no_such_field": 1}, 400, "no_such_field", None),
]


@pytest.mark.parametrize("change,status,param,code", BAD, ids=[json.dumps(b[0])[:50] for b in BAD])
def test_bad_field(cluster, change, status, param, code):
    got, _, text = cluster.post(CHAT, {**chat("hi"), **change})
    e = json.loads(text)["error"]
    assert got == status, text
    assert e["message"] and e["type"]
    if param:
        assert e["param"].startswith(param), text
    if code:
        assert e["code"].startswith(code), text


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"model": }', b'{"model": "tiny-glm52", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
                                  b"[" * 100000, b'{"a":' * 5000, b'{"temperature": 1e999}', b"\x00" * 50])
def test_malformed_json(cluster, body):
    status, _, text = cluster.post(CHAT, body)
    assert status == 400 and json.loads(text)["error"]["type"] == "invalid_request_error"


def test_prompt_over_the_context(cluster):
    status, _, text = cluster.post(CHAT, chat("word " * 9000))
    assert status == 400 and json.loads(text)["error"]["code"] == "context_length_exceeded"


def test_body_over_the_limit_is_answered(cluster):
    status, _, text = cluster.post(CHAT, b'{"x": "' + b"a" * (33 << 20) + b'"}')
    assert status == 413 and "error" in json.loads(text)


def test_wrong_method_and_path(cluster):
    status, text = cluster.get(CHAT)
    assert status == 405 and "error" in json.loads(text)
    assert cluster.get("/v1/nothing")[0] == 404
    assert cluster.post("/v1/models", {})[0] == 405


def test_garbage_on_the_port(cluster):
    for junk in (b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", cluster.http), 5) as s:
            s.sendall(junk)
    assert cluster.get("/live")[0] == 200


def test_no_capacity_is_a_refusal_with_a_time(cluster):
    """512 pages: nine requests of 4000 tokens do not fit together."""
    seen = []

    def one():
        status, headers, text = cluster.post(CHAT, chat("Tell me everything.", max_tokens=8000, stream=True, min_tokens=300))
        seen.append((status, headers.get("Retry-After"), text))

    threads = [threading.Thread(target=one) for _ in range(9)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(300 * SLOW)
    refused = [s for s in seen if s[0] != 200]
    assert len(seen) == 9 and refused and len(refused) < 9
    for status, retry, text in refused:
        assert status in (429, 503) and int(retry) >= 1 and json.loads(text)["error"]["message"]


def test_still_answers(cluster):
    status, _, text = cluster.post(CHAT, chat("Who wrote Hamlet?"))
    assert status == 200 and json.loads(text)["choices"][0]["message"]["content"] == "William Shakespeare wrote Hamlet."
