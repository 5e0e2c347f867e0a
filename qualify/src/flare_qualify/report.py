"""The report of a run for people: one HTML file that needs nothing else. All of it is read from the histories."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from html import escape
from pathlib import Path

from flare_qualify.history import Event, read_history
from flare_qualify.report_plots import Mark, Restore, fault_timeline, restore_plot
from flare_qualify.run_directory import REPORT_NAME, RunDirectory, RunResult, ScenarioResult
from flare_qualify.verdict import Damage, Verdict

__all__ = ["DAMAGE_WORDS", "headline", "write_report"]

DAMAGE_WORDS = {
    Damage.WRONG_TOKENS: "wrong tokens",
    Damage.PARTIALLY_VISIBLE: "records visible on some ranks only",
    Damage.LOST_REPORTED: "reported records lost to process death",
    Damage.PAGES_REUSED: "pages reused before accounting",
    Damage.DEATHS_BY_REQUEST: "engine deaths caused by request content",
}

_STYLE = """
:root { color-scheme: light dark; --text: #1c2128; --soft: #656d76; --line: #d8dee4; --back: #ffffff; --card: #f6f8fa;
  --good: #1a7f37; --bad: #cf222e; --odd: #8250df; --warn: #9a6700; --device: #0969da; --memory: #8250df; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --soft: #8d96a0; --line: #30363d; --back: #0d1117;
  --card: #161b22; --good: #3fb950; --bad: #f85149; --odd: #a371f7; --warn: #d29922; --device: #58a6ff;
  --memory: #a371f7; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 1000px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.soft, caption { color: var(--soft); } .lead { font-size: 1.1rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .7rem; margin: 1.2rem 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.5rem; } .tile span { color: var(--soft); font-size: .85rem; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; padding: .35rem .5rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td small { color: var(--soft); display: block; overflow-wrap: anywhere; }
.pass { color: var(--good); } .fail { color: var(--bad); font-weight: 700; } .fail-vacuous { color: var(--odd); }
.skip, .unfinished { color: var(--warn); }
svg { width: 100%; height: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; } .grid, .lane { stroke: var(--line); }
.fault { fill: var(--bad); } .tier-device { fill: var(--device); } .tier-memory { fill: var(--memory); }
.tier-cold { fill: var(--soft); } .tier-disk { fill: var(--good); } .tier-pool { fill: var(--warn); }
circle { fill-opacity: .65; }
.key { font-size: .85rem; } .key i { display: inline-block; width: .7em; height: .7em; border-radius: 50%;
  margin: 0 .3em 0 1em; } code { font-size: .9em; overflow-wrap: anywhere; }
"""


def headline(result: RunResult) -> str:
    """The one sentence that sums the run up."""
    total = result.total
    words = ", ".join(f"{total.damage[what]} {DAMAGE_WORDS[what]}" for what in Damage)
    return (
        f"Over {total.faults:,} injected faults in {result.num_run} scenarios, {total.restores:,} restore hits "
        f"({total.restored_tokens:,} tokens) and {total.requests:,} requests: {words}."
    )


def write_report(directory: RunDirectory, result: RunResult) -> Path:
    """Write the report; its path."""
    path = directory.root / REPORT_NAME
    events = {scenario.name: list(read_history(directory.history(scenario.name))) for scenario in result.scenarios}
    path.write_text(_page(result, events))
    return path


def _page(result: RunResult, events: dict[str, list[Event]]) -> str:
    start = result.starts[0] if result.starts else {}
    begin = float(start.get("at", 0.0))
    verdict = "passed" if result.is_good else "did not pass"
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(begin))
    commits = ", ".join(dict.fromkeys(str(each["commit"])[:12] for each in result.starts))
    facts = f"{when} · suite {start.get('suite', '')} · seed {start.get('seed', '')} · commit {commits}"
    machine = f"{start.get('machine', '')} · Python {start.get('python', '')}"
    last = max((float(event["at"]) for each in events.values() for event in each), default=begin)
    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>flare qualification</title>',
            f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>',
            f'<h1>flare qualification <span class="{"pass" if result.is_good else "fail"}">{verdict}</span></h1>',
            f'<div class="soft">{escape(facts)}<br>{escape(machine)}</div>',
            f'<p class="lead">{escape(headline(result))}</p>',
            _tiles(result),
            "<h2>Verdicts</h2>",
            _verdict_table(result.scenarios),
            "<h2>Time to restore, beside cold runs</h2>",
            restore_plot(_restores(events)),
            _tier_key(),
            "<h2>Faults over time</h2>",
            fault_timeline(_marks(events, begin), last - begin),
            "<h2>Faults by kind</h2>",
            _fault_table(events),
            "<h2>Durations with a limit</h2>",
            _timed_table(events),
            "</body></html>\n",
        ]
    )


def _tiles(result: RunResult) -> str:
    total = result.total
    tiles = [("faults injected", f"{total.faults:,}", "")]
    for what in Damage:
        count = total.damage[what]
        tiles.append((DAMAGE_WORDS[what], f"{count:,}", "fail" if count else "pass"))
    passed = f"{result.count(Verdict.PASS)} of {result.num_run}"
    tiles.append(("scenarios passed", passed, "pass" if result.is_good else "fail"))
    tiles.append(("skipped", f"{result.count(Verdict.SKIP)}", ""))
    tiles += [(name.replace("_", " "), f"{number:,}", "") for name, number in sorted(total.figures.items())]
    cells = (
        f'<div class="tile"><b class="{css}">{value}</b><span>{escape(name)}</span></div>' for name, value, css in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _verdict_table(scenarios: Iterable[ScenarioResult]) -> str:
    rows = []
    for scenario in scenarios:
        outcome, tally = scenario.outcome, scenario.outcome.tally
        reason = f"<small>{escape(outcome.reason[:600])}</small>" if outcome.reason else ""
        serves = f" <span class=soft>{escape(' '.join(scenario.rows))}</span>" if scenario.rows else ""
        rows.append(
            f'<tr><td class="{outcome.verdict}">{outcome.verdict}</td>'
            f"<td>{escape(scenario.name)}{serves}<small>{escape(scenario.proves)}</small>{reason}</td>"
            f'<td class="n">{tally.faults or ""}</td><td class="n">{tally.restores or ""}</td>'
            f'<td class="n">{tally.cases or ""}</td><td class="n">{outcome.seconds:.1f} s</td></tr>'
        )
    numbers = "".join(f'<th class="n">{name}' for name in ("faults", "restores", "cases", "time"))
    head = f"<tr><th>verdict<th>scenario{numbers}</tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _restores(events: dict[str, list[Event]]) -> list[Restore]:
    return [
        Restore(int(event["tokens"]), float(event["seconds"]), str(event.get("tier", "cold")), name)
        for name, each in events.items()
        for event in each
        if event["kind"] in {"restored", "cold"}
    ]


def _marks(events: dict[str, list[Event]], begin: float) -> list[Mark]:
    return [
        Mark(float(event["at"]) - begin, name, str(event["what"]), str(event["evidence"]))
        for name, each in events.items()
        for event in each
        if event["kind"] == "fault"
    ]


def _tier_key() -> str:
    colours = {"cold": "soft", "device": "device", "memory": "memory", "disk": "good", "pool": "warn"}
    keys = (f'<i style="background: var(--{colour})"></i>{tier}' for tier, colour in colours.items())
    return f'<div class="key soft">{"".join(keys)}</div>'


def _fault_table(events: dict[str, list[Event]]) -> str:
    counts = Counter(str(event["what"]) for each in events.values() for event in each if event["kind"] == "fault")
    if not counts:
        return "<p>None.</p>"
    rows = (f'<tr><td>{escape(what)}</td><td class="n">{count}</td></tr>' for what, count in counts.most_common(60))
    return f'<table><tr><th>fault<th class="n">times</tr>{"".join(rows)}</table>'


def _timed_table(events: dict[str, list[Event]]) -> str:
    groups: dict[tuple[str, float], list[float]] = {}
    for each in events.values():
        for event in each:
            if event["kind"] == "timed":
                groups.setdefault((str(event["what"]), float(event["limit"])), []).append(float(event["seconds"]))
    if not groups:
        return "<p>None.</p>"
    rows = []
    for (what, limit), seconds in sorted(groups.items()):
        ordered = sorted(seconds)
        css = "pass" if ordered[-1] <= limit else "fail"
        rows.append(
            f'<tr><td>{escape(what)}</td><td class="n">{len(ordered)}</td>'
            f'<td class="n">{ordered[len(ordered) // 2]:.2f} s</td>'
            f'<td class="n {css}">{ordered[-1]:.2f} s</td><td class="n">{limit:g} s</td></tr>'
        )
    head = '<tr><th>what<th class="n">times<th class="n">median<th class="n">longest<th class="n">limit</tr>'
    return f"<table>{head}{''.join(rows)}</table>"
