"""All services on one GPU: prefill and decode as two processes, KV from GPU memory to GPU memory. serve.py BIN FOLDER

BIN holds the daemons; logs go to FOLDER. Needs nothing but Python: asks over HTTP, compares with the held-out answers, and looks at what
the services say of themselves. One line per check; ends with status 1 when one fails."""
import concurrent.futures
import json
import os
import re
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "support"))
os.environ["BATON_BUILD"] = sys.argv[1]

from cluster import ROOT, Cluster, chat  # noqa: E402

EVAL = os.path.join(ROOT, "tests/models/tiny-glm52/eval")
bad = 0


def check(name, good, more=""):
    global bad
    bad += not good
    print(f"{'ok     ' if good else 'FAILED '} {name:56s} {more}", flush=True)


def questions(kind, n):
    with open(os.path.join(EVAL, kind + ".jsonl"), encoding="utf-8") as f:
        return [json.loads(line) for line in f][:n]


def ask(c, q):
    body = {"model": "tiny-glm52", "messages": q["messages"], "temperature": 0, "chat_template_kwargs": {"enable_thinking": q["enable_thinking"]}}
    status, _, text = c.post("/v1/chat/completions", body)
    return json.loads(text)["choices"][0]["message"]["content"] if status == 200 else text


def right(c, kind, n, at_once):
    qs = questions(kind, n)
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        got = list(pool.map(lambda q: ask(c, q), qs))
    wrong = [(q["expected"]["content"], g) for q, g in zip(qs, got) if g != q["expected"]["content"]]
    for w in wrong[:2]:
        print("        expected %r, got %r" % w)
    return len(qs) - len(wrong), len(qs)


def gpu(tp, kv, more=()):
    return ["engine.backend=cuda", f"engine.tp={tp}", f"engine.kv_dtype={kv}", *more]


def place(folder, name):
    path = os.path.join(folder, re.sub(r"\W+", "-", name))
    os.makedirs(path, exist_ok=True)
    return path


def serve(folder, name, options, sets, per_kind, at_once):
    c = Cluster(place(folder, name), options)
    try:
        begin = time.time()
        c.start()
        ready = time.time() - begin
        for service in ("prefill", "decode"):
            line = re.search(r"KV pool.*", c.log(service))
            check(f"{name}: {service}", bool(line) and "of GPU memory" in line[0], line[0] if line else "says nothing of its pool")
        good = total = 0
        begin = time.time()
        for kind in sets:
            g, n = right(c, kind, per_kind, at_once)
            good, total = good + g, total + n
        check(f"{name}: answers", good >= total - max(1, total // 50), f"{good} of {total} in {time.time() - begin:.1f} s, ready after {ready:.1f} s")
        free = c.free_at_rest("decode"), c.free_at_rest("prefill")
        check(f"{name}: pages come back", free == (512, 256), f"{free}")
        check(f"{name}: no damaged transfer", c.metric("decode", "baton_bad_transfers_total") == 0)
        if "Prefill dies" in name:
            prefill_dies(c)
    except AssertionError as e:
        check(f"{name}: runs", False, str(e)[-1500:])
    finally:
        try:
            c.stop()
            check(f"{name}: a clean stop", True)
        except AssertionError as e:
            check(f"{name}: a clean stop", False, str(e)[-1500:])


def prefill_dies(c):
    free = c.free_at_rest("decode")
    c.kill("prefill")
    c.wait_ready(False)
    c.restart("prefill")
    status, _, text = c.post("/v1/chat/completions", chat("Who wrote Hamlet?"))
    check("a prefill that was killed and came back", status == 200 and "William Shakespeare wrote Hamlet." in text, text[:200])
    c.wait_pages_back("decode", free)


def no_way(folder):
    """Without what writes from GPU to GPU, and without leave to take another way, a request fails and says why."""
    o = gpu(1, "bf16", ["kvlink.transports=posix,self,cuda_copy"])
    c = Cluster(place(folder, "no-way"), {"prefill": o, "decode": o})
    try:
        c.start()
        status, _, text = c.post("/v1/chat/completions", chat("Who wrote Hamlet?"))
        check("refused: KV through host memory", status >= 500 and "GPU" in text, f"{status} {text[:160]}")
    finally:
        c.stop()


def refused(folder, name, service, options, want):
    c = Cluster(place(folder, name), {service: options})
    for e in ("expertd-0", "expertd-1"):
        c.spawn(e)
    c.spawn(service)
    try:
        code = c.proc[service].wait(60)
        last = c.log(service).strip().splitlines()[-1]
        check(f"refused: {name}", code == 1 and want in last, last[-220:])
    finally:
        for p in c.proc.values():
            p.kill()


def main():
    folder = sys.argv[2]
    sets = ("facts", "facts_zh", "arith", "json", "list", "lookup", "needle_1k")
    for tp, kv in ((1, "bf16"), (2, "fp8")):
        o = gpu(tp, kv)
        serve(folder, f"tp {tp}, {kv} KV, half of the experts in expertd", {"prefill": o, "decode": o}, sets, 12, 16)
    o = gpu(1, "fp8", ["experts.resident=all"])
    serve(folder, "all experts on the GPU; Prefill dies", {"prefill": o, "decode": o}, sets + ("needle_4k",), 12, 6)
    tcp = gpu(1, "bf16", ["kvlink.transports=tcp,cuda_copy"])
    serve(folder, "through host memory, as configured", {"prefill": tcp, "decode": tcp}, ("facts", "needle_1k"), 8, 8)
    no_way(folder)
    refused(folder, "a pool larger than the GPU", "decode", gpu(1, "bf16", ["engine.pages=16000000"]), "are free")
    refused(folder, "a pool that holds no request", "decode", gpu(1, "bf16", ["engine.pages=8"]), "raise [engine] pages")
    refused(folder, "a link that is too slow", "prefill", gpu(1, "bf16", ["kvlink.min_gb_per_s=100000"]), "min_gb_per_s asks for")
    return 1 if bad else 0


sys.exit(main())
