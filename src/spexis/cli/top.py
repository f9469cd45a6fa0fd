# SPDX-License-Identifier: Apache-2.0
"""`spexis top URL`: a live view of a running server, from its /metrics alone.

    spexis top http://localhost:8000          # or host:port, or the address of its /metrics
    spexis top localhost:8000 --once --json   # one look, for scripts

Series and what to do about them: docs/metrics.md. Ctrl-C ends. With --once the exit code is 0, or 1
and one line if the server cannot be reached. Where the output is no terminal, looks follow each
other.

Invariant: reads one address, changes nothing on the server; a server that goes away is one line,
and is asked again at the next interval.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import json
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence

from spexis.config import ConfigError
from spexis.observability.scrape import Scrape, parse
from spexis.observability.snapshot import Snapshot, take_snapshot

TIMEOUT = 10.0  # seconds; a busy front end answers late
HISTORY = 60  # looks
INTERVALS = (0.1, 3600.0)  # seconds


class Unreachable(Exception):
    """One line: what is wrong with the server's answer, or that there is none."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="spexis top", description="A live view of a running server, from its /metrics."
    )
    parser.add_argument("url", metavar="URL", help="of the server, e.g. http://localhost:8000")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between looks")
    parser.add_argument("--once", action="store_true", help="one look, then exit")
    parser.add_argument("--json", action="store_true", help="with --once: one JSON line")
    options = parser.parse_args(list(argv))
    low, high = INTERVALS
    if not low <= options.interval <= high:
        raise ConfigError(f"--interval {options.interval:g}: allowed is {low:g} to {high:g} s")
    if options.json and not options.once:
        raise ConfigError("--json needs --once")
    url = metrics_url(options.url)
    try:
        if options.once:
            return once(lambda: fetch(url), url, options.interval, options.json)
        watch(lambda: fetch(url), url, options.interval)
    except KeyboardInterrupt:
        pass
    return 0


def metrics_url(url: str) -> str:
    """host:port, a server's address (also the /v1 that clients are given) or its /metrics."""
    if "://" not in url:
        url = f"http://{url}"
    try:
        parts = urllib.parse.urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is none
        known = False
    if not known:
        raise ConfigError(f"{url}: no address of a server, such as http://localhost:8000")
    path = parts.path.rstrip("/").removesuffix("/v1")
    if not path.endswith("/metrics"):
        path += "/metrics"
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def fetch(url: str) -> Scrape:
    """Unreachable if there is no answer, or one that is no metrics."""
    # No proxy, as Prometheus does by default: servers are asked from inside their network.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=TIMEOUT) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        error.close()
        raise Unreachable(f"{url} answers {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise Unreachable(f"{url} cannot be reached: {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:  # in the middle of an answer
        raise Unreachable(f"{url} cannot be reached: {str(error) or repr(error)}") from None
    except UnicodeDecodeError:
        raise Unreachable(f"{url} answers with something else than metrics") from None
    try:
        return parse(text, time.monotonic())
    except ValueError:
        raise Unreachable(f"{url} answers with something else than metrics") from None


def once(
    read: Callable[[], Scrape],
    url: str,
    interval: float,
    as_json: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Two scrapes an interval apart, printed. The exit code."""
    try:
        before = read()
        sleep(interval)
        snapshot = take_snapshot(before, read())
    except Unreachable as error:
        if as_json:
            print(json.dumps({"name": "top", "ok": False, "url": url, "error": str(error)}))
        else:
            print(f"spexis top: {error}", file=sys.stderr)
        return 1
    if as_json:
        block = dataclasses.asdict(snapshot)
        print(json.dumps({"name": "top", "ok": True, "url": url, **block}))
    else:
        from rich.console import Console

        console = Console()
        console.print(_view(snapshot, (), url, console))
    return 0


class Looks:
    """What the live view remembers between looks."""

    def __init__(self) -> None:
        self.history: deque[Snapshot] = deque(maxlen=HISTORY)
        self.error: str | None = None
        self._before: Scrape | None = None

    def look(self, read: Callable[[], Scrape]) -> Snapshot | None:
        """The newest snapshot; None at the first look and after one that failed (`error`)."""
        before, self._before = self._before, None
        try:
            self._before = read()
        except Unreachable as error:
            # What grew while nobody could look would be taken for one interval's.
            self.error = str(error)
            return None
        self.error = None
        if before is None:
            return None
        self.history.append(take_snapshot(before, self._before))
        return self.history[-1]


def watch(
    read: Callable[[], Scrape],
    url: str,
    interval: float,
    console=None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Until interrupted."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = console or Console()
    looks, said = Looks(), None
    if not console.is_terminal:
        while True:
            snapshot = looks.look(read)
            if snapshot is not None:
                console.print(_view(snapshot, looks.history, url, console))
            elif looks.error is not None and looks.error != said:
                console.print(Text(_gone(looks.error, interval)))
            said = looks.error
            sleep(interval)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(Text(f"spexis top  {url}  first look ..."), refresh=True)
        while True:
            snapshot = looks.look(read)
            if snapshot is not None:
                live.update(_view(snapshot, looks.history, url, console), refresh=True)
            elif looks.error is not None:
                live.update(Text(_gone(looks.error, interval), style="yellow"), refresh=True)
            sleep(interval)


def _gone(error: str, interval: float) -> str:
    return f"spexis top: {error}; asked again every {interval:g} s"


def _view(snapshot: Snapshot, history: Sequence[Snapshot], url: str, console):
    from spexis.cli.top_view import view

    return view(snapshot, list(history), url, ascii_only=console.options.ascii_only)
