"""The dashboard and the alerts name what a real service says, and Prometheus' own tools accept them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import kvpage
from kvpage.errors import PoolNotFound
from kvpage.wire import leasing
from kvpage.wire.client import WorkerClient
from support.api_service import ApiService
from support.checkout import ROOT
from support.deployment import DEPLOY, output_of
from support.leased_pools import content
from support.metric_samples import Scraped
from support.plan_requests import small_request
from support.promql import Dashboard, Expression, Rules, as_promtool_reads, faults

RULES_FILE = DEPLOY / "prometheus/kvpage.rules.yml"
RULES = Rules.read(RULES_FILE)
DASHBOARD = Dashboard.read(DEPLOY / "grafana/kvpage.json")
RULE_TESTS = Path(__file__).with_name("kvpage.rules.test.yml")
OPERATIONS = ROOT / "docs/operations.md"
Described = dict[str, tuple[str, set[str]]]


@pytest.fixture(scope="module")
def scraped(mimo: ApiService) -> Scraped:
    """What a service says of which every metric has a sample."""
    import httpx

    run_dir = str(mimo.run_directory.path)
    with mimo.client() as client, WorkerClient(mimo.run_directory.worker_socket("host"), role="api") as worker:
        [pool] = client.pools()
        settings = leasing.TenantSettings(name="acme", quota_bytes=1 << 20)
        worker.ask(leasing.SetTenants(pool_id=pool.id, tenants=[settings]), leasing.TenantsSet)
        client.plan(small_request())
        with pytest.raises(PoolNotFound):
            client.get_pool("pool-0123456789abcdef")
        with kvpage.open_lease("mimo", name="engine", tenant="acme", run_dir=run_dir) as lease:
            [block] = lease.allocate(0, 1)
            lease.allocate(2, 1)
            lease.commit(0, [block], [content(1)])
            transport = httpx.HTTPTransport(uds=str(mimo.run_directory.api_socket))
            with httpx.Client(transport=transport, base_url="http://kvpage", timeout=60) as http:
                return Scraped(http.get("/metrics").text)


@pytest.fixture(scope="module")
def described(scraped: Scraped) -> Described:
    return {
        name: (family.type, {label for sample in family.samples for label in sample.labels} - {"le"})
        for name, family in scraped.families.items()
    }


def everything() -> Iterator[Expression]:
    yield from RULES.expressions()
    yield from DASHBOARD.expressions()
    yield from DASHBOARD.variables()


# --- names ------------------------------------------------------------------------------------------------------------


def test_every_metric_and_label_is_one_that_a_service_has(described: Described) -> None:
    found = [fault for one in everything() for fault in faults(one, described, set(RULES.recorded))]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "kvpage_device_redy == 0",
        'sum(kvpage_slab_bytes{status="used"})',
        "sum by (queue) (kvpage_leases)",
        "rate(kvpage_plan_duration_seconds[5m])",
        "rate(kvpage_leases_bucket[5m])",
        "rate(kvpage_plan_duration_bucket[5m])",
        "kvpage:pool_usd:ratio > 1",
    ],
)
def test_a_misspelt_name_is_found(described: Described, text: str) -> None:
    assert len(faults(Expression("here", text), described, set(RULES.recorded))) == 1


def test_every_label_value_that_is_selected_is_one_that_there_is(scraped: Scraped) -> None:
    selected = {value for one in everything() for value in one.values()}
    may_be_absent = {("kvpage_http_errors_total", "code"), ("kvpage_http_requests_total", "status")}
    wanted = {(name, label, value) for name, label, value in selected if (name, label) not in may_be_absent}
    there = {
        (name, label, value)
        for name in {name for name, _, _ in wanted}
        for series in scraped.all(name)
        for label, value in dict(series).items()
    }
    assert wanted - there == set()
    assert ("kvpage_pool_state", "state", "failed") in wanted


def test_error_codes_in_the_alerts_exist() -> None:
    from kvpage_server.error_guide import GUIDES

    codes = re.findall(r'code=~"([^"]+)"', RULES_FILE.read_text())
    assert codes
    assert {code for some in codes for code in some.split("|")} <= set(GUIDES)


def test_a_legend_shows_labels_that_its_expression_keeps(described: Described) -> None:
    for title, text, shown in DASHBOARD.legends():
        one = Expression(title, text)
        kept = one.grouping() or {label for name in one.metrics() for label in described.get(name, ("", set()))[1]}
        assert shown <= kept | {"instance", "job", "le"}, title


def test_every_metric_of_the_service_is_on_the_dashboard_or_left_out_for_a_reason(described: Described) -> None:
    shown = {re.sub(r"_bucket$", "", name) for one in DASHBOARD.expressions() for name in one.metrics()}
    left_out = {
        "kvpage_device_free_age_seconds": "says how old another is",
        "kvpage_group_slabs": "the blocks by group say it", "kvpage_slabs": "in bytes",
        "kvpage_available_blocks": "in bytes",
        "kvpage_leased_blocks": "shared blocks count several times", "kvpage_leased_bytes": "the same",
        "kvpage_prefix_hits_total": "tokens say more than prompts", "kvpage_prefix_misses_total": "the same",
        "kvpage_prefix_duplicate_blocks_total": "of interest to who writes an engine",
    }  # fmt: skip
    assert set(described) - shown - set(left_out) == set()


def test_the_padding_that_is_shown_is_that_of_the_plan(scraped: Scraped) -> None:
    """Each of the five draft layers of the example, group 2, has a third of a page as padding; a block is leased."""
    padding_bytes = dict.fromkeys(("0", "1"), 0.0) | {"2": 5 * 32_768}
    for group, wanted in padding_bytes.items():
        assert scraped.by("kvpage_block_padding_bytes", "state", pool="mimo", group=group)["used"] == wanted
    assert scraped.by("kvpage_block_bytes", "state", pool="mimo", group="2")["used"] == 491_520


# --- the dashboard ----------------------------------------------------------------------------------------------------


def test_every_panel_says_what_it_shows_in_which_unit_from_the_chosen_source() -> None:
    ids = [panel["id"] for panel in DASHBOARD.content["panels"]]
    assert len(ids) == len(set(ids))
    assert len(DASHBOARD.panels()) > 30
    for panel in DASHBOARD.panels():
        assert panel["description"], panel["title"]
        unit = panel["fieldConfig"]["defaults"].get("unit") or panel["options"]["yAxis"]["unit"]
        assert unit, panel["title"]
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])


def test_panels_of_bytes_have_that_unit_and_ratios_theirs() -> None:
    for panel in DASHBOARD.panels():
        unit = panel["fieldConfig"]["defaults"].get("unit")
        for target in panel["targets"]:
            is_share = " / " in target["expr"] or "_ratio" in target["expr"]
            if "_bytes" in target["expr"] and not is_share:
                assert unit == "bytes", panel["title"]
            if is_share and "seconds" not in target["expr"]:
                assert unit == "percentunit", panel["title"]


def test_panels_lie_beside_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD.content["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_source_is_a_variable_and_nothing_comes_from_elsewhere() -> None:
    variables = {variable["name"]: variable["type"] for variable in DASHBOARD.content["templating"]["list"]}
    assert variables == {
        "datasource": "datasource",
        "job": "query",
        "instance": "query",
        "device": "query",
        "pool": "query",
    }
    used = set(re.findall(r"\$\{?(\w+)\}?", str(DASHBOARD.content))) - {"__all", "__rate_interval"}
    assert used == set(variables)
    assert "://" not in str(DASHBOARD.content)


# --- the alerts -------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Of its headings, as they are made for Markdown in a browser."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_alert_says_what_is_wrong_and_leads_to_what_to_do() -> None:
    assert len(RULES.alerts) >= 10
    for alert in RULES.alerts:
        assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}, alert["alert"]
        assert alert["labels"]["severity"] in ("info", "warning", "critical")
        page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert page == "docs/operations.md"
        assert anchor in anchors(OPERATIONS), alert["alert"]


def test_a_dead_anchor_is_found() -> None:
    assert "what-to-do-when" in anchors(OPERATIONS)
    assert "a-worker-dies" not in anchors(OPERATIONS)


def test_every_alert_is_seen_firing() -> None:
    tested = set(re.findall(r'alertname="(\w+)"', RULE_TESTS.read_text()))
    assert tested == {alert["alert"] for alert in RULES.alerts}


# --- by Prometheus' own tool ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def promtool() -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool on this machine (it comes with Prometheus)")
    return program


def test_the_rules_are_rules(promtool: str) -> None:
    status, told = output_of(promtool, "check", "rules", str(RULES_FILE))
    assert status == 0, told


def test_alerts_fire_where_they_should_and_nowhere_else(promtool: str, tmp_path: Path) -> None:
    shutil.copy(RULES_FILE, tmp_path)
    shutil.copy(RULE_TESTS, tmp_path)
    status, told = output_of(promtool, "test", "rules", RULE_TESTS.name, cwd=tmp_path)
    assert status == 0, told


def test_an_alert_that_never_fires_is_found(promtool: str, tmp_path: Path) -> None:
    wrong = RULES_FILE.read_text().replace("expr: kvpage_device_ready == 0", "expr: kvpage_device_ready == 2")
    (tmp_path / RULES_FILE.name).write_text(wrong)
    shutil.copy(RULE_TESTS, tmp_path)
    status, told = output_of(promtool, "test", "rules", RULE_TESTS.name, cwd=tmp_path)
    assert status != 0
    assert "KvpageWorkerDown" in told


def in_a_rule_file(expressions: list[str], folder: Path) -> Path:
    rules = [{"record": f"panel:number:{number}", "expr": text} for number, text in enumerate(expressions)]
    path = folder / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    return path


def test_the_expressions_of_the_dashboard_are_expressions(promtool: str, tmp_path: Path) -> None:
    texts = [as_promtool_reads(one.text) for one in DASHBOARD.expressions()]
    status, told = output_of(promtool, "check", "rules", str(in_a_rule_file(texts, tmp_path)))
    assert status == 0, told
    assert f"{len(texts)} rules found" in told


def test_an_expression_that_is_none_is_found(promtool: str, tmp_path: Path) -> None:
    status, told = output_of(promtool, "check", "rules", str(in_a_rule_file(["sum(kvpage_leases"], tmp_path)))
    assert status != 0, told
