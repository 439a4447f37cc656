"""The web page in a real Chromium, on a real service: what it shows is what the library and the API say."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, Request, Route, expect

import kvpage
from kvpage.client.resources import Pool
from kvpage.plans import Plan
from planner import build
from support.browser import focused, scrolls_sideways
from support.checkout import ROOT
from support.command_line import COMMAND
from support.ui_site import TOKEN, Site

AXE = (resources.files("axe_playwright_python") / "axe.min.js").read_text()
EXAMPLES = json.loads((ROOT / "server/kvpage_server/ui/examples.json").read_text())
LLAMA = next(one["config"] for one in EXAMPLES if one["name"] == "llama-3.1-8b")
STRATEGIES = ("auto", "unify", "scale_then_pad", "slab", "nested")
LIVE = f"#view=live&token={TOKEN}"
Open = Callable[..., Page]
Case = TypeVar("Case")


# --- reading the page -------------------------------------------------------------------------------------------------


def plan_of(entry: dict[str, Any], **fields: Any) -> Plan:
    return kvpage.plan({"strategy": "auto", "memory_bytes": 40 << 30, "model": entry} | fields)


def shown_id(page: Page) -> str:
    return str(page.locator("#copy-plan-id").text_content())


def expect_plan(page: Page, plan: Plan) -> None:
    """Its id and its figures, each as a person reads it."""
    expect(page.locator("#copy-plan-id")).to_have_text(plan.plan_id)
    figures = {
        row.locator("dt").inner_text(): row.locator("strong").inner_text()
        for row in page.locator("#capacity > div").all()
    }
    capacity, waste = plan.capacity, plan.waste
    assert (
        figures["Slabs" if any(group.blocks_per_slab > 1 for group in plan.groups) else "Blocks"]
        == f"{plan.num_blocks:,}"
    )
    if capacity.max_concurrency is not None and capacity.max_model_len is not None:
        digits = 2 if capacity.max_concurrency < 1000 else 0
        assert figures["Requests at once"] == f"{capacity.max_concurrency:,.{digits}f}"
        assert figures["Tokens they hold"] == f"{int(capacity.max_concurrency * capacity.max_model_len):,}"
    if capacity.longest_request_tokens is not None:
        assert figures["Longest request"] == f"{capacity.longest_request_tokens:,}"
    parts = [
        waste.live_bytes,
        waste.padding_bytes,
        waste.group_rounding_bytes,
        waste.tail_bytes,
        waste.unallocated_bytes,
    ]
    assert page.locator("#waste tbody td:nth-child(3)").all_inner_texts() == [f"{part:,}" for part in parts]
    reasons = {layer.reason for layer in plan.layers.values()}
    assert set(page.locator("#layers tbody td:last-child").all_inner_texts()) == reasons
    picture = page.locator("#picture img")
    assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") > 0


def paste(page: Page, value: Any, field: str = "#config") -> None:
    page.locator(field).fill(value if isinstance(value, str) else json.dumps(value))


def set_field(page: Page, name: str, value: str) -> None:
    control = page.locator(f"#{name}")
    if control.evaluate("element => element.tagName") == "SELECT":
        control.select_option(value)
    else:
        control.fill(value)


def some_of(cases: Sequence[Case], count: int, request: pytest.FixtureRequest) -> Sequence[Case]:
    """As the marker `sampled`, but in one page, as each page takes its time: all of them in the long tier."""
    if request.config.getoption("--tier") == "long":
        return cases
    return random.Random(request.config.option.hypothesis_seed).sample(cases, count)


# --- planning ---------------------------------------------------------------------------------------------------------


def test_the_page_plans_an_example_by_itself(open_page: Open) -> None:
    page = open_page()
    expect_plan(page, plan_of({"config": EXAMPLES[0]["config"], "tp": 1}))
    expect(page.get_by_role("status").first).to_contain_text("Planned by")
    assert page.title() == "Plan – kvpage"


def test_every_example_has_the_plan_that_the_library_gives(open_page: Open, request: pytest.FixtureRequest) -> None:
    page = open_page()
    for example in some_of(EXAMPLES, 3, request):
        page.get_by_label("Example").select_option(example["name"])
        written = example.get("request")
        expect_plan(page, kvpage.plan(written) if written else plan_of({"config": example["config"]}))


def test_the_settings_of_a_request_go_with_it_and_those_of_the_reader_stay(open_page: Open) -> None:
    request = next(one["request"] for one in EXAMPLES if "request" in one)
    page = open_page()
    expect_plan(page, plan_of({"config": EXAMPLES[0]["config"]}))
    page.get_by_label("Example").select_option("mimo")
    expect_plan(page, kvpage.plan(request))
    page.get_by_label("Example").select_option("llama-3.1-8b")
    expect_plan(page, plan_of({"config": LLAMA}))
    page.get_by_label("Example").select_option("mimo")
    expect_plan(page, kvpage.plan(request))
    page.reload()  # by its address alone
    expect_plan(page, kvpage.plan(request))
    set_field(page, "memory", "8")
    expect_plan(page, kvpage.plan(request | {"memory_bytes": 8 << 30}))
    page.get_by_label("Example").select_option("llama-3.1-8b")
    expect_plan(page, plan_of({"config": LLAMA}, memory_bytes=8 << 30))


def test_a_config_that_is_pasted_has_the_plan_that_the_library_gives(open_page: Open) -> None:
    page = open_page()
    config = LLAMA | {"num_hidden_layers": 7, "name of no field": "<script>alert(1)</script>"}
    paste(page, config)
    expect_plan(page, plan_of({"config": config}))
    assert page.get_by_label("Example").input_value() == ""


def test_every_control_changes_the_plan_as_the_library_does(open_page: Open) -> None:
    page = open_page()
    config = next(one["config"] for one in EXAMPLES if one["name"] == "mimo-v2-flash")  # has a layer that predicts
    paste(page, config)
    entry: dict[str, Any] = {"config": config}
    fields: dict[str, Any] = {}
    expect_plan(page, plan_of(entry))
    for name, value in (("kv_dtype", "fp8"), ("block_size", "32"), ("tp", "4")):
        entry[name] = int(value) if value.isdigit() else value
        set_field(page, name, value)
        expect_plan(page, plan_of(entry))
    for name, value in (("max_model_len", "4096"), ("max_num_batched_tokens", "512")):
        page.locator("#more").evaluate("more => more.open = true")
        fields[name] = int(value)
        set_field(page, name, value)
        expect_plan(page, plan_of(entry, **fields))
    set_field(page, "memory", "12.5")
    fields["memory_bytes"] = int(12.5 * 2**30)
    expect_plan(page, plan_of(entry, **fields))
    for strategy in STRATEGIES[1:]:
        page.get_by_role("radio", name=strategy, exact=True).check()
        expect_plan(page, plan_of(entry, **fields, strategy=strategy))
    entry["mtp"] = True
    page.get_by_label("Plan the model's own layers").check()
    expect_plan(page, plan_of(entry, **fields, strategy="nested"))


@pytest.mark.long
def test_a_draft_model_is_planned_beside_the_model(open_page: Open) -> None:
    page = open_page("#example=llama-3.1-8b")
    draft = LLAMA | {"num_hidden_layers": 2, "num_key_value_heads": 4}
    page.locator("#more").evaluate("more => more.open = true")
    paste(page, draft, "#draft")
    expect_plan(page, plan_of({"config": LLAMA, "draft": draft}))


@pytest.mark.long
def test_memory_can_be_turned_coarsely(open_page: Open) -> None:
    page = open_page("#example=llama-3.1-8b")
    page.get_by_label("coarse").fill("30")
    expect(page.locator("#memory")).to_have_value("8")
    expect_plan(page, plan_of({"config": LLAMA}, memory_bytes=8 << 30))


def test_a_request_with_layers_written_out_brings_its_settings(open_page: Open) -> None:
    page = open_page()
    request = json.loads((ROOT / "examples/mimo.json").read_text())
    paste(page, request)
    expect_plan(page, kvpage.plan(request))
    expect(page.locator("#memory")).to_have_value("0.0625")
    expect(page.locator("#tp")).to_be_disabled()
    page.get_by_role("radio", name="slab", exact=True).check()
    expect_plan(page, kvpage.plan(request | {"strategy": "slab"}))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["chosen", "dropped"])
def test_a_file_is_taken(open_page: Open, tmp_path: Path, how: str) -> None:
    page = open_page()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    if how == "chosen":
        page.get_by_label("Choose a file").set_input_files(file)
    else:
        dropped = page.evaluate_handle(
            """text => {
                const data = new DataTransfer();
                data.items.add(new File([text], "config.json", {type: "application/json"}));
                return data;
            }""",
            file.read_text(),
        )
        expect(page.locator("#drop")).to_be_visible()  # as whoever drops waits for; an event of a test would not
        page.dispatch_event("#drop", "drop", {"dataTransfer": dropped})
    expect_plan(page, plan_of({"config": LLAMA}))


FAULTS = [
    ("config", "", "Paste a config.json"),
    ("config", "{", "not JSON"),
    ("config", "[1]", "a JSON object"),
    ("config", "{}", "model_type"),
    ("config", json.dumps({"model_type": "no such <b>model</b>"}), "no such <b>model</b>"),
    ("config", json.dumps(LLAMA | {"num_key_value_heads": "8"}), "num_key_value_heads"),
    ("config", json.dumps(LLAMA)[:-1] + ', "vocab_size": 1, "vocab_size": 2}', "vocab_size"),
    ("config", '{"a":' * 40 + "1" + "}" * 40, "levels"),
    ("memory", "0", "more than 0"),
    ("memory", "0.0001", "too little"),
    ("tp", "0", "whole number"),
    ("tp", "1.5", "whole number"),
    ("block_size", "0", "whole number"),
    ("max_model_len", "-1", "greater"),
    ("max_num_batched_tokens", "0", "greater"),
    ("draft", "nonsense", "not JSON"),
]


def test_what_is_wrong_is_said_in_words_at_its_field_and_mends(open_page: Open, request: pytest.FixtureRequest) -> None:
    page = open_page("#example=llama-3.1-8b")
    page.locator("#more").evaluate("more => more.open = true")
    good = plan_of({"config": LLAMA})
    expect_plan(page, good)
    for field, value, words in some_of(FAULTS, 4, request):
        control = page.locator(f"#{field}")
        before = control.input_value()
        paste(page, value, f"#{field}")
        expect(page.locator(f"#{field}-error"), f"{field} {value}").to_contain_text(words)
        expect(control).to_have_attribute("aria-invalid", "true")
        assert f"{field}-error" in str(control.get_attribute("aria-describedby")).split()
        expect(page.get_by_role("alert")).to_contain_text(words)
        paste(page, before, f"#{field}")
        expect(page.locator(f"#{field}-error")).to_be_empty()
        expect(control).not_to_have_attribute("aria-invalid", "true")
        expect(page.locator("#copy-plan-id")).to_have_text(good.plan_id)


def test_a_wrong_choice_is_told_once_at_its_field_in_the_units_of_the_page(open_page: Open) -> None:
    page = open_page("#example=llama-3.1-8b")
    good = plan_of({"config": LLAMA})
    expect_plan(page, good)
    for field, wrong, words in (
        ("kv_dtype", "fp8_ds_mla", "fp8_ds_mla is a format of latent rows"),
        ("tp", "3", "3 ranks share the heads, but num_attention_heads is 32"),
        ("memory", "0.001", "at least 0.003907 GiB (4 MiB)"),
    ):
        before = page.locator(f"#{field}").input_value()
        set_field(page, field, wrong)
        expect(page.locator(f"#{field}-error")).to_contain_text(words)
        assert str(page.get_by_role("alert").text_content()).count(words) == 1
        expect(page.locator("#config-error")).to_be_empty()
        set_field(page, field, before)
        expect(page.locator("#copy-plan-id")).to_have_text(good.plan_id)
        expect(page.locator(f"#{field}-error")).to_be_empty()
    set_field(page, "memory", "0.003907")
    expect_plan(page, plan_of({"config": LLAMA}, memory_bytes=round(0.003907 * 2**30)))


def test_what_was_assumed_and_what_came_otherwise_than_asked_is_said(open_page: Open) -> None:
    page = open_page("#example=llama-3.1-8b")
    expect_plan(page, plan_of({"config": LLAMA}))
    expect(page.locator("#notes-box")).to_be_hidden()
    config = {name: value for name, value in LLAMA.items() if name not in ("dtype", "torch_dtype")}
    paste(page, config)
    set_field(page, "block_size", "7")
    plan = plan_of({"config": config, "block_size": 7})
    expect_plan(page, plan)
    notes = page.locator("#notes li")
    assert plan.notes
    expect(notes).to_have_count(len(plan.notes) + 1)
    assert notes.all_inner_texts()[:-1] == list(plan.notes)
    expect(notes.last).to_contain_text("blocks of 7 tokens were asked for; by this strategy they have 16")


def test_what_is_typed_and_has_no_plan_yet_outlives_a_reload(open_page: Open) -> None:
    page = open_page("#example=llama-3.1-8b")
    expect_plan(page, plan_of({"config": LLAMA}))
    typed = json.dumps(LLAMA)[:-20]
    set_field(page, "tp", "2")
    paste(page, typed)
    expect(page.locator("#config-error")).to_contain_text("not JSON")
    page.reload()
    expect(page.locator("#config-error")).to_contain_text("not JSON")
    assert page.locator("#config").input_value() == typed
    assert page.locator("#tp").input_value() == "2"
    paste(page, LLAMA)
    expect_plan(page, plan_of({"config": LLAMA, "tp": 2}))
    assert page.evaluate("sessionStorage.length") == 0


@pytest.mark.long
def test_a_fault_of_several_fields_is_at_each_and_ranks_are_refused(open_page: Open) -> None:
    page = open_page("#example=llama-3.1-8b")
    expect_plan(page, plan_of({"config": LLAMA}))
    set_field(page, "max_model_len", "0")
    page.locator("#more").evaluate("more => more.open = true")
    set_field(page, "max_num_batched_tokens", "0")
    for field in ("max_model_len", "max_num_batched_tokens"):
        expect(page.locator(f"#{field}-error")).to_contain_text("greater")
    set_field(page, "max_model_len", "")
    set_field(page, "max_num_batched_tokens", "")
    paste(page, {"model": {"config": LLAMA, "tp": 2}, "ranks": "all", "strategy": "unify", "memory_bytes": 40 << 30})
    expect(page.locator("#config-error")).to_contain_text("several ranks")


def test_the_latest_answer_wins_however_late_an_earlier_one_comes(open_page: Open) -> None:
    page = open_page("#example=llama-3.1-8b")
    expect_plan(page, plan_of({"config": LLAMA}))
    held: list[Route] = []

    def hold_first(route: Route, request: Request) -> None:
        if not held and '"tp": 2' in str(request.post_data):
            held.append(route)
        else:
            route.continue_()

    page.route("**/v1/plans", hold_first)
    with page.expect_request(lambda request: '"tp": 2' in str(request.post_data)):
        set_field(page, "tp", "2")
    set_field(page, "tp", "4")
    late = plan_of({"config": LLAMA, "tp": 4})
    expect_plan(page, late)
    held[0].abort()  # the page had let go of it
    expect(page.locator("#compare")).to_have_attribute("data-of", late.plan_id)
    assert shown_id(page) == late.plan_id


def test_all_strategies_stand_side_by_side_and_can_be_chosen_there(open_page: Open) -> None:
    page = open_page("#example=gemma-3-27b")
    config = EXAMPLES[0]["config"]
    plans = {strategy: plan_of({"config": config}, strategy=strategy) for strategy in STRATEGIES}
    expect(page.locator("#compare")).to_have_attribute("data-of", plans["auto"].plan_id)
    for strategy, row in zip(STRATEGIES, page.locator("#compare tbody tr").all(), strict=True):
        plan, cells = plans[strategy], row.locator("td").all_inner_texts()
        assert cells[0].split()[0] == strategy
        assert [int(cell.replace(",", "")) for cell in cells[1:4]] == [
            plan.slab_bytes,
            plan.num_blocks,
            len(plan.groups),
        ]
        assert cells[4].startswith(f"{plan.capacity.max_concurrency:,.2f}")
        assert cells[5] == f"{plan.capacity.longest_request_tokens:,}"
        wasted = 1 - plan.waste.live_bytes / plan.waste.total_bytes
        assert abs(float(cells[6].split()[0]) - 100 * wasted) < 0.06
    page.locator("#compare").get_by_role("button", name="unify").click()
    expect_plan(page, plans["unify"])
    assert page.locator('input[value="unify"]').is_checked()


def test_a_strategy_that_refuses_says_why(open_page: Open) -> None:
    page = open_page()
    dense = build.dense(build.ROW_SHAPE)  # may not be padded
    request = build.request(build.full("wide", size=192, backend=dense), build.sliding("n", size=128, backend=dense))
    with pytest.raises(kvpage.KvpageError) as refusal:
        kvpage.plan(request)
    request["strategy"] = "auto"
    paste(page, request)
    expect(page.locator("#compare tbody tr", has_text="unify")).to_contain_text(f"refused: {refusal.value.message}")


# --- taking it along --------------------------------------------------------------------------------------------------


def test_what_is_copied_gives_the_same_plan_elsewhere(open_page: Open, tmp_path: Path) -> None:
    page = open_page("#example=gpt-oss-120b&tp=4&kv_dtype=fp8&memory=31.5&max_model_len=65536&strategy=slab")
    config = next(one["config"] for one in EXAMPLES if one["name"] == "gpt-oss-120b")
    plan = plan_of(
        {"config": config, "tp": 4, "kv_dtype": "fp8"}, memory_bytes=63 << 29, max_model_len=65536, strategy="slab"
    )
    expect_plan(page, plan)
    request = str(page.locator("#copy-request").text_content())
    assert kvpage.plan(json.loads(request)).plan_id == plan.plan_id
    (tmp_path / "request.json").write_text(request)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for copied in ("#copy-curl", "#copy-command"):
        line = str(page.locator(copied).text_content()).replace("kvpage plan", f"{shlex.join(COMMAND)} plan --json", 1)
        done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["plan_id"] == plan.plan_id


@pytest.mark.long
def test_a_copy_lands_on_the_clipboard_or_is_selected(open_page: Open, site: Site) -> None:
    page = open_page("#example=llama-3.1-8b", permissions=["clipboard-read", "clipboard-write"])
    expect_plan(page, plan_of({"config": LLAMA}))
    page.get_by_role("button", name="Copy: Plan id").click()
    expect(page.locator("#copy-status")).to_have_text("Plan id copied.")
    assert page.evaluate("navigator.clipboard.readText()") == shown_id(page)
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('no')); }")
    page.get_by_role("button", name="Copy: Command").click()
    expect(page.locator("#copy-status")).to_contain_text("selected")
    assert page.evaluate("String(getSelection())").strip() == page.locator("#copy-command").text_content()


def test_a_link_leads_to_the_same_state(open_page: Open, site: Site) -> None:
    page = open_page()
    config = LLAMA | {"num_hidden_layers": 5, "note": "ä 🧊"}
    paste(page, config)
    set_field(page, "memory", "7.25")
    set_field(page, "tp", "2")
    page.get_by_role("radio", name="slab", exact=True).check()
    plan = plan_of({"config": config, "tp": 2}, memory_bytes=29 << 28, strategy="slab")
    expect_plan(page, plan)
    link = str(page.locator("#copy-link").text_content())
    assert page.url == link
    other = open_page(link.removeprefix(f"{site.origin}/ui"))
    expect_plan(other, plan)
    assert json.loads(other.locator("#config").input_value()) == config


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "fragment", ["#config=@@@", "#config=AAAA", "#example=nothing", "#strategy=none&example=gemma-3-27b", "#tp=abc"]
)
def test_a_damaged_link_is_no_accident(open_page: Open, fragment: str) -> None:
    page = open_page(fragment)
    if "config" not in fragment:
        expect(page.locator("#link-note")).to_contain_text(
            f"The link says {fragment[1:].split('&')[0]}, which cannot be"
        )
    else:
        expect(page.locator("#config-error")).to_contain_text("link is damaged")
        page.get_by_label("Example").select_option("gemma-3-27b")
    expect_plan(page, plan_of({"config": EXAMPLES[0]["config"]}))


def test_a_value_of_a_link_that_its_field_can_hold_is_judged_there(open_page: Open) -> None:
    page = open_page("#memory=-3")
    expect(page.locator("#memory-error")).to_contain_text("more than 0")
    assert page.locator("#memory").input_value() == "-3"
    expect(page.locator("#link-note")).to_be_hidden()


# --- live -------------------------------------------------------------------------------------------------------------


@contextmanager
def pool_of(site: Site, name: str, strategy: str = "unify", memory_bytes: int = 16 << 20) -> Iterator[Pool]:
    request = json.loads((ROOT / "examples/mimo.json").read_text())
    with site.service.client() as client:
        pool = client.create_pool(
            request | {"strategy": strategy, "memory_bytes": memory_bytes}, name=name, device="host"
        )
        try:
            yield pool
        finally:
            client.delete_pool(pool.id, wait_s=30)


def lease_of(site: Site, pool: str, name: str, **options: Any) -> Any:
    return kvpage.open_lease(pool, name=name, device="host", run_dir=site.run_dir, **options)


def rows_of(page: Page, table: str) -> list[list[str]]:
    return [row.locator("td").all_inner_texts() for row in page.locator(f"#{table} tbody tr").all()]


def test_pools_are_shown_to_those_with_a_token_only(open_page: Open) -> None:
    page = open_page("#view=live")
    expect(page.locator("#token-why")).to_contain_text("token")
    expect(page.locator("#live-body")).to_be_hidden()
    page.get_by_label("Token of this server").fill("another-token-than-that")
    page.keyboard.press("Enter")
    expect(page.locator("#token-why")).to_contain_text("does not carry a token of this server")
    page.get_by_label("Token of this server").fill(TOKEN)
    page.get_by_role("button", name="Use it").click()
    expect(page.locator("#live-status")).to_have_text("Connected: 0 pools.")
    expect(page.locator("#no-pools")).to_be_visible()
    kept = page.evaluate("[Object.values(sessionStorage), Object.values(localStorage), document.cookie]")
    assert kept == [[TOKEN], [], ""]
    page.get_by_role("button", name="Forget the token").click()
    expect(page.locator("#token-form")).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0


def test_a_token_leaves_the_address_at_once(open_page: Open, site: Site) -> None:
    page = open_page(f"#token={TOKEN}")
    expect(page.locator("#copy-plan-id")).not_to_be_empty()
    assert TOKEN not in page.url
    assert TOKEN not in page.content()
    page.get_by_role("link", name="Live").click()
    expect(page.locator("#live-status")).to_contain_text("Connected")
    assert page.url == f"{site.origin}/ui#view=live"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrong", ["\u200b{}", "{}\u00e9", "{}\n{}", "{} {}", "{}\x00"], ids=repr)
def test_what_can_be_no_token_is_told_and_another_is_taken(open_page: Open, wrong: str) -> None:
    page = open_page(f"#token={quote(wrong.replace('{}', TOKEN))}&view=live")
    expect(page.locator("#token-why")).to_contain_text("is no token")
    expect(page.get_by_role("button", name="Forget the token")).to_be_visible()
    page.get_by_label("Token of this server").fill(TOKEN)
    page.keyboard.press("Enter")
    expect(page.locator("#live-status")).to_contain_text("Connected")


def test_a_plan_too_says_that_a_token_is_none(open_page: Open) -> None:
    page = open_page(f"#token=%E2%80%8B{TOKEN}")
    expect(page.locator("#plan-view")).to_contain_text("is no token")


def test_an_end_of_line_behind_a_token_is_no_part_of_it(open_page: Open) -> None:
    page = open_page(f"#token={TOKEN}%0A&view=live")
    expect(page.locator("#live-status")).to_contain_text("Connected")
    assert page.evaluate("Object.values(sessionStorage)") == [TOKEN]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["unify", "nested"])
def test_what_is_shown_of_a_pool_is_what_the_api_says(open_page: Open, site: Site, strategy: str) -> None:
    with pool_of(site, "pool", strategy) as pool, site.service.client() as client:
        with lease_of(site, "pool", "first", tenant="chat") as first, lease_of(site, "pool", "second") as second:
            client.set_tenant(pool.id, "chat", quota_bytes=8 << 20, weight=3)
            shared = first.allocate(0, 3)
            second.retain(0, shared[:2])
            cached = second.allocate(0, 2)
            second.commit(0, cached, [bytes([number]) * 16 for number in (1, 2)])
            second.free(0, cached)
            page = open_page(LIVE)
            blocks, drawn = client.get_pool(pool.id).blocks, client.block_map(pool.id)
            assert blocks is not None
            expect(page.locator("#heat-summary")).to_contain_text(
                f"{sum(drawn.used)} blocks used, {sum(drawn.shared)} of them shared, {sum(drawn.cached)} cached; "
                f"{sum(drawn.owned)} of {drawn.num_slabs} slabs"
            )
            assert (sum(drawn.used), sum(drawn.shared), sum(drawn.cached)) == (3, 2, 2)
            groups = [[str(place), f"{g.block_bytes:,}", f"{g.used:,}", f"{g.cached:,}", f"{g.free:,}", f"{g.available:,}", f"{g.slabs:,}"] for place, g in enumerate(blocks.groups)]  # fmt: skip # noqa: E501
            assert rows_of(page, "groups") == groups
            leases = {row[2]: row for row in rows_of(page, "leases")}
            assert {name: (row[0], row[3], row[4], row[7]) for name, row in leases.items()} == {
                lease.name: (str(os.getpid()), lease.tenant, "active", " + ".join(map(str, lease.blocks)))
                for lease in blocks.leases
            }
            tenants = {row[0]: row for row in rows_of(page, "tenants")}
            assert (tenants["chat"][2], tenants["chat"][5], tenants["chat"][6]) == ("8 MiB", "3", "1")
            assert [row[0] for row in rows_of(page, "holders")] == [str(os.getpid())] * 2
            [device] = client.devices()
            assert rows_of(page, "devices")[0][5] == str(device.worker_pid)
            [row] = rows_of(page, "pools")
            assert (row[0], row[2], row[7], row[8]) == ("pool", "ready", "2", "2")
            total = (blocks.num_slabs - 1) * blocks.slab_bytes
            used = sum(group.used * group.block_bytes for group in blocks.groups)
            assert row[5] == f"{100 * used / total:.1f} %"


def drawn_map(page: Page) -> str:
    """The picture of the blocks, as drawn."""
    return str(page.locator("#heat").evaluate("map => map.toDataURL()"))


def test_the_map_changes_when_blocks_are_given_back(open_page: Open, site: Site) -> None:
    with pool_of(site, "pool"), lease_of(site, "pool", "engine") as lease:
        [block] = lease.allocate(1, 1).tolist()
        page = open_page(LIVE)
        expect(page.locator("#heat-summary")).to_contain_text("1 block used")
        page.get_by_label("Look at a cell").fill(str(block))
        readout = page.locator("#heat-cell-text")
        expect(readout).to_have_text(f"slab {block}, block table 1: 1 used, 0 shared, 0 cached, 0 free")
        before = drawn_map(page)
        lease.free(1, [block])
        expect(page.locator("#heat-summary")).to_contain_text("0 blocks used")
        expect(readout).to_have_text(f"slab {block}: nobody's")
        assert drawn_map(page) != before
        expect(page.locator("#history svg")).to_have_attribute(
            "aria-label", re.compile(r"^Now 0.0 % used.*most used [1-9]")
        )
        page.locator("#heat").hover(position={"x": 3, "y": 3})
        expect(readout).to_have_text("slab 0: nobody's, slab 0 is never handed out")


@pytest.mark.long
def test_block_tables_that_share_a_colour_share_an_entry_of_the_legend(open_page: Open, site: Site) -> None:
    layers = [build.sliding(f"window-{number}", window=64 << number) for number in range(8)]
    with site.service.client() as client:
        pool = client.create_pool(build.request(*layers, memory_bytes=4 << 20), name="tables", device="host")
        with lease_of(site, "tables", "engine") as lease:
            for table in range(8):
                lease.allocate(table, 1)
            page = open_page(LIVE)
            expect(page.locator("#heat-legend")).to_contain_text("used, tables 0, 6")
            expect(page.locator("#heat-legend")).to_contain_text("used, tables 1, 7")
            expect(page.locator("#heat-legend")).to_contain_text("used, table 5")
        client.delete_pool(pool.id, wait_s=30)


@pytest.mark.long
def test_many_blocks_are_drawn_together_and_it_is_said(open_page: Open, site: Site) -> None:
    layer = {"name": "a", "kind": "full_attention", "num_kv_heads": 1, "head_size": 16, "dtype": "bfloat16", "backend": "flash_attn"}  # fmt: skip # noqa: E501
    request = {"strategy": "unify", "memory_bytes": 5 << 20, "layers": [layer]}
    with site.service.client() as client:
        pool = client.create_pool(request, name="many", device="host")
        with lease_of(site, "many", "engine") as lease:
            lease.allocate(0, 4000)
            page = open_page(LIVE)
            expect(page.locator("#heat-summary")).to_contain_text("4,000 blocks used")
            expect(page.locator("#heat-summary")).to_contain_text("5 slabs are drawn together in each cell")
            assert int(str(page.get_by_label("Look at a cell").get_attribute("max"))) < 1024
        client.delete_pool(pool.id, wait_s=30)


def test_names_are_text_whatever_they_look_like(open_page: Open, site: Site) -> None:
    name = "<img src=x onerror=alert(1)>"
    with pool_of(site, name), lease_of(site, name, f"{name} lease", tenant=name, client_name=name) as lease:
        lease.allocate(0, 1)
        page = open_page(LIVE, allowed=("requires 'TrustedHTML'",))
        expect(page.locator("#pool-name")).to_have_text(name)
        expect(page.locator("#leases tbody tr td").nth(2)).to_have_text(f"{name} lease")
        expect(page.locator("#tenants tbody tr td").first).to_have_text(name)
        assert page.locator("main img").count() == 0
        refused = page.evaluate("try { document.body.innerHTML = '<b>x</b>'; 'done' } catch (error) { error.name }")
        assert refused == "TypeError"  # Trusted Types: no script of the page could make markup of it


def test_pools_come_go_and_are_chosen(open_page: Open, site: Site) -> None:
    page = open_page(LIVE)
    expect(page.locator("#live-status")).to_have_text("Connected: 0 pools.")
    with pool_of(site, "one"):
        expect(page.locator("#pool-name")).to_have_text("one")
        with pool_of(site, "two", memory_bytes=4 << 20):
            page.get_by_role("button", name="two").click()
            expect(page.locator("#pool-name")).to_have_text("two")
            assert page.get_by_role("button", name="two").get_attribute("aria-pressed") == "true"
        expect(page.locator("#pool-name")).to_have_text("one")
    expect(page.locator("#no-pools")).to_be_visible()


def test_a_service_that_does_not_answer_is_told_and_asked_again(open_page: Open) -> None:
    page = open_page(LIVE, allowed=("status of 503",))
    expect(page.locator("#live-status")).to_have_text("Connected: 0 pools.")
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#live-status")).to_have_text("Paused.")
    page.route("**/v1/pools", lambda route: route.fulfill(status=503, body="{}", content_type="application/json"))
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#live-status")).to_contain_text("Not connected")
    page.unroute("**/v1/pools")
    expect(page.locator("#live-status")).to_have_text("Connected: 0 pools.")


# --- for everybody ----------------------------------------------------------------------------------------------------


def violations(page: Page, *rules: str) -> list[str]:
    """What axe finds, by all of its rules or by some: names, roles, labels, contrast."""
    page.evaluate(AXE)
    options: dict[str, Any] = {"resultTypes": ["violations"]} | ({"runOnly": list(rules)} if rules else {})
    found = page.evaluate("options => axe.run(document, options)", options)
    return [
        f"{fault['id']}: {', '.join(str(node['target']) for node in fault['nodes'])}" for fault in found["violations"]
    ]


def test_axe_finds_nothing_in_a_plan_by_day_and_no_contrast_too_low_by_night(open_page: Open) -> None:
    page = open_page("#example=mimo")
    expect(page.locator("#compare[data-of]")).to_be_visible()
    page.locator("#more").evaluate("more => more.open = true")
    set_field(page, "memory", "0")
    expect(page.get_by_role("alert")).to_be_visible()
    assert violations(page) == []
    page.emulate_media(color_scheme="dark")
    assert violations(page, "color-contrast") == []


def test_axe_finds_nothing_in_pools_by_day_and_no_contrast_too_low_by_night(open_page: Open, site: Site) -> None:
    with pool_of(site, "pool"), lease_of(site, "pool", "engine") as lease:
        lease.allocate(0, 2)
        page = open_page(LIVE)
        expect(page.locator("#heat-summary")).to_contain_text("2 blocks used")
        page.get_by_role("button", name="Pause").click()
        assert violations(page) == []
        page.emulate_media(color_scheme="dark")
        assert violations(page, "color-contrast") == []
    page = open_page("#view=live")
    expect(page.locator("#token-form")).to_be_visible()
    assert violations(page) == []


def test_axe_would_find_it(open_page: Open) -> None:
    page = open_page()
    page.evaluate("document.querySelector('label[for=tp]').remove()")
    page.evaluate("document.querySelector('.brand').style.color = '#ccc'")
    found = " ".join(violations(page, "label", "color-contrast"))
    assert "label" in found
    assert "color-contrast" in found


def test_everything_is_reached_by_the_keyboard_and_shows_that_it_is(open_page: Open) -> None:
    page = open_page("#example=gemma-3-27b")
    expect(page.locator("#compare[data-of]")).to_be_visible()
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        here = focused(page)
        if here["tag"] == "BODY":
            break
        assert here["outline"] != "none", here
        assert here["width"] >= 2, here
        reached.append(here["id"])
    order = [
        "skip",
        "to-plan",
        "to-live",
        "example",
        "config",
        "file",
        "auto",
        "memory",
        "memory-range",
        "tp",
        "kv_dtype",
    ]
    assert reached[: len(order)] == order
    assert {"max_model_len", "block_size", "picture", *STRATEGIES, "Copy", "copy-link"} <= set(reached)


def test_a_plan_is_made_by_the_keyboard_alone(open_page: Open) -> None:
    page = open_page("#example=llama-3.1-8b")
    expect_plan(page, plan_of({"config": LLAMA}))
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # skip to the content
    assert focused(page)["id"] == "main"
    page.locator('input[value="auto"]').focus()
    page.keyboard.press("ArrowRight")
    expect_plan(page, plan_of({"config": LLAMA}, strategy="unify"))
    for _ in range(3):
        page.keyboard.press("Tab")
    assert focused(page)["id"] == "tp"
    page.keyboard.press("ArrowUp")
    expect_plan(page, plan_of({"config": LLAMA, "tp": 2}, strategy="unify"))
    page.locator("#compare").get_by_role("button", name="slab").focus()
    page.keyboard.press("Enter")
    slab = plan_of({"config": LLAMA, "tp": 2}, strategy="slab")
    expect_plan(page, slab)
    expect(page.locator("#compare")).to_have_attribute("data-of", slab.plan_id)
    assert focused(page)["id"] == "slab"  # the table was filled anew, and the place was kept


def test_the_views_have_names_roles_and_regions_that_speak(open_page: Open) -> None:
    page = open_page("#example=mimo")
    expect(page.locator("#compare[data-of]")).to_be_visible()
    for role, name in (
        ("navigation", "Views"), ("form", "What to plan"), ("radiogroup", "Strategy"), ("table", "All strategies"),
        ("table", "Where the bytes go"), ("table", "Decisions, by block table"), ("combobox", "KV dtype"),
        ("spinbutton", "Tensor-parallel ranks"), ("textbox", "config.json"), ("region", "Picture of the layout"),
    ):  # fmt: skip
        assert page.get_by_role(role, name=name, exact=True).count() == 1, (role, name)  # type: ignore[arg-type]
    assert "block table" in str(page.locator("#picture img").get_attribute("alt"))
    assert page.get_by_role("link", name="Plan", exact=True).get_attribute("aria-current") == "page"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fragment", ["#example=mimo", "#example=qwen3-next-80b-a3b&memory=0", LIVE, "#view=live"])
def test_nothing_scrolls_sideways_at_360_pixels(open_page: Open, site: Site, fragment: str) -> None:
    name = "a-name-of-a-pool-that-is-as-long-as-it-may-be-" * 5
    with pool_of(site, name) as pool, lease_of(site, name, name) as lease:
        lease.allocate(0, 2)
        page = open_page(fragment, viewport={"width": 360, "height": 740})
        ready = {"#example=mimo": "#compare[data-of]", LIVE: "#heat-summary", "#view=live": "#token-form"}
        expect(page.locator(ready.get(fragment, "#plan-fault"))).to_be_visible()
        if fragment == LIVE:
            expect(page.locator("#heat-summary")).to_contain_text("2 blocks used")
            assert str(page.locator("#pool-facts").text_content()).startswith(pool.id)
        assert not scrolls_sideways(page)
        page.evaluate("document.querySelector('#main').style.minWidth = '361px'")
        assert scrolls_sideways(page), "the check itself"


def test_the_page_is_light_or_dark_and_still_as_the_reader_prefers(open_page: Open) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    moving = "getComputedStyle(document.querySelector('.meter span')).transitionDuration"
    page = open_page("#example=mimo", color_scheme="light")
    expect(page.locator("#compare[data-of]")).to_be_visible()
    assert page.evaluate(paper) == "rgb(255, 255, 255)"
    assert page.evaluate(moving) == "0.16s"
    page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    assert page.evaluate(paper) == "rgb(13, 17, 23)"
    assert page.evaluate(moving) == "0s"


@pytest.mark.long
def test_the_file_of_a_request_can_be_saved(open_page: Open) -> None:
    page = open_page("#example=llama-3.1-8b")
    plan = plan_of({"config": LLAMA})
    expect_plan(page, plan)
    with page.expect_download() as download:
        page.get_by_role("link", name="Save request.json").click()
    assert kvpage.plan(json.loads(Path(download.value.path()).read_text())) == plan
    assert download.value.suggested_filename == "request.json"
