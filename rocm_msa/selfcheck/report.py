"""A self-check's result as JSON and as one HTML page with plots in it."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

from rocm_msa.selfcheck.run import STEPS, Result, Time

TEMPLATE = Path(__file__).with_name("report.html.jinja")
JSON_NAME, HTML_NAME = "verify.json", "verify.html"


def write(result: Result, folder: Path) -> tuple[Path, Path]:
    """Write both into `folder`, which is made; gives their paths. OSError: it cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    as_json, as_html = folder / JSON_NAME, folder / HTML_NAME
    as_json.write_text(json.dumps(result.as_json(), indent=1) + "\n")
    as_html.write_text(html(result))
    return as_json, as_html


def html(result: Result) -> str:
    """One page without anything outside of it."""
    from jinja2 import Environment, StrictUndefined

    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return page.from_string(TEMPLATE.read_text()).render(
        result=result,
        steps=STEPS,
        counts=_counts(result),
        differing=[t for t in result.times if t.differs],
        times_plot=times_plot(result.times),
    )


def _counts(result: Result) -> dict[tuple[str, str], dict[str, int]]:
    """(step, op or instruction) -> number of checks by status."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for o in result.outcomes:
        entry = found.setdefault((o.step, o.name), {"ok": 0, "fault": 0, "skipped": 0})
        entry[o.status] += 1
    return found


def times_plot(times: list[Time]) -> str | None:
    """A bar a call on a logarithmic axis, the modelled time as a mark; a PNG in base64."""
    if not times:
        return None
    figure, axes = _figure(len(times))
    labels = [f"{t.op}, {t.dtype}, {t.shape} [{t.backend}]" for t in times]
    at = list(range(len(times)))
    axes.barh(at, [t.us for t in times], color="#4c78a8", label=times[0].unit)
    stored = [(n, t.modelled) for n, t in enumerate(times) if t.modelled is not None]
    if stored:
        places, values = zip(*stored, strict=True)
        axes.plot(values, places, "|", color="#e45756", markersize=12, label="modelled, stored")
    axes.set(yticks=at, yticklabels=labels, xscale="log", xlabel="microseconds a call")
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=110, bbox_inches="tight")
    return base64.b64encode(drawn.getvalue()).decode()


def _figure(rows: int) -> tuple[Any, Any]:
    """Without pyplot: no window system and no state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.24 * rows))
    FigureCanvasAgg(figure)
    return figure, figure.subplots()
