"""Answers through HTTP with the real openai client: the golden texts, streamed and not, and what comes along with them."""
import concurrent.futures
import json
import os

import pytest

from cluster import ROOT, chat, events

MODEL = "tiny-glm52"
GOLDEN = {
    "What is the capital of France?": "The capital of France is Paris.",
    "Who wrote Hamlet?": "William Shakespeare wrote Hamlet.",
    "What is 482 - 141?": "482 - 141 = 341",
    "《红楼梦》的作者是谁？": "《红楼梦》的作者是曹雪芹。",
    "Count the items: stone, badger": "2",
}


def ask(client, question, **more):
    return client.chat.completions.create(model=MODEL, temperature=0, messages=[{"role": "user", "content": question}], **more)


@pytest.mark.parametrize("question", GOLDEN)
def test_whole(client, question):
    r = ask(client, question)
    c = r.choices[0]
    assert c.message.content == GOLDEN[question]
    assert c.message.role == "assistant" and c.finish_reason == "stop"
    assert r.model == MODEL and r.object == "chat.completion"
    assert r.usage.total_tokens == r.usage.prompt_tokens + r.usage.completion_tokens


@pytest.mark.parametrize("question", GOLDEN)
def test_streamed(client, question):
    text, reasons, roles = "", [], []
    for chunk in ask(client, question, stream=True):
        assert len(chunk.choices) == 1 and chunk.usage is None
        d = chunk.choices[0].delta
        text += d.content or ""
        roles += [d.role] if d.role else []
        reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert text == GOLDEN[question]
    assert reasons == ["stop"] and roles == ["assistant"]


def test_thinking_is_split_off(client):
    on = ask(client, "What is 482 - 141?").choices[0].message
    off = ask(client, "What is 12 + 30?", extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices[0].message
    assert "write" in on.reasoning_content and "<" not in on.content
    assert off.content == "12 + 30 = 42" and not getattr(off, "reasoning_content", None)


def test_usage_chunk_comes_last(client):
    chunks = list(ask(client, "Who wrote Hamlet?", stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 3
    assert all(c.usage is None for c in chunks[:-1])


def test_length_limit(client):
    r = ask(client, "Who wrote Hamlet?", max_tokens=3)
    assert r.choices[0].finish_reason == "length" and r.usage.completion_tokens == 3
    r = ask(client, "Who wrote Hamlet?", max_completion_tokens=1, max_tokens=9)
    assert r.usage.completion_tokens == 1


def test_logprobs(client):
    r = ask(client, "Who wrote Hamlet?", logprobs=True, top_logprobs=3, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    content = r.choices[0].logprobs.content
    assert "".join(t.token for t in content) == r.choices[0].message.content
    assert len(content) == r.usage.completion_tokens - 1 or len(content) == r.usage.completion_tokens
    for t in content:
        assert t.logprob <= 0 and len(t.top_logprobs) == 3 and t.top_logprobs[0].logprob == t.logprob


def test_seed_repeats_and_seeds_differ(client):
    def draw(seed):
        return client.completions.create(model=MODEL, prompt="The", temperature=1.5, seed=seed, max_tokens=40).choices[0].text
    assert draw(7) == draw(7)
    assert len({draw(s) for s in range(6)}) > 1


def test_completions(client):
    r = client.completions.create(model=MODEL, prompt="[gMASK]<sop><|user|>What is 12 + 30?<|assistant|><think></think>", temperature=0)
    assert r.choices[0].text == "12 + 30 = 42" and r.choices[0].finish_reason == "stop"
    ids = [4038, 4040, 4043, 39, 346, 871, 289, 220, 19, 23, 565, 220, 22, 22, 30, 4044, 4057, 4058]
    parts = list(client.completions.create(model=MODEL, prompt=ids, temperature=0, stream=True))
    assert "".join(c.choices[0].text for c in parts) == "48 + 77 = 125"


def test_long_prompt_beyond_the_sparse_selection(client):
    with open(os.path.join(ROOT, "tests/models/tiny-glm52/eval/needle_1k.jsonl"), encoding="utf-8") as f:
        q = json.loads(f.readline())
    r = client.chat.completions.create(model=MODEL, temperature=0, messages=q["messages"],
                                       extra_body={"chat_template_kwargs": {"enable_thinking": q["enable_thinking"]}})
    assert r.usage.prompt_tokens > 800 and r.choices[0].message.content == q["expected"]["content"]


def test_many_at_once_give_the_same_texts(client):
    jobs = [q for q in GOLDEN for _ in range(8)]
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        got = list(pool.map(lambda q: ask(client, q).choices[0].message.content, jobs))
    assert got == [GOLDEN[q] for q in jobs]


def test_models(client, cluster):
    m = client.models.list().data[0]
    assert m.id == MODEL and m.object == "model"
    assert json.loads(cluster.get("/v1/models")[1])["data"][0]["max_model_len"] == 8192


def test_request_id_is_echoed_and_sse_headers(cluster):
    status, headers, text = cluster.post("/v1/chat/completions", chat("Who wrote Hamlet?", stream=True), headers={"X-Request-Id": "abc-1"})
    assert status == 200 and headers["X-Request-Id"] == "abc-1"
    assert headers["Content-Type"].startswith("text/event-stream") and headers["X-Accel-Buffering"] == "no"
    data = events(text)
    assert data[-1] == "[DONE]" and data.count("[DONE]") == 1
    assert [json.loads(d)["choices"][0]["finish_reason"] for d in data[:-1]].count("stop") == 1


def test_probes_and_metrics(cluster):
    assert cluster.get("/live")[0] == cluster.get("/ready")[0] == cluster.get("/health")[0] == 200
    assert "# TYPE baton_router_requests_total counter" in cluster.get("/metrics")[1]
    for name, port in cluster.admin.items():
        assert cluster.get("/live", port=port)[0] == 200, name
        assert "baton_" in cluster.get("/metrics", port=port)[1]
    for name in ("expertd-0", "expertd-1"):
        assert cluster.metric(name, "baton_expert_calls_total") > 0
