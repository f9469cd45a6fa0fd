# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboard and docs/metrics.md name the series that the code exports, and all of them.

What the code exports is read from a stat logger that was made, not from its source.
"""

import importlib.util
import json
import re
from itertools import combinations
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((REPO / "examples/grafana/spexis.json").read_text())
DOCS = (REPO / "docs/metrics.md").read_text()
VARIABLES = {v["name"]: v for v in DASHBOARD["templating"]["list"]}
PANELS = DASHBOARD["panels"]
GRAPHS = [panel for panel in PANELS if panel["type"] != "row"]
WIDTH = 24  # columns of Grafana's grid

# vLLM's own that the dashboard may name, without the endings that their types add.
VLLM_GAUGES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc",
}
VLLM_COUNTERS = {
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:request_success",
    "vllm:num_preemptions",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
}
VLLM_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
}
VLLM_SERIES = (
    VLLM_GAUGES
    | {f"{name}_total" for name in VLLM_COUNTERS}
    | {f"{name}_{end}" for name in VLLM_HISTOGRAMS for end in ("bucket", "sum", "count")}
)
FUNCTIONS = {"sum", "avg", "max", "count", "rate", "scalar", "histogram_quantile"}


@pytest.fixture(scope="module")
def exported():
    """Family name -> (type, labels beside model_name and engine) of what a stat logger makes."""
    pytest.importorskip("vllm")
    from types import SimpleNamespace

    from prometheus_client import REGISTRY
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    from spexis.observability.stat_logger import SpexisStatLogger, _unregister

    config = SimpleNamespace(
        additional_config={
            "spexis": {"drafter": {"method": "synthetic"}, "mode": "auto", "lookahead": True}
        },
        parallel_config=SimpleNamespace(pipeline_parallel_size=2),
        model_config=SimpleNamespace(served_model_name="m"),
    )
    unregister_vllm_metrics()
    SpexisStatLogger(config, [0])
    found = {}
    for family in REGISTRY.collect():
        if family.name.startswith("spexis:"):
            labels = {label for sample in family.samples for label in sample.labels}
            assert family.samples, f"{family.name} does not exist from the start"
            assert labels >= {"model_name", "engine"}, family.name
            found[family.name] = (family.type, labels - {"model_name", "engine"})
    unregister_vllm_metrics()
    _unregister()
    return found


def sample_names(exported):
    return {f"{name}_total" if kind == "counter" else name for name, (kind, _) in exported.items()}


def expressions():
    """(panel title, PromQL) of every target."""
    return [(panel["title"], t["expr"]) for panel in GRAPHS for t in panel["targets"]]


def names_in(expression):
    """Identifiers of a PromQL expression that are neither functions nor labels."""
    bare = re.sub(r'"[^"]*"', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\b(?:by|without|on|group_left) \([^)]*\)", "", bare)
    return set(re.findall(r"[A-Za-z_:][\w:]*", bare)) - FUNCTIONS


def labels_in(expression):
    """(series, labels that select or directly group it) for each series of the expression."""
    found = re.findall(r"(?:by \(([^)]*)\) \((?:rate\()?)?([\w:]+:[\w:]+)\{([^}]*)\}", expression)
    return [
        (name, set(re.findall(r"\w+", by)) | set(re.findall(r"(\w+)(?:=~|!~|!=|=)", inner)))
        for by, name, inner in found
    ]


def test_names_in_finds_what_is_no_series():
    expression = 'sum by (le) (rate(a:b_total{m=~"x y"}[5m])) / ratee(c:d) + scalar(e)'
    assert names_in(expression) == {"a:b_total", "ratee", "c:d", "e"}
    assert labels_in(expression) == [("a:b_total", {"le", "m"})]


# -- the dashboard --------------------------------------------------------------------------------


@pytest.mark.engine
def test_expressions_name_series_that_exist(exported):
    known = sample_names(exported) | VLLM_SERIES
    for title, expression in expressions():
        assert names_in(expression) <= known, f"{title}: {names_in(expression) - known}"
        assert names_in(expression), title


@pytest.mark.engine
def test_every_series_of_ours_has_a_panel(exported):
    drawn = {name for _, expression in expressions() for name in names_in(expression)}
    assert {name for name in drawn if name.startswith("spexis:")} == sample_names(exported)
    assert VLLM_SERIES - drawn <= {f"{n}_{e}" for n in VLLM_HISTOGRAMS for e in ("sum", "count")}


@pytest.mark.engine
def test_expressions_use_labels_that_the_series_have(exported):
    ours = {
        f"{name}_total" if kind == "counter" else name: labels
        for name, (kind, labels) in exported.items()
    }
    for title, expression in expressions():
        for name, labels in labels_in(expression):
            assert "model_name" in labels, f"{title}: {name} of every model"
            if name in ours:
                assert labels <= ours[name] | {"model_name", "engine"}, title
        assert len(labels_in(expression)) == len(re.findall(r"(?:vllm|spexis):", expression)), title


def test_vllm_has_the_series_that_are_listed():
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        pytest.skip("vLLM is not installed")
    folder = Path(spec.submodule_search_locations[0], "v1")
    source = "".join(
        (folder / name).read_text() for name in ("metrics/loggers.py", "spec_decode/metrics.py")
    )
    for names, kind in ((VLLM_GAUGES, "gauge"), (VLLM_HISTOGRAMS, "histogram")):
        for name in names:
            assert re.search(rf'_{kind}_cls\(\s*name="{name}"', source), name
    for name in VLLM_COUNTERS:
        assert f'"{name}"' in source, name


def test_parentheses_close():
    for title, expression in expressions():
        for opened, closed in ("()", "{}", "[]"):
            assert expression.count(opened) == expression.count(closed), title
        assert expression.count("[$__rate_interval]") == expression.count("rate("), title


def test_panels_do_not_overlap():
    for one, other in combinations(PANELS, 2):
        a, b = one["gridPos"], other["gridPos"]
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, f"{one['title']} and {other['title']}"
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["w"] > 0 and place["h"] > 0
        assert place["x"] + place["w"] <= WIDTH, panel["title"]


def test_every_panel_says_what_it_shows():
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    titles = [panel["title"] for panel in PANELS]
    assert all(titles) and len(set(titles)) == len(titles)
    for panel in GRAPHS:  # rows are headings
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def test_variables():
    assert list(VARIABLES) == ["DS_PROMETHEUS", "model_name", "stage"]
    assert VARIABLES["DS_PROMETHEUS"]["query"] == "prometheus"
    for panel in GRAPHS:
        for holder in (panel, *panel["targets"]):
            assert holder["datasource"]["uid"] == "${DS_PROMETHEUS}", panel["title"]
    for name in ("model_name", "stage"):
        query = VARIABLES[name]["query"]["query"]
        (series,) = re.findall(rf"label_values\((\S+), {name}\)", query)
        assert any(series in expression for _, expression in expressions())
    known = {*VARIABLES, "__rate_interval"}
    for title, expression in expressions():
        assert set(re.findall(r"\$(\w+)", expression)) <= known, title


# -- the table ------------------------------------------------------------------------------------


def table():
    """Series -> (type, labels) as docs/metrics.md has them."""
    rows = re.findall(r"^\| `(spexis:\w+)` \| (\w+) \| ([^|]*)\|(.*)\|$", DOCS, re.M)
    assert all(len(rest.split("|")) == 2 for *_, rest in rows)
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in rows}


@pytest.mark.engine
def test_the_table_names_the_series_that_the_code_exports(exported):
    assert table() == exported


@pytest.mark.engine
def test_kinds_of_slots_are_explained_and_drawn():
    pytest.importorskip("vllm")
    from spexis.cli.top_view import KINDS
    from spexis.observability.stat_logger import SLOT_KINDS

    assert set(KINDS) == set(SLOT_KINDS)
    for kind in SLOT_KINDS:
        assert f"`{kind}`" in DOCS


@pytest.mark.engine
def test_spexis_top_reads_the_series_that_the_code_exports(exported):
    from spexis.observability.snapshot import POLICY_SERIES, SPEXIS_SERIES

    assert {*SPEXIS_SERIES, *POLICY_SERIES} == sample_names(exported)
    assert all(name.endswith("_total") for name in SPEXIS_SERIES)


def test_decisions_are_explained():
    from spexis.core.decisions import DECISIONS

    for decision in DECISIONS["lookahead"]:
        assert f"| `{decision.choice}` | `{decision.reason}` |" in DOCS
    for policy, said in DECISIONS.items():
        assert f'"{policy}"' in DOCS
        assert all(f"`{word}`" in DOCS for decision in said for word in decision)


def test_the_document_is_short():
    assert (
        DOCS.count("\n") < 110 and "spexis top" in DOCS and "examples/grafana/spexis.json" in DOCS
    )
