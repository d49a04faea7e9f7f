"""Where experts are computed changes no answer: every strategy, a record that becomes a placement, residents that follow use while requests
run; and expertds that do not hold what is needed are refused, at the start and when they come back."""
import json
import time

import pytest

from cluster import SLOW, Cluster, chat
from test_answers import GOLDEN
from test_packed import ANSWERS, FP8, MIXED, int4, pack  # noqa: F401

SERVICES = ("prefill", "decode")
ACTIVE = 4  # experts of a token
EXPERTDS = ("expertd-0", "expertd-1")
NONE = {n: ["experts.device=none"] for n in EXPERTDS}


def ask_all(c, golden=None):
    for question, answer in (golden or GOLDEN).items():
        status, _, text = c.post("/v1/chat/completions", chat(question))
        assert status == 200 and json.loads(text)["choices"][0]["message"]["content"] == answer


def running(folder, services):
    """A cluster whose services have these options of [experts] and whose expertds hold everything."""
    return Cluster(folder, {**NONE, **{n: [f"experts.{o}" for o in services(n)] for n in SERVICES}})


def answers(folder, services):
    c = running(folder, services)
    try:
        c.start()
        ask_all(c)
    finally:
        c.stop()
    return c


def remote_share(c, name):
    remote, resident = (c.metric(name, f'baton_expert_pairs_total{{where="{w}"}}') for w in ("remote", "resident"))
    return remote / (remote + resident)


def test_a_record_becomes_a_placement(tmp_path):
    record = {n: tmp_path / f"{n}.json" for n in SERVICES}
    answers(tmp_path, lambda n: [f"record={record[n]}", "resident=none"])
    for n in SERVICES:
        counts = json.loads(record[n].read_text())
        assert counts["tokens"] > 20 and len(counts["model_id"]) == 16
        assert sorted(counts["layers"]) == [str(i) for i in range(1, 9)]
        mtp = counts["layers"].pop("8")
        assert sum(mtp) == 0 and {sum(row) for row in counts["layers"].values()} == {counts["tokens"] * ACTIVE}
    answers(tmp_path, lambda n: ["strategy=frequency", "resident=5", f"counts={record[n]}"])
    # A record goes on from what it has, but not from that of another model.
    before = json.loads(record["decode"].read_text())["tokens"]
    answers(tmp_path, lambda n: [f"record={record[n]}", "strategy=front", "resident=5"])
    assert json.loads(record["decode"].read_text())["tokens"] > before
    other = json.loads(record["decode"].read_text())
    record["decode"].write_text(json.dumps({**other, "model_id": "0" * 16}))
    c = running(tmp_path, lambda n: [f"record={record[n]}"])
    refused(c, "decode", "model_id: counts of model 0000000000000000, this is " + other["model_id"])


def test_two_services_do_not_share_a_record(tmp_path):
    record = tmp_path / "counts.json"
    c = running(tmp_path, lambda n: [f"record={record}"])
    try:
        for n in (*EXPERTDS, "prefill"):
            c.spawn(n)
        end = time.time() + 60 * SLOW
        while not all("listens on" in c.log(n) for n in c.proc):
            assert time.time() < end
            time.sleep(0.05)
        c.spawn("decode")
        assert c.proc["decode"].wait(60 * SLOW) == 1
        assert f"[experts] record: {record}: process {c.proc['prefill'].pid} writes it already" in c.log("decode")
        del c.proc["decode"]
    finally:
        c.stop()


def test_a_placement_file(tmp_path):
    place = tmp_path / "placement"
    place.write_text("# hand made\n1: 0-15\n2: 3, 5-7\n7: 15\n")
    answers(tmp_path, lambda n: ["strategy=file", f"placement={place}"])


def test_residents_follow_use_while_requests_run(tmp_path):
    c = running(tmp_path, lambda n: ["resident=4", "update_ms=100"])
    try:
        c.start()
        end = time.time() + 60 * SLOW
        while min(c.metric(n, "baton_expert_changes_total") for n in SERVICES) < 8:
            assert time.time() < end, "no experts came"
            ask_all(c)
        ask_all(c)
        time.sleep(1.5)  # metrics follow each second
        assert 0 < remote_share(c, "decode") < 1
        line = next(x for x in c.log("decode").splitlines() if "came" in x)
        assert "remote share of recent use 0." in line and "experts of layer" in line
    finally:
        c.stop()


def test_changes_between_formats_are_announced(int4, tmp_path):
    packed = ["model.dir=", f"experts.files={int4}", "experts.device=none"]
    c = Cluster(tmp_path, {**{n: packed for n in EXPERTDS}, "decode": ["experts.resident=4", "experts.update_ms=200"]})
    try:
        c.start()
        ask_all(c, ANSWERS)
        assert "expertd-0 computes experts as int4-g64" in c.log("decode")
        assert "computes experts as" not in c.log("prefill")  # its residents do not change
    finally:
        c.stop()


def refused(c, name, reason, with_experts=False):
    """The service ends with status 1 and this reason in its log."""
    try:
        for n in (*(EXPERTDS if with_experts else ()), name):
            c.spawn(n)
        assert c.proc[name].wait(60 * SLOW) == 1
        assert reason in c.log(name)
        del c.proc[name]
    finally:
        c.stop()


@pytest.mark.parametrize("options,expert", [(["resident=3"], 3), (["resident=8", "update_ms=1s"], 0)])
def test_expertds_that_lack_experts_are_refused(tmp_path, options, expert):
    c = Cluster(tmp_path, {"decode": [f"experts.{o}" for o in options]})
    refused(c, "decode", f"expertd-0 does not hold expert {expert} of layer 1, which is not resident here", with_experts=True)


@pytest.mark.parametrize("options,reason", [
    (["strategy=front", "resident=17"], "expected all, none or 0 to 16"),
    (["strategy=frequency"], "recorded counts"),
    (["strategy=file", "placement=/no/such/file"], "/no/such/file: No such file"),
])
def test_placements_that_cannot_be_are_refused(tmp_path, options, reason):
    refused(Cluster(tmp_path, {"decode": [f"experts.{o}" for o in options]}), "decode", reason)


def test_refused_when_it_comes_back_with_less(tmp_path):
    c = Cluster(tmp_path)
    try:
        c.start()
        ask_all(c)
        c.kill("expertd-1")
        c.set["expertd-1"].append("experts.device=9")
        c.spawn("expertd-1")
        c.wait_ready(False)
        end = time.time() + 30 * SLOW
        while "expertd-1 does not hold expert 8 of layer 1" not in c.get("/ready", port=c.admin["decode"])[1]:
            assert time.time() < end, c.get("/ready", port=c.admin["decode"])[1]
            time.sleep(0.1)
        c.kill("expertd-1")
        c.set["expertd-1"].append("experts.device=8")
        c.restart("expertd-1")
        ask_all(c)
        assert "expertd-1 is back: shard 1, checkpoint" in c.log("decode")
    finally:
        c.stop()


def test_refused_when_it_comes_back_with_other_experts(int4, tmp_path):
    """Of another format; then of the same format, but other files: not ready, by name in the log, until the first ones are back."""
    def serves(what):
        return ["model.dir=", f"experts.files={what}", "experts.device=none"]

    for folder, more in (("int8", (FP8, "--bits", 8)), ("other", (MIXED,))):
        assert pack(tmp_path / folder, *more, "--group", 64).returncode == 0
    c = Cluster(tmp_path, {**{n: serves(int4) for n in EXPERTDS}, **{n: ["experts.resident=none"] for n in SERVICES}})
    begin = list(c.set["expertd-1"])
    try:
        c.start()
        ask_all(c, ANSWERS)
        for files, reason in (("int8", "computes experts as int8-g64-f16, before it was int4-g64-f16"), ("other", "has other expert files")):
            c.kill("expertd-1")
            c.set["expertd-1"] = begin + serves(tmp_path / files)
            c.spawn("expertd-1")
            c.wait_ready(False)
            end = time.time() + 30 * SLOW
            while not all(reason in c.log(n) and reason in c.get("/ready", port=c.admin[n])[1] for n in SERVICES):
                assert time.time() < end, c.log("decode")[-1000:]
                time.sleep(0.1)
            assert not c.ready() and c.log("decode").count(f"cannot be used: expertd at {c.at['expertd-1']}: {reason[:9]}") == 1
        c.kill("expertd-1")
        c.set["expertd-1"] = begin
        c.restart("expertd-1")
        ask_all(c, ANSWERS)
    finally:
        c.stop()
