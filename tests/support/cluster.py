"""A whole Baton on this machine for tests: real daemons from BATON_BUILD, the demo's config files, free ports, one log per daemon."""
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("BATON_BUILD", os.path.join(ROOT, "build/asan"))
SLOW = float(os.environ.get("BATON_TEST_SLOW", "1"))  # factor for deadlines under sanitizers
WRAP = os.environ.get("BATON_TEST_WRAP", "").split()  # command that starts each daemon, such as "setarch -R"
NAMES = ("expertd-0", "expertd-1", "prefill", "decode", "router")


def free_ports(n):
    socks = [socket.socket() for _ in range(n)]
    for s in socks:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in socks]
    for s in socks:
        s.close()
    return ports


class Cluster:
    """start() brings all daemons up; options holds "section.key=value" overrides per daemon, for all its starts."""

    def __init__(self, folder, options=None):
        self.folder = str(folder)
        self.proc = {}
        ports = free_ports(9)
        self.admin = dict(zip(NAMES[:4], ports[:4]))
        self.http = ports[4]
        bus = dict(zip(("prefill", "decode", "expertd-0", "expertd-1"), ports[5:]))
        self.at = at = {n: f"tcp://127.0.0.1:{p}" for n, p in bus.items()}
        experts = f"experts.endpoints={at['expertd-0']},{at['expertd-1']}"
        self.set = {
            "router": [f"http.port={self.http}", f"peers.prefill={at['prefill']}", f"peers.decode={at['decode']}"],
            "prefill": [f"service.endpoint={at['prefill']}", f"admin.port={self.admin['prefill']}", experts],
            "decode": [f"service.endpoint={at['decode']}", f"admin.port={self.admin['decode']}", experts],
        }
        for name in ("expertd-0", "expertd-1"):
            self.set[name] = [f"service.endpoint={at[name]}", f"admin.port={self.admin[name]}"]
        for name, extra in (options or {}).items():
            self.set[name] += extra

    @property
    def url(self):
        return f"http://127.0.0.1:{self.http}"

    def log(self, name):
        with open(os.path.join(self.folder, name + ".log"), errors="replace") as f:
            return f.read()

    def spawn(self, name, like=None):
        """like: the daemon of the demo whose configuration file is taken, when it is not the one of that name."""
        kind = re.sub(r"-\d$", "", like or name)
        args = WRAP + [os.path.join(BUILD, kind, "baton-" + kind), "--config", f"deploy/conf/demo/{like or name}.conf"]
        for o in self.set[name]:
            args += ["--set", o]
        with open(os.path.join(self.folder, name + ".log"), "ab") as log:
            self.proc[name] = subprocess.Popen(args, cwd=ROOT, stderr=log, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def start(self):
        for name in NAMES:
            self.spawn(name)
        self.wait_ready()

    def ready(self):
        try:
            return self.get("/ready", timeout=2)[0] == 200
        except OSError:
            return False

    def wait_ready(self, want=True, seconds=60):
        end = time.time() + seconds * SLOW
        while self.ready() != want:
            for name, p in self.proc.items():
                if want and p.poll() not in (None, -signal.SIGKILL):
                    raise AssertionError(f"{name} ended with {p.returncode}:\n{self.log(name)[-2000:]}")
            assert time.time() < end, f"ready is not {want} after {seconds} s: " + "\n".join(self.log(n)[-600:] for n in self.proc)
            time.sleep(0.05)

    def get(self, path, timeout=10, port=None):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port or self.http}{path}", timeout=timeout) as r:
                return r.status, r.read().decode()
        except urllib.error.HTTPError as e:
            return e.code, e.read().decode()

    def post(self, path, body, timeout=60, headers=None):
        """(status, headers, text) of a POST; body is JSON data or raw bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        req = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **(headers or {})})
        try:
            with urllib.request.urlopen(req, timeout=timeout * SLOW) as r:
                return r.status, r.headers, r.read().decode()
        except urllib.error.HTTPError as e:
            return e.code, e.headers, e.read().decode()

    def metric(self, name, series):
        """Value of a series such as 'baton_kv_pages{state="free"}' of a service."""
        for line in self.get("/metrics", port=self.admin[name])[1].splitlines():
            if line.startswith(series + " "):
                return float(line.split()[-1])
        raise AssertionError(f"{name} has no {series}")

    def pages(self, name, state):
        return self.metric(name, f'baton_kv_pages{{state="{state}"}}')

    def free_at_rest(self, name, seconds=10):
        """Free pages once no request is running: an answer's pages come back just after its last token."""
        end = time.time() + seconds * SLOW
        while self.metric(name, "baton_running_requests"):
            assert time.time() < end, f"{name} does not come to rest"
            time.sleep(0.02)
        return self.pages(name, "free")

    def wait_pages_back(self, name, start, seconds=10):
        """Free pages return to their start value, or quarantine explains the difference."""
        end = time.time() + seconds * SLOW
        while self.pages(name, "free") + self.pages(name, "quarantined") != start:
            assert time.time() < end, f"{name}: {self.pages(name, 'free')} free of {start}"
            time.sleep(0.1)

    def signal(self, name, sig):
        self.proc[name].send_signal(sig)

    def kill(self, name):
        self.proc[name].kill()
        self.proc[name].wait()

    def restart(self, name):
        self.spawn(name)
        self.wait_ready()

    def stop(self):
        """TERM to all; every daemon ends with status 0 within its deadline and has reported nothing like a sanitizer's finding."""
        live = {n: p for n, p in self.proc.items() if p.poll() is None}
        for p in live.values():
            p.send_signal(signal.SIGCONT)
            p.send_signal(signal.SIGTERM)
        bad = []
        for name, p in live.items():
            try:
                code = p.wait(40 * SLOW)
            except subprocess.TimeoutExpired:
                p.kill()
                code = "no end"
            if code != 0:
                bad.append(f"{name} ended with {code}:\n{self.log(name)[-3000:]}")
        for name in self.proc:
            if re.search(r"ERROR: (Address|Leak)Sanitizer|WARNING: ThreadSanitizer|runtime error:", self.log(name)):
                bad.append(f"{name}:\n{self.log(name)[-6000:]}")
        assert not bad, "\n".join(bad)


def chat(content, **more):
    return {"model": "tiny-glm52", "messages": [{"role": "user", "content": content}], "temperature": 0, **more}


def events(text):
    """The data of each SSE event."""
    return [line[6:] for line in text.splitlines() if line.startswith("data: ")]
