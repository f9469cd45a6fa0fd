# SPDX-License-Identifier: Apache-2.0
"""`spexis top`: two scrapes to a snapshot, what is drawn of it, a server that comes and goes."""

import dataclasses
import importlib.util
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from metrics_text import HOST, served, stock
from rich.console import Console

from spexis import cli
from spexis.cli import top, top_view
from spexis.config import ConfigError
from spexis.observability import snapshot as snapshots
from spexis.observability.scrape import parse, quantile
from spexis.observability.snapshot import ROW_KINDS, take_snapshot


def look(before, after, seconds=2.0):
    return take_snapshot(parse(before, 100.0), parse(after, 100.0 + seconds))


BEFORE = stock(generation_tokens=1000, prompt_tokens=500, preemptions=3) + served(
    steps=1000,
    tokens=1000,
    discarded=300,
    drafts={"v1": 900},
    accepted={"v1": 600},
    idle_steps=100,
)
AFTER = stock(
    running=3,
    waiting=5,
    generation_tokens=1200,
    prompt_tokens=540,
    preemptions=4,
    kv_usage=0.5,
    ttft=(1, 3, 0),
    per_token=(90, 10, 0),
) + served(
    steps=1100,
    tokens=1200,
    discarded=360,
    drafts={"v1": 1000, "v2": 80},
    accepted={"v1": 680, "v2": 72},
    held=8,
    prompt=10,
    stale=2,
    idle_steps=105,
)


# -- two scrapes to a snapshot --------------------------------------------------------------------


def test_rates_are_differences_over_the_time_between_looks():
    now = look(BEFORE, AFTER)
    assert now.seconds == 2.0 and not now.restarted and now.notes == ()
    assert (now.models, now.engines) == (("demo",), 1)
    assert (now.running, now.waiting, now.kv_usage) == (3, 5, 0.5)
    assert (now.tokens_per_second, now.prompt_tokens_per_second) == (100, 20)
    assert (now.preemptions, now.preemptions_since_start) == (1, 4)
    assert (now.steps_per_second, now.tokens_per_step) == (50, 2)
    assert now.held_rows_per_second == 4


def test_stages_by_kind():
    now = look(BEFORE, AFTER)
    assert [stage.stage for stage in now.stages] == ["0", "1"]
    for stage in now.stages:
        assert stage.rows == {
            "real": (1200 - 752 - 400) / 2,
            "draft": 152 / 2,
            "discarded": 30,
            "prompt": 5,
            "stale": 1,
        }
        assert stage.idle == 5 / 100


def test_acceptance_by_drafter_version_and_the_law():
    now = look(BEFORE, AFTER)
    first, second = now.drafters
    assert (first.version, first.drafts_per_second, first.acceptance) == ("v1", 50, 0.8)
    assert first.acceptance_since_start == 0.68
    # A version that appeared between the looks is counted from 0.
    assert (second.version, second.acceptance, second.acceptance_since_start) == ("v2", 0.9, 0.9)
    assert now.acceptance == pytest.approx(152 / 180)
    assert now.rows_per_token == (200 + 60) / 200
    assert now.rows_per_token_law == pytest.approx(1 + (1 - 152 / 180))
    assert now.rows_per_token_since_start == (1200 + 360) / 1200


def test_the_law_takes_the_number_of_stages_from_the_series():
    def text(steps, right, n=11):
        stages = tuple(str(i) for i in range(n))
        return served(steps, steps, drafts={"v": steps}, accepted={"v": right}, stages=stages)

    now = look(text(0, 0), text(100, 75))
    assert now.rows_per_token_law == 1 + 0.25 * 10
    assert [stage.stage for stage in now.stages] == [str(i) for i in range(11)]


def test_latencies_of_the_observations_between_looks_only():
    before = stock(ttft=(100, 0, 0), per_token=(0, 0, 7))
    now = look(before, stock(ttft=(101, 3, 0), per_token=(90, 10, 7)))
    assert now.ttft.count == 4
    assert now.ttft.mean == pytest.approx((0.05 + 3 * 0.15) / 4)
    assert now.ttft.p50 == pytest.approx(0.1 + 0.1 / 3)
    assert now.time_per_token.p50 == pytest.approx(0.01 * 50 / 90)
    assert now.time_per_token.p99 == pytest.approx(0.01 + 0.01 * 0.9)
    quiet = look(before, before).ttft
    assert (quiet.count, quiet.mean, quiet.p50, quiet.p99) == (0, None, None, None)


@pytest.mark.parametrize(
    ("buckets", "q", "expected"),
    [
        ([], 0.5, None),
        ([(1.0, 0), (float("inf"), 0)], 0.5, None),
        ([(1.0, 4), (2.0, 4), (float("inf"), 4)], 0.5, 0.5),
        ([(1.0, 0), (2.0, 4), (float("inf"), 4)], 0.25, 1.25),
        ([(1.0, 1), (2.0, 2), (float("inf"), 10)], 0.99, 2.0),
        ([(1.0, 2), (2.0, 2), (3.0, 4), (float("inf"), 4)], 0.75, 2.5),
    ],
)
def test_quantile(buckets, q, expected):
    assert quantile(buckets, q) == expected


def test_several_engines_add_up_and_their_kv_use_is_averaged():
    def text(a, b):
        return stock(generation_tokens=a, kv_usage=0.2) + stock(
            generation_tokens=b, kv_usage=0.4, engine="1"
        )

    now = look(text(10, 20), text(20, 40))
    assert now.engines == 2 and now.tokens_per_second == 15 and now.running == 4
    assert now.kv_usage == pytest.approx(0.3)


def test_nothing_happened_between_looks():
    now = look(BEFORE, BEFORE)
    assert now.tokens_per_second == 0 and now.rows_per_token is None and now.acceptance is None
    assert now.rows_per_token_law is None and now.stages[0].idle is None
    assert now.rows_per_token_since_start == 1.3


@pytest.mark.parametrize("by_start_time", [False, True])
def test_a_restart_counts_from_zero(by_start_time):
    start = "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {}\n"
    small = stock(generation_tokens=60) + served(steps=50, tokens=60)
    before, after = (start.format(1.0) + small, start.format(2.0) + AFTER)
    if not by_start_time:
        before, after = BEFORE, small
    now = look(before, after)
    assert now.restarted and now.tokens_per_second == (600 if by_start_time else 30)
    assert all(rate >= 0 for stage in now.stages for rate in stage.rows.values())
    assert not look(start.format(1.0) + BEFORE, start.format(1.0) + AFTER).restarted


def test_stock_vllm_is_one_plain_line():
    now = look(stock(), stock(generation_tokens=4))
    (note,) = now.notes
    assert note.startswith("no spexis:* series: Spexis is not on in this server")
    assert now.tokens_per_second == 2
    assert now.stages == () and now.drafters == () and now.rows_per_token is None


def test_a_server_without_vllm_series():
    (note,) = look(served(), served(tokens=2)).notes
    assert note.startswith("no vllm:* series")


def test_an_older_version_is_named_by_what_it_lacks():
    def without(text, name):
        return "".join(line for line in text.splitlines(True) if name not in line)

    before, after = (without(t, "held_rows") for t in (BEFORE, AFTER))
    now = look(before, after)
    assert now.notes == ("this server does not export spexis:held_rows_total",)
    assert now.held_rows_per_second is None and now.rows_per_token == 1.3
    before, after = (without(t, "inter_token") for t in (BEFORE, AFTER))
    assert look(before, after).time_per_token is None


def test_series_to_come_are_shown_if_present():
    plain = look(BEFORE, AFTER)
    assert plain.mode is plain.mode_changes is plain.held_requests is None
    assert plain.kv_tokens is plain.lookahead_kv_tokens is None and plain.decision == {}
    more = (
        f'spexis:mode{{{HOST},mode="sp"}} 0\nspexis:mode{{{HOST},mode="sp-alpha"}} 1\n'
        f"spexis:mode_changes_total{{{HOST}}} 2\nspexis:held_requests{{{HOST}}} 3\n"
        f"spexis:kv_tokens{{{HOST}}} 4000\nspexis:lookahead_kv_tokens{{{HOST}}} 5000\n"
        f'spexis:decision{{{HOST},kept="0.9",reason="memory"}} 1\n'
    )
    now = look(BEFORE, AFTER + more)
    assert (now.mode, now.mode_changes, now.held_requests) == ("sp-alpha", 2, 3)
    assert (now.kv_tokens, now.lookahead_kv_tokens) == (4000, 5000)
    assert now.decision == {"kept": "0.9", "reason": "memory"}
    assert look(BEFORE, AFTER + f"spexis:mode{{{HOST}}} 1\n").mode == "1"


def test_looks_in_the_wrong_order():
    with pytest.raises(ValueError, match="not later"):
        look(BEFORE, AFTER, seconds=0.0)


def test_values_that_are_not_finite_are_left_out():
    scrape = parse(f"vllm:kv_cache_usage_perc{{{HOST}}} NaN\nother 1\n", 0.0)
    assert scrape.series == {}


# -- the names ------------------------------------------------------------------------------------


def test_vllm_exports_the_series_that_are_read():
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        pytest.skip("vLLM is not installed")
    source = Path(spec.submodule_search_locations[0], "v1/metrics/loggers.py").read_text()
    for name in snapshots.VLLM_SERIES:
        base = name.removesuffix("_total").removesuffix("_count")
        assert f'"{base}"' in source, name


def test_the_fixture_has_every_series_that_is_read():
    names = set(parse(AFTER, 0.0).series)
    assert names >= {*snapshots.VLLM_SERIES, *snapshots.SPEXIS_SERIES}


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


def test_view_says_restarted_and_shows_what_is_to_come():
    now = dataclasses.replace(
        look(BEFORE, AFTER),
        restarted=True,
        mode="pp",
        mode_changes=2.0,
        held_requests=1.0,
        kv_tokens=4000.0,
        lookahead_kv_tokens=5000.0,
        decision={"reason": "memory"},
    )
    text = drawn(now)
    assert "the server restarted" in text and line(text, "decision") == "decision reason=memory"
    assert line(text, "mode") == "mode pp changes since start 2"
    assert line(text, "KV cache") == "KV cache used 50.0% tokens 4,000 forecast 5,000"
    assert "held 1" in line(text, "requests")


def test_view_takes_names_literally():
    now = dataclasses.replace(look(BEFORE, AFTER), models=("[red]x",), decision={"a": "[b]"})
    text = drawn(now)
    assert "[red]x" in text and "a=[b]" in text


def test_history_is_drawn_from_two_looks_on():
    now = look(BEFORE, AFTER)
    assert "max" not in drawn(now, [now])
    text = drawn(now, [dataclasses.replace(now, tokens_per_second=50.0, running=None), now])
    assert "▅█" in text and "max 100" in text
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
