"""What a notebook shows of a plan, a state, a forecast, a fit and a checked step: a bar for each leaf or collective."""

import dataclasses
import re
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import optax
import pytest

from tests.support import AXES, Model, data, fsdp, mesh_of
from xlstm_jax.distributed import create_train_state, plan_sharding
from xlstm_jax.distributed.training.step_check.comparison import LeafCheck
from xlstm_jax.distributed.training.step_check.report import StepCheck
from xlstm_jax.forecast import forecast
from xlstm_jax.forecast.training import Fit, Options
from xlstm_jax.forecast.training.fitting import Trial
from xlstm_jax.formatting import MOST_BARS, Bar, format_bytes, notebook_html

BLUE, ORANGE = "#3f87d0", "#e2803a"


class Page(HTMLParser):
    """Reads HTML, whose tags must be closed in their order; texts by the tag that they stand in, and bars."""

    def __init__(self, html):
        super().__init__()
        self.open, self.spans, self.bars, self.styles = [], [], [], []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        style = dict(attributes).get("style", "")
        assert tag in ("div", "span", "pre", "code"), tag
        self.open.append(tag)
        self.styles.append(style)
        if found := re.search(r"background:(#\w+);width:([\d.e+-]+)%", style):
            self.bars.append((found[1], float(found[2])))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open[-1:] == ["span"] and "pre" not in self.open:
            self.spans.append(text)

    @property
    def rows(self):
        """(label, text, colour, width in percent) of each bar."""
        assert len(self.spans) == 2 * len(self.bars)
        return [
            (*both, *bar)
            for both, bar in zip(zip(self.spans[::2], self.spans[1::2], strict=True), self.bars, strict=True)
        ]


def small_forecast():
    x = jax.device_put(jnp.zeros((8, 256)), jax.NamedSharding(mesh_of(1, 8), jax.P("fsdp")))
    return forecast(jax.jit(lambda x: (x.sum(0), (x @ x.T).sum())), x)


def test_notebook_html_scales_bars_by_value_and_colours_warnings_orange():
    bars = [Bar("a/<lambda>", 8.0, "8 & more"), Bar("b", 2.0, "2", warns=True), Bar("c", 0.0, "0")]
    html = notebook_html("all", 'a "title"', bars)
    assert Page(html).rows == [("a/<lambda>", "8 & more", BLUE, 100), ("b", "2", ORANGE, 25), ("c", "0", BLUE, 0)]
    assert "a &quot;title&quot;" in html and html.endswith("</pre>\n")


def test_notebook_html_cuts_off_bars_beyond_the_limit_and_counts_the_rest():
    page = Page(html := notebook_html("all", "title", [Bar(str(i), 1, "") for i in range(MOST_BARS + 5)]))
    assert len(page.bars) == MOST_BARS and "and 5 more" in html
    assert not Page(notebook_html("all", "title", [])).bars


def test_plan_repr_html_has_a_bar_for_the_bytes_per_device_of_each_leaf():
    plan = plan_sharding(Model(fsdp()), {"dp": 1, "fsdp": 8}, data()["x"], tx=optax.adam(1e-3))
    rows = Page(plan._repr_html_()).rows
    leaves = {row.path.replace(" ", "/"): row for row in plan.rows}  # "(optimizer) 0/count"
    kept = {path: row.all_bytes.per_device for path, row in leaves.items()}
    assert {row[0] for row in rows} == set(kept) and len(kept) <= MOST_BARS  # guard: none is left out
    for path, text, colour, width in rows:
        assert width == pytest.approx(100 * kept[path] / max(kept.values()), rel=1e-2)
        whole = leaves[path].parts == 1
        assert colour == (ORANGE if whole else BLUE) and text == format_bytes(kept[path]) + ", replicated" * whole
    assert {row[2] for row in rows} == {BLUE, ORANGE}  # guard: there are both


@pytest.mark.parametrize("tx", [optax.sgd(1e-3), optax.adam(1e-3)], ids=["sgd", "adam"])
def test_train_state_repr_html_has_bars_for_params_and_opt_state_leaves(tx):
    state = create_train_state(Model(fsdp()), tx, mesh_of(1, 8), jax.random.key(0), data()["x"], batch_axes=AXES)
    rows = Page(html := state._repr_html_()).rows
    parts = [re.fullmatch(r"(params|opt_state) \S+( ×(\d+))?", row[0]).group(1, 3) for row in rows]
    if tx.init({}) == optax.sgd(1e-3).init({}):  # nothing but parameters, and few enough
        assert sum(int(times or 1) for _, times in parts) == len(jax.tree.leaves(state.params))
    else:
        assert {part for part, _ in parts} == {"params", "opt_state"} and " more</div>" in html
    widths = [row[3] for row in rows]
    assert widths == sorted(widths, reverse=True) and widths[0] == 100


def test_forecast_repr_html_has_a_bar_for_each_kind_of_collective():
    found = small_forecast()
    rows = Page(found._repr_html_()).rows
    assert len(rows) >= 1 and all("per step" in text for _, text, *_ in rows)
    assert rows[0][0].startswith(max(found.collectives, key=lambda one: one.wire_bytes_per_step).kind)
    waited = tuple(dataclasses.replace(collective, exposed_s=1e-3) for collective in found.collectives)
    orange = Page(dataclasses.replace(found, collectives=waited)._repr_html_()).rows
    assert [row[2] for row in rows] == [BLUE] * len(rows) and [row[2] for row in orange] == [ORANGE] * len(rows)


def test_fit_repr_html_has_a_bar_for_each_compiled_trial():
    found = small_forecast()
    larger = dataclasses.replace(found, code_bytes=found.code_bytes + found.total_bytes)
    trials = (Trial(Options({"fsdp": 8}), found, True), Trial(Options({"dp": 2, "fsdp": 4}), larger, False))
    failed = Trial(Options({"fsdp": 4}), None, False, problem="4 devices do not divide 6 rows")
    rows = Page(Fit("v5e:2x4", 2**30, (*trials, failed))._repr_html_()).rows
    assert [row[2:] for row in rows] == [(BLUE, 50), (ORANGE, 100)]
    assert rows[1][0].startswith("dp=2,fsdp=4, weights kept") and format_bytes(larger.total_bytes) in rows[1][1]


def test_step_check_repr_html_has_a_bar_for_each_leaf_with_wrong_leaves_first():
    leaves = (LeafCheck("fine", ("fsdp",), 1.0, 0.0, 1e-5), LeafCheck("wrong", (), 8.0, 0.0, 1e-5))
    check = StepCheck("wrong", ("gradients are <wrong>",), "gradients", "exactly", {"fsdp": 8}, leaves, 1.0)
    html = check._repr_html_()
    assert Page(html).rows == [("wrong", "8 ×", ORANGE, 100), ("fine", "1 ×", BLUE, 12.5)]
    assert "gradients are &lt;wrong&gt;" in html


def test_repr_html_contains_no_script_pixel_sizes_or_text_colour():
    """So it is read in light and in dark, and 390 pixels wide."""
    plan = plan_sharding(Model(fsdp()), {"dp": 1, "fsdp": 8}, data()["x"], tx=optax.adam(1e-3))
    for html in (plan._repr_html_(), small_forecast()._repr_html_()):
        styles = ";".join(Page(html).styles)
        assert "<script" not in html and "px" not in styles
        assert not re.search(r"(?<![-\w])color:", styles)
