"""The status page and /metrics show the values of the learner, and clients cannot disturb the learner."""

from __future__ import annotations

import html
import http.client
import http.server
import io
import json
import math
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cadam.online import Batch, Console, Learner, Rejected, StreamMetrics
from cadam.online.metrics.log_loss import LogLoss
from cadam.online.monitoring import status_server
from cadam.online.monitoring.rejection_reasons import generalize_reason
from cadam.online.monitoring.status_page import RecentLoss, StatusPage, parse_address
from cadam.online.monitoring.status_server import (
    MAX_CONNECTIONS,
    MAX_HISTORY_POINTS,
    SECONDS_PER_CONNECTION,
    SECONDS_UNTIL_UNHEALTHY,
    Status,
)
from tests.cli.test_run import ENVIRONMENT, HERE, command, run
from tests.online.data.test_sources import write_jsonl
from tests.online.streams import Replayed, events, learner, table, weights

prometheus = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")

HOSTILE = "price: <script>document.title = 'taken over'</script> & \"more\""
PAGE = Path(status_server.__file__).with_name("status.html")
RANGE = generalize_reason("item: 0 is not from 0 to 19")


def stream(batches: int = 20) -> Replayed:
    """Batches of 100 events, each with two that are rejected."""
    found: list[Any] = []
    for number in range(batches):
        rejected = [Rejected(reason, "here", "", 0) for reason in (f"item: {number} is not from 0 to 19", HOSTILE)]
        found.append(Batch(events(100, seed=number, first=100 * number), rejected=rejected))
    return Replayed(found)


def served(**options: Any) -> tuple[Learner, StatusPage]:
    report = StatusPage("127.0.0.1:0", "a run", seconds=0)
    return learner(reports=[report], metrics=[StreamMetrics(500)], **options), report


@pytest.fixture(scope="module")
def ended() -> Iterator[tuple[Learner, StatusPage]]:
    """A learner that has seen its stream, with the page still there: its numbers stand still."""
    ours, report = served()
    ours.run(stream())
    wait_for(ours, report, 2000)
    yield ours, report
    ours.close()


def get(report: StatusPage, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(report.server.url.split("/")[2], timeout=60)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def raw(report: StatusPage, request: bytes) -> bytes:
    """The first line of the answer to these bytes."""
    host, port = report.server.url.split("/")[2].split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(request)
        return connection.makefile("rb").readline()


def numbers(report: StatusPage) -> dict[str, float]:
    """Every sample of /metrics by its name and labels."""
    status, text = get(report, "/metrics")
    assert status == 200
    families = prometheus.text_string_to_metric_families(text.decode())
    return {
        " ".join([sample.name, *(f"{name}={value}" for name, value in sample.labels.items())]): sample.value
        for family in families
        for sample in family.samples
    }


def wait_for(ours: Learner, report: StatusPage, events: int) -> dict[str, float]:
    """Report until the server has received `events` events. A message that did not fit in the pipe is sent again."""
    for _ in range(1200):
        report.end(ours)
        found = numbers(report)
        if found.get("cadam_events", 0) >= events:
            return found
        time.sleep(0.05)
    raise AssertionError(f"the server heard of {found.get('cadam_events')} events")


# Content of the page -------------------------------------------------------------------------------------------------


def test_metrics_equal_those_of_the_learner_and_counts_are_counters(ended: tuple[Learner, StatusPage]) -> None:
    ours, report = ended
    found = numbers(report)
    expected = ours.metrics()
    for name in ("log_loss", "best_constant", "labeled", "pending", "events", "rejected"):
        assert found[f"cadam_{name}"] == expected[name]
    for name in ("gauc_by_impressions", "calibration", "log_loss"):
        assert found[f"cadam_{name} scope=window"] == expected[f"{name}/window"]
    assert found["cadam_alignment_over_touched"] == expected["alignment_over_touched"]
    weight = "alignment_over_touched/users.weight"
    assert found["cadam_alignment_over_touched parameter=users.weight"] == expected[weight]
    for reason in (generalize_reason(HOSTILE), RANGE):
        assert found[f"cadam_rejected_total reason={reason}"] == found[f"cadam_rejected reason={reason}"] == 20
    types = {
        line.split()[2]: line.split()[3] for line in get(report, "/metrics")[1].decode().splitlines() if "# T" in line
    }
    assert {name for name, kind in types.items() if kind == "counter"} == {n for n in types if n.endswith("_total")}
    assert types["cadam_events_total"] == "counter"
    assert types["cadam_log_loss"] == types["cadam_events"] == "gauge"


def test_the_page_shows_the_values_of_metrics(ended: tuple[Learner, StatusPage]) -> None:
    _, report = ended
    status = json.loads(get(report, "/status.json")[1])
    told = {" ".join([n, *(f"{k}={v}" for k, v in labels.items())]): value for n, labels, value in status["samples"]}
    assert told == {name: value if np.isfinite(value) else None for name, value in numbers(report).items()}
    assert sorted({point["events"] for point in status["points"]})[-1] == 2000


@pytest.mark.parametrize(("behind", "shown"), [(1e8, "-"), (50.0, "5")])
def test_the_lag_in_metrics_equals_that_on_the_console(behind: float, shown: str) -> None:
    given, console = events(100), io.StringIO()
    assert given.time is not None
    given = replace(given, time=given.time - given.time.max() + time.time() - behind)
    ours, report = served()
    try:
        ours.run(Replayed([Batch(given)]))
        lag = wait_for(ours, report, 100)["cadam_lag_in_seconds"]
        Console(stream=console).end(ours)
    finally:
        ours.close()
    (line,) = [line for line in console.getvalue().splitlines() if line.strip().startswith("100 ")]
    assert line.split()[-1].startswith(shown)
    assert math.isnan(lag) if shown == "-" else 50 <= lag < 60


def test_the_lag_does_not_grow_while_no_events_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    given = events(100)
    assert given.time is not None
    ours = learner()
    assert math.isnan(ours.health()["lag_in_seconds"])
    ours.run(Replayed([Batch(replace(given, time=given.time - given.time.max() + time.time() - 50))]))
    lag = ours.health()["lag_in_seconds"]
    assert 50 <= lag < 60
    later = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: later)
    ours.run(Replayed([None]))
    assert ours.health()["lag_in_seconds"] == lag


def test_counters_start_at_0_with_the_process_and_gauges_continue(tmp_path: Path) -> None:
    source = stream()
    first, report = served(checkpoint=tmp_path)
    first.run(source, events=1000)
    first.close()
    second, report = served(checkpoint=tmp_path)
    second.run(source)
    found = wait_for(second, report, 2000)
    second.close()
    assert (found["cadam_events"], found["cadam_events_total"]) == (2000, 1000)
    assert (found["cadam_rejected"], found[f"cadam_rejected_total reason={RANGE}"]) == (40, 10)
    assert found[f"cadam_rejected reason={RANGE}"] == 20


def test_health_depends_on_the_time_of_the_last_message(ended: tuple[Learner, StatusPage]) -> None:
    status, body = get(ended[1], "/healthz")
    assert status == 200
    assert json.loads(body)["status"] == "ok"
    silent = Status()
    silent.time_of_message -= SECONDS_UNTIL_UNHEALTHY + 1
    assert silent.health()[0] == 503


def test_the_history_covers_the_whole_run_with_few_points() -> None:
    status = Status()
    for number in range(5000):
        status.add(json.dumps({"metrics": "", "status": {}, "point": {"events": number}}).encode())
    seen = [point["events"] for point in status.points]
    assert seen[0] == 0
    assert seen[-1] > 4980
    assert MAX_HISTORY_POINTS / 2 <= len(seen) <= MAX_HISTORY_POINTS
    assert len({after - before for before, after in pairwise(seen)}) == 1


def test_the_page_compares_the_model_with_the_best_constant_of_the_last_labels() -> None:
    """After a bad beginning, the total would show a bad model for a long time."""
    recent, total = RecentLoss(labels=1000), LogLoss()
    stand_in: Any = SimpleNamespace(log_loss=total, resumed_at=0)
    for number in range(200):
        total.count += 100
        total.weight += 100
        total.positives += 50 if number < 100 else 10
        total.loss += 100.0 if number < 100 else 20.0
        window = recent.advance(stand_in)
        assert min(total.count, 1000) <= window.count <= 1100
    assert window.mean == pytest.approx(0.2)
    assert window.rate == pytest.approx(0.1)
    resumed = RecentLoss(labels=1000)
    stand_in.resumed_at = 20_000
    assert resumed.advance(stand_in).count == 0


# In a browser ----------------------------------------------------------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def dump_page(url: str, folder: Path) -> str:
    """Return the document of a page after its scripts have run."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000", "--dump-dom"]
    command = [str(BROWSER), *options, f"--user-data-dir={folder}", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.skipif(BROWSER is None, reason="no browser: neither chromium nor google-chrome is on the path")
@pytest.mark.parametrize(
    ("alert", "diverged", "banner"),
    [
        (0, 0, None),
        (1, 0, "The log loss has risen, so version 500 is served"),
        (0, 1, "The model has diverged and learning has stopped. Version 500 is served"),
    ],
)
def test_the_page_of_a_service_shows_alerts_and_challengers(
    tmp_path: Path, alert: int, diverged: int, banner: str | None
) -> None:
    loss = {"cadam_recent_log_loss": 0.5, "cadam_recent_best_constant": 0.6, "cadam_events": 900, "cadam_learned": 800}
    guard = {"cadam_guard_alert": alert, "cadam_guard_enabled": 1, "cadam_diverged": diverged, "cadam_rollbacks": 0}
    samples: list[Any] = [[name, {}, value] for name, value in {**loss, **guard}.items()]
    samples.append(["cadam_served_version", {"version": "500"}, 1])
    samples.append(["cadam_champion", {"optimizer": "CAdam"}, 1])
    for name, verdict, low, high in (("A", 0, -2, -1), ("B", 0, 1, 2), ("C", 0, -1, 1), ("D", 1, -2, -1)):
        samples.append(["cadam_challenger_verdict", {"optimizer": name}, verdict])
        for value, number in (("mean", (low + high) / 2), ("low", low), ("high", high)):
            samples.append(["cadam_challenger_difference", {"optimizer": name, "value": value}, number])
    status = {"title": "a service", "samples": samples, "points": [], "silent": 0, "started": 0}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_page = self.path == "/"
            content = PAGE.read_bytes() if is_page else json.dumps(status).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if is_page else "application/json")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = dump_page(f"http://127.0.0.1:{server.server_port}/", tmp_path)
        server.shutdown()
    shown = re.search(r'id="alert" role="alert"( hidden="")?>([^<]*)<', page)
    assert shown is not None
    assert (shown[1] is None) == (banner is not None)
    assert (">of the learner, which is not served<" in page) == (banner is not None)
    assert (">16.7% better than the best constant<" in page) == (banner is None)
    assert shown[2].startswith(banner) if banner is not None else not shown[2]
    verdicts = re.findall(r'data-name="verdict"[^>]*>([^<]*)<', page)
    assert verdicts == [
        "verdict",
        "champion",
        "better so far, undecided",
        "worse so far, undecided",
        "undecided",
        "better",
    ]


@pytest.mark.skipif(BROWSER is None, reason="no browser: neither chromium nor google-chrome is on the path")
def test_a_browser_shows_the_metrics_and_runs_no_script_from_the_data(
    ended: tuple[Learner, StatusPage], tmp_path: Path
) -> None:
    ours, report = ended
    page = dump_page(report.server.url, tmp_path)
    shown = {
        html.unescape(name): float(value)
        for name, value in re.findall(r'data-metric="([^"]*)" data-value="([^"]+)"', page)
    }
    found = numbers(report)
    assert len(shown) == 9  # a stream of long ago has no lag
    for name, value in shown.items():
        if name not in ("cadam_events_a_second", "cadam_lag_in_seconds"):
            assert value == found[re.sub(r'\{(\w+)="([^"]*)"\}', r" \1=\2", name)]
    assert f">{ours.metrics()['log_loss']:.4f}<" in page  # the recent labels are all of them
    assert "<title>a run</title>" in page
    assert "price: &lt;script&gt;" in page
    assert page.count("<polyline") >= 4
    captions = re.findall(r'<div class="scale">(.*?)</div>', page)
    assert [text.count("<span") for text in captions] == [2] * len(captions)  # a third would not fit beside them


# Hostile and slow clients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"GET //etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"GET /status.html HTTP/1.1\r\n\r\n", 404),
        (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 405),
        (b"DELETE /metrics HTTP/1.1\r\n\r\n", 405),
        (b"PUT /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 405),
        (b"OPTIONS * HTTP/1.1\r\n\r\n", 405),
        (b"\x16\x03\x01 garbage \xff\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: elsewhere.example\r\n\r\n", 403),
    ],
    ids=lambda value: value[:30].decode("latin-1").strip() if isinstance(value, bytes) else str(value),
)
def test_a_hostile_request_is_rejected_and_the_next_one_answered(
    request_: bytes, status: int, ended: tuple[Learner, StatusPage]
) -> None:
    _, report = ended
    assert raw(report, request_).split()[1] == str(status).encode()
    assert get(report, "/healthz")[0] == 200


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 10_000_000 + b"\r\n\r\n", 431),
        (b"G" * 10_000_000, 414),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 100_000 + b"\r\n", 431),
        (b"\r\n\r\n", None),
    ],
    ids=["header line", "request line", "number of headers", "empty"],
)
def test_an_oversized_or_empty_request_is_cut_off_and_the_next_one_answered(
    request_: bytes, status: int | None, ended: tuple[Learner, StatusPage]
) -> None:
    """The server reads a bounded part of a request. It closes the connection before the client has sent the rest."""
    _, report = ended
    with suppress(ConnectionError):
        line = raw(report, request_)
        assert not line if status is None else line.split()[1] == str(status).encode()
    assert get(report, "/healthz")[0] == 200


def test_a_head_request_gets_the_headers_alone(ended: tuple[Learner, StatusPage]) -> None:
    connection = http.client.HTTPConnection(ended[1].server.url.split("/")[2], timeout=60)
    connection.request("HEAD", "/")
    answer = connection.getresponse()
    assert int(answer.headers["Content-Length"]) > 1000
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert answer.read() == b""
    connection.close()


def test_slow_clients_keep_nobody_waiting() -> None:
    """Sixty clients send an incomplete request or do not read the answer; the learner and another client continue."""
    ours, report = served()
    ours.run(stream(5))
    wait_for(ours, report, 500)
    host, port = report.server.url.split("/")[2].split(":")
    slow = []
    for number in range(60):
        connection = socket.create_connection((host, int(port)), timeout=60)
        connection.sendall(b"GET /status.json HTTP/1.1\r\n" + (b"\r\n" if number % 2 else b"X: "))
        slow.append(connection)
    assert get(report, "/healthz")[0] == 200
    ours.run(stream(10))
    assert wait_for(ours, report, 1500)["cadam_events"] == 1500
    for connection in slow:
        connection.close()
    ours.close()


def test_idle_connections_do_not_affect_the_health_check() -> None:
    """A new connection replaces the oldest one, so the number of threads and of open sockets stays the same."""
    ours, report = served()
    host, port = report.server.url.split("/")[2].split(":")
    idle = []
    for _ in range(5 * MAX_CONNECTIONS):
        idle.append(socket.create_connection((host, int(port)), timeout=60))
        idle[-1].sendall(b"GET / HTTP/1.1\r\nX: ")
    assert get(report, "/healthz")[0] == 200
    process = Path("/proc", str(report.server.process.pid))
    assert len(list((process / "task").iterdir())) <= MAX_CONNECTIONS + 2
    assert len(list((process / "fd").iterdir())) <= MAX_CONNECTIONS + 10
    assert idle[0].recv(1) == b""
    for connection in idle:
        connection.close()
    ours.close()


def test_slow_connections_are_closed() -> None:
    """A connection is closed when its time is over, though it sends something."""
    ours, report = served()
    host, port = report.server.url.split("/")[2].split(":")
    started = time.monotonic()
    is_open = True
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX: ")
        while is_open and time.monotonic() - started < 60:
            time.sleep(0.2)
            try:
                connection.sendall(b"x")
            except ConnectionError:
                is_open = False
    assert not is_open
    assert time.monotonic() - started > 0.9 * SECONDS_PER_CONNECTION
    ours.close()


def test_a_dead_or_stopped_server_does_not_block_the_learner(caplog: pytest.LogCaptureFixture) -> None:
    ours, report = served()
    report.server.process.send_signal(signal.SIGSTOP)
    ours.run(Replayed([one for _ in range(40) for one in stream(20).batches]))  # more than the pipe takes
    assert ours.events == 80_000
    assert report.server.unsent
    report.server.process.send_signal(signal.SIGCONT)
    report.server.process.kill()
    report.server.process.wait()
    ours.run(stream(5))
    ours.run(stream(5))
    assert caplog.text.count("the status page has ended; learning continues without it") == 1
    ours.close()


# The learner's bits ----------------------------------------------------------------------------------------------


def test_the_page_does_not_change_any_bit_of_the_model() -> None:
    watched, report = served()
    watched.run(stream())
    for path in ("/", "/metrics", "/status.json", "/healthz", "/../x"):
        get(report, path)
    watched.close()
    alone = learner(metrics=[StreamMetrics(500)])
    alone.run(stream())
    assert weights(watched) == weights(alone)
    assert watched.metrics() == alone.metrics()


def test_a_killed_run_with_a_page_resumes_to_the_same_bits_and_its_server_ends(
    tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_jsonl(tmp_path / "a.jsonl", table(4000))
    data = ("--data", f"jsonl:{tmp_path / 'a.jsonl'}", "--patience", "inf", "--lr", 0.01, "--batch-size", 50)
    arguments = command(*data, "--checkpoint", tmp_path / "killed", "--every", 500, "--status", "0")
    with subprocess.Popen([*arguments, "--follow"], env=ENVIRONMENT, stderr=-1, text=True) as process:
        assert process.stderr is not None
        url = next(line for line in process.stderr if "status page: " in line).split()[-1]
        address = url.split("/")[2]
        for _ in range(3000):  # wait until it has learned some events
            connection = http.client.HTTPConnection(address, timeout=60)
            connection.request("GET", "/status.json")
            samples = json.loads(connection.getresponse().read()).get("samples", [])
            connection.close()
            if any(name == "cadam_events" and value for name, _, value in samples):
                break
            time.sleep(0.02)
        held = http.client.HTTPConnection(address, timeout=60)  # a browser that stays does not hold it
        held.request("GET", "/")
        held.getresponse().read()
        process.kill()
    for _ in range(1200):
        try:
            socket.create_connection(tuple(address.split(":")), timeout=60).close()  # type: ignore[arg-type]
        except ConnectionRefusedError:
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the server of a killed run still answers")
    for folder, more in (("killed", ("--status", "0")), ("whole", ())):
        assert run(*data, "--checkpoint", tmp_path / folder, "--every", 500, "--quiet", *more) == 0
    states = []
    for folder in ("killed", "whole"):
        ours = learner(checkpoint=tmp_path / folder)
        assert ours.resume()
        states.append((weights(ours), ours.metrics()))
        ours.close()
    assert states[0] == states[1]
    assert states[0][1]["events"] == 4000


# Where it is -----------------------------------------------------------------------------------------------------


def test_an_address_without_a_host_is_loopback() -> None:
    assert parse_address("8000") == parse_address(":8000") == ("127.0.0.1", 8000)
    assert parse_address("0.0.0.0:80") == ("0.0.0.0", 80)
    assert parse_address("[::1]:80") == ("::1", 80)
    for wrong in ("", "host", "1:x", "65536", "-1", "8000/"):
        with pytest.raises(ValueError, match=r"should be \[HOST:\]PORT"):
            parse_address(wrong)


def test_only_a_public_address_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for address in ("0", "localhost:0", "0.0.0.0:0"):
        StatusPage(address, "a run").close()
    assert [record.levelname for record in caplog.records if "password" in record.getMessage()] == ["WARNING"]


def test_a_port_in_use_is_reported_before_anything_is_learned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_jsonl(tmp_path / "a.jsonl", table(10))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ("--data", f"jsonl:{tmp_path / 'a.jsonl'}", "--checkpoint", tmp_path / "state", "--status", port)
        assert run(*words) == 2
    assert f"--status {port}: Address already in use; give another HOST:PORT" in capsys.readouterr().err
    assert not list(tmp_path.glob("state/*.safetensors"))
