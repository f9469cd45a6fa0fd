# SPDX-License-Identifier: Apache-2.0
"""`spexis top`: what is drawn of a snapshot, the command, a server that comes and goes."""

import dataclasses
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from metrics_text import AFTER, BEFORE, look, stock
from rich.console import Console

from spexis import cli
from spexis.cli import top, top_view
from spexis.config import ConfigError
from spexis.observability.scrape import parse
from spexis.observability.snapshot import ROW_KINDS, Decided

# -- drawing --------------------------------------------------------------------------------------


def drawn(now, history=(), width=100, **options):
    console = Console(file=io.StringIO(), width=width)
    console.print(top_view.view(now, history, "http://h/metrics", **options))
    return console.file.getvalue()


def line(text, start):
    (found,) = (one for one in text.splitlines() if one.split("  ")[0].strip() == start)
    return " ".join(found.split())


def test_view_shows_the_figures():
    text = drawn(look(BEFORE, AFTER))
    assert "http://h/metrics demo over 2.0 s" in " ".join(text.split())
    assert line(text, "requests") == ("requests running 3 waiting 5 preemptions 1 since start 4")
    assert line(text, "tokens/s") == "tokens/s generated 100 prompt 20.0"
    assert line(text, "first token").startswith("first token mean 125.0 ms p50 133.3 ms")
    assert line(text, "KV cache") == "KV cache used 50.0%"
    assert line(text, "rows/token") == ("rows/token 1.30 law 1.16 since start 1.30 held rows/s 4.0")
    assert line(text, "v1") == "v1 50.0 80.0% 68.0%"
    assert text.count("76.0/s") == 2, "kept drafts of both stages"


def test_view_of_stock_vllm_is_short_and_says_why():
    text = drawn(look(stock(), stock(generation_tokens=4)))
    assert "Spexis is not on in this server" in text
    assert "stage" not in text and "law" not in text and "None" not in text


def test_view_says_restarted_and_what_policies_do():
    now = dataclasses.replace(
        look(BEFORE, AFTER),
        restarted=True,
        plain_share=0.75,
        mode_changes=2.0,
        held_requests=1.0,
        kv_tokens=4000.0,
        lookahead_kv_tokens=5000.0,
        lookahead_steps=32,
        due_kv_tokens=4200.0,
        came_kv_tokens=3900.0,
        forecasts=40.0,
        forecasts_exceeded=0.05,
        decisions=(Decided(policy="lookahead", choice="wait", reason="peak_above_memory"),),
    )
    text = drawn(now)
    assert "the server restarted" in text
    assert line(text, "lookahead") == "lookahead wait peak above memory"
    assert line(text, "speculation") == "speculation on 25.0% of steps changes since start 2"
    assert line(text, "KV cache") == "KV cache used 50.0% tokens 4,000"
    assert line(text, "KV forecast") == (
        "KV forecast at most 5,000 in 32 steps due now 4,200 came 3,900 too low 5.0% of 40"
    )
    early = drawn(dataclasses.replace(now, forecasts=0.0, forecasts_exceeded=None))
    assert "due now - came - too low - of 0" in line(early, "KV forecast")
    assert "held 1" in line(text, "requests")


def test_view_takes_names_literally():
    now = dataclasses.replace(look(BEFORE, AFTER), models=("[red]x", "[b]"))
    assert "[red]x, [b]" in drawn(now)


def test_history_is_drawn_from_two_looks_on():
    now = look(BEFORE, AFTER)
    assert "max" not in drawn(now, [now])
    text = drawn(now, [dataclasses.replace(now, tokens_per_second=50.0, running=None), now])
    assert "▅█" in text and "max 100" in text
    seen = [dataclasses.replace(now, due_kv_tokens=8e3, came_kv_tokens=c) for c in (8e3, 4e3)]
    text = drawn(now, seen)
    assert line(text, "KV due") == "KV due ██ max 8,000"
    assert line(text, "KV came") == "KV came █▅ max 8,000", "on the forecast's scale"
    plain = drawn(now, [now, now], ascii_only=True)
    assert "@@" in plain and plain.isascii()


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([None, None], "  "),
        ([0, 0.0], "▁▁"),
        ([0, 7, None, 3.5], "▁█ ▅"),
        ([1e-9], "█"),
    ],
)
def test_sparkline(values, line):
    assert top_view.sparkline(values) == line


@pytest.mark.parametrize("width", [1, 7, 24, 100])
def test_bar_parts_fill_the_bar(width):
    stage = look(BEFORE, AFTER).stages[0]
    parts = top_view.bar_parts(stage, width)
    assert sum(parts.values()) == width and min(parts.values()) >= 0
    assert abs(parts["idle"] - 0.05 * width) <= 1
    assert set(parts) == {*ROW_KINDS, "idle"} == set(top_view.KINDS)
    idle = dataclasses.replace(stage, rows=dict.fromkeys(ROW_KINDS, 0.0))
    assert top_view.bar_parts(idle) == {}


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("localhost:8000", "http://localhost:8000/metrics"),
        ("http://h:1/", "http://h:1/metrics"),
        ("http://h:1/v1", "http://h:1/metrics"),
        ("https://h/metrics", "https://h/metrics"),
        ("https://h/proxied/a", "https://h/proxied/a/metrics"),
        ("[::1]:8000", "http://[::1]:8000/metrics"),
    ],
)
def test_metrics_url(given, url):
    assert top.metrics_url(given) == url


@pytest.mark.parametrize(
    "url", ["", "ftp://h", "http://", "h:port", "h:99999", "file:///etc/hosts"]
)
def test_no_address(url):
    with pytest.raises(ConfigError, match="no address of a server"):
        top.metrics_url(url)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--json"], "--json needs --once"),
        (["--interval", "0"], "--interval 0: allowed is 0.1 to 3600 s"),
        (["--interval", "nan"], "--interval nan"),
    ],
)
def test_mistakes_are_one_line(argv, words, capsys):
    assert cli.main(["top", "h:1", *argv]) == 2
    assert words in capsys.readouterr().err


class Server:
    """Answers each request for /metrics with the next of `answers`, the last one for ever."""

    def __init__(self):
        self.answers, self.status = [], 200
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                text = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
                self.send_response(server.status if self.path == "/metrics" else 404)
                self.end_headers()
                self.wfile.write(text if isinstance(text, bytes) else text.encode())

            def log_message(self, *args):
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)
        self.thread.start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server(monkeypatch):
    # A proxy that is not there: the server must be asked without.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server = Server()
    yield server
    server.close()


def test_once(server, capsys):
    server.answers = [BEFORE, AFTER]
    assert cli.main(["top", server.url, "--once", "--interval", "0.1"]) == 0
    printed = capsys.readouterr()
    assert "running 3" in printed.out and not printed.err


def test_once_json(server, capsys):
    server.answers = [BEFORE, AFTER]
    assert cli.main(["top", server.url, "--once", "--json", "--interval", "0.1"]) == 0
    (text,) = capsys.readouterr().out.splitlines()
    block = json.loads(text)
    assert block["ok"] and block["name"] == "top" and block["url"] == f"{server.url}/metrics"
    assert block["running"] == 3 and block["rows_per_token"] == 1.3
    assert block["drafters"][1]["version"] == "v2" and block["ttft"]["count"] == 4
    assert block["stages"][0]["idle"] == 0.05


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ("{}", 404, "answers 404"),
        ("<html><body>hello there</body></html>", 200, "something else than metrics"),
        (b"\xff\xfe\x00", 200, "something else than metrics"),
    ],
)
def test_once_with_a_server_that_has_no_metrics(server, capsys, answer, status, words):
    server.answers, server.status = [answer], status
    assert cli.main(["top", server.url, "--once"]) == 1
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_once_without_a_server(server, capsys):
    server.close()
    assert cli.main(["top", server.url, "--once"]) == 1
    printed = capsys.readouterr()
    assert "cannot be reached: " in printed.err and printed.err.count("\n") == 1
    assert cli.main(["top", server.url, "--once", "--json"]) == 1
    block = json.loads(capsys.readouterr().out)
    assert not block["ok"] and "cannot be reached" in block["error"]


class Script:
    """Scrapes one after the other (None: the server is gone), then Ctrl-C."""

    def __init__(self, *texts):
        self.texts, self.time = list(texts), 0.0

    def read(self):
        text = self.texts.pop(0)
        self.time += 2.0
        if text is None:
            raise top.Unreachable("http://h/metrics cannot be reached: refused")
        return parse(text, self.time)

    def sleep(self, seconds):
        assert seconds == 2.0
        if not self.texts:
            raise KeyboardInterrupt


def watched(script, **options):
    console = Console(file=io.StringIO(), width=100, **options)
    with pytest.raises(KeyboardInterrupt):
        top.watch(script.read, "http://h/metrics", 2.0, console, script.sleep)
    return console.file.getvalue()


def test_a_server_that_goes_and_comes_back():
    text = watched(Script(None, None, BEFORE, AFTER, None, None, BEFORE, AFTER))
    assert text.count("asked again every 2 s") == 2, "once an outage"
    assert text.count("running 3") == 2 and text.count("restarted") == 0
    assert text.count("max 100") >= 1, "the history goes on over the outage"


def test_a_server_that_restarts_between_looks():
    text = watched(Script(BEFORE, AFTER, BEFORE, AFTER))
    assert text.count("the server restarted") == 1 and text.count("running") >= 3


def test_what_grew_during_an_outage_is_no_rate():
    looks, script = top.Looks(), Script(BEFORE, None, AFTER, AFTER)
    assert [looks.look(script.read) for _ in range(3)] == [None, None, None]
    assert looks.error is None and looks.look(script.read).tokens_per_second == 0


def test_history_is_bounded():
    looks, script = top.Looks(), Script(*[BEFORE] * (top.HISTORY + 10))
    for _ in range(top.HISTORY + 10):
        looks.look(script.read)
    assert len(looks.history) == top.HISTORY


def test_live_on_a_terminal_shows_one_line_for_a_server_that_is_gone():
    text = watched(Script(BEFORE, AFTER, None), force_terminal=True)
    assert "\x1b[?1049h" in text and "\x1b[?1049l" in text, "the screen is given back"
    assert "running 3" in text and "asked again every 2 s" in text


def test_ctrl_c_ends_quietly(server, monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(top, "watch", interrupt)
    assert cli.main(["top", server.url]) == 0
    printed = capsys.readouterr()
    assert not printed.out and not printed.err
