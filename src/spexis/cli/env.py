# SPDX-License-Identifier: Apache-2.0
"""`spexis env` (or `spexis doctor`): versions, platform, and whether the plugin takes effect.

"Installed" and "effective" are reported apart: a plugin that is installed but that a process never
ran is the classic silent failure. The last line of standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform as python_platform
import sys
from collections.abc import Sequence
from typing import Any

import spexis
from spexis.cli import platform
from spexis.guards import ALLOW_ENV, TESTED


def version(argv: Sequence[str] = ()) -> int:
    print(f"spexis {spexis.__version__}")
    return 0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="spexis env",
        description="Versions, platform, and whether vLLM loads the plugin and it takes effect.",
    )
    parser.add_argument(
        "--no-import",
        action="store_true",
        help="do not import vLLM (seconds), so do not check that the plugin takes effect",
    )
    options = parser.parse_args(list(argv))
    report = collect()
    if not options.no_import and report["vllm"]:
        print("importing vLLM to see the plugin take effect ...", file=sys.stderr, flush=True)
        report.update(effect())
    problems = problems_of(report)
    report = {"name": "env", "ok": not problems, **report, "problems": problems}
    _print(report)
    print(json.dumps(report))
    return 0 if report["ok"] else 1


def collect() -> dict[str, Any]:
    """From package metadata and the environment only."""
    found = platform.vllm_distribution()
    return {
        "spexis": spexis.__version__,
        "python": python_platform.python_version(),
        "vllm": f"{found[0]} {found[1]}" if found else None,
        "vllm_tested": found is not None and found[1].split("+", 1)[0] in TESTED,
        "torch": platform.installed("torch"),
        "transformers": platform.installed("transformers"),
        "platform": "cpu" if platform.is_cpu() else "cuda",
        "runner": _runner(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "plugin_installed": platform.plugin_installed(),
        "plugin_allowed": platform.plugin_allowed(),
        "plugin_effective": None,
        "drafters": _drafters(),
    }


def effect() -> dict[str, Any]:
    """Load vLLM's general plugins the way vLLM does, and look."""
    try:
        import vllm.engine.arg_utils  # noqa: F401
        from vllm.plugins import load_general_plugins
    except Exception as err:  # a broken installation can fail in any way; say how
        return {"plugin_effective": False, "import_error": f"{type(err).__name__}: {err}"}
    load_general_plugins()
    from spexis.guards import check_sources
    from spexis.plugin import is_effective

    result: dict[str, Any] = {"plugin_effective": is_effective()}
    try:
        check_sources("frontend")
        check_sources("scheduler")
    except ValueError as err:
        result["source_guard"] = str(err)
    return result


def problems_of(report: dict[str, Any]) -> list[str]:
    """What stands in the way, each with what to do."""
    problems = []
    tested = ", ".join(sorted(TESTED))
    if report["vllm"] is None:
        problems.append("vLLM is not installed: pip install 'spexis[cpu]' or 'spexis[cuda]'")
    elif not report["vllm_tested"] and os.environ.get(ALLOW_ENV) != "1":
        problems.append(f"{report['vllm']} is not tested (tested: {tested}): install that version")
    if not report["plugin_installed"]:
        problems.append("vLLM cannot discover the plugin: install Spexis with pip")
    if not report["plugin_allowed"]:
        problems.append("VLLM_PLUGINS leaves Spexis out: add spexis to it or unset it")
    if report["plugin_effective"] is False:
        problems.append(report.get("import_error", "vLLM did not run the plugin"))
    if "source_guard" in report:
        problems.append(report["source_guard"])
    return problems


def _runner() -> str:
    choice = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if choice is not None:
        return f"{'V2' if choice not in ('0', '') else 'V1'} (VLLM_USE_V2_MODEL_RUNNER={choice})"
    return "V1" if platform.is_cpu() else "V2"


def _drafters() -> list[str]:
    from spexis.drafters import shipped

    return list(shipped())


def _print(report: dict[str, Any]) -> None:
    rows = {key: value for key, value in report.items() if key not in ("name", "problems")}
    width = max(map(len, rows))
    for key, value in rows.items():
        shown = ", ".join(value) or "none" if isinstance(value, list) else value
        print(f"  {key.replace('_', ' '):<{width}}  {shown}", file=sys.stderr)
    for problem in report["problems"]:
        print(f"  problem: {problem}", file=sys.stderr)
