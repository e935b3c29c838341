"""The page of a report in a real browser: drawn, quiet, and at home on a phone."""

import json
import re
import shutil
import time

import browser
import made_runs
import pytest

from gshard_exp import cli

HIDE_ME = "l4-e16"
CHARTS = {
    "loss",
    "held_out_loss",
    "tokens_to_reach",
    "loss_flops",
    "bleu_core_hours",
    "delta_bleu_core_hours",
    "bleu_flops",
    "delta_bleu_flops",
    "delta_bleu_by_language",
    "bleu_by_language",
}
PAPERS = {
    "paper_tokens_to_reach",
    "paper_bleu_core_years",
    "paper_delta_bleu_core_years",
    "paper_delta_bleu_by_language",
}
HEATS = {
    "expert_load",
    "fraction_dropped_first",
    "fraction_dropped_second",
    "fraction_tokens_left_behind",
}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Write a report with everything in it; one run is damaged, and one has a name that bites."""
    folder = made_runs.make_sweep(tmp_path_factory.mktemp("page") / "sweep")
    sweep = json.loads((folder / "sweep.json").read_text())
    biting = "</script><img src=x onerror=alert(1)>"
    shutil.copytree(folder / "l4-e4", folder / "copy")
    sweep["points"].append(made_runs.point("copy", 4, 4) | {"name": biting})
    (folder / "sweep.json").write_text(json.dumps(sweep))
    metrics = folder / "l8-e4" / "train" / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-30])
    assert cli.main(["report", str(folder), "--published"]) == 0
    return folder / "report" / "index.html"


@pytest.fixture(scope="module")
def chromium():
    with browser.opened() as started:
        yield started


@pytest.fixture
def opened(chromium, page):
    """Open the page on a desk, light; the log holds what this page did."""
    browser.resize(chromium, 1280)
    browser.prefer(chromium, "light")
    chromium.get_log("performance")
    chromium.get(page.as_uri())
    wait(chromium, "return document.querySelectorAll('figure .plot svg').length > 0")
    return chromium


def wait(chromium, script):
    """Wait until a script returns something true."""
    deadline = time.monotonic() + 10
    while not chromium.execute_script(script):
        assert time.monotonic() < deadline, script
        time.sleep(0.02)


def figures(chromium, selector):
    """Count the marks of a kind in each figure."""
    return chromium.execute_script(
        """const found = {};
        for (const f of document.querySelectorAll('figure'))
          found[f.dataset.chart] = f.querySelectorAll(arguments[0]).length;
        return found;""",
        selector,
    )


def over(chromium, chart, along=0.5, down=0.5):
    """Move the pointer over a chart, and return what the tip says."""
    from selenium.webdriver import ActionChains

    plot = chromium.find_element("css selector", f"figure[data-chart='{chart}'] .plot svg")
    # Scrolling hides the tip, some frames later.
    chromium.execute_async_script(
        """arguments[0].scrollIntoView({block: 'center'});
        requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(arguments[1], 20)));""",
        plot,
    )
    size = plot.size
    at = (round((along - 0.5) * size["width"]), round((down - 0.5) * size["height"]))
    ActionChains(chromium, duration=0).move_to_element_with_offset(plot, *at).perform()
    wait(chromium, "return !document.getElementById('tip').hidden")
    return chromium.find_element("id", "tip").text


def test_every_chart_has_marks_and_nothing_complains(opened):
    marks = figures(opened, ".series .line, .series .mark")
    drawn = {name for name, count in marks.items() if count}
    assert drawn == CHARTS | PAPERS
    cells = {name: count for name, count in figures(opened, ".cell").items() if count}
    assert {re.sub("_l4-e4$", "", name) for name in cells} == HEATS
    assert cells["expert_load_l4-e4"] == 2 * 4
    assert opened.get_log("browser") == []


def test_nothing_leaves_the_file(opened, page):
    messages = [json.loads(row["message"])["message"] for row in opened.get_log("performance")]
    asked = {
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    }
    assert asked == {page.as_uri()}


def test_the_browser_itself_would_refuse_what_leaves_the_file(opened):
    opened.execute_script("document.body.append(Object.assign(new Image(), {src: 'x.png'}))")
    opened.execute_async_script("fetch('http://127.0.0.1:9/').catch(() => {}).then(arguments[0])")
    refused = [row["message"] for row in opened.get_log("browser")]
    directives = {"img-src data:", "default-src 'none'"}
    assert {d for d in directives if any(d in message for message in refused)} == directives
    assert all("Content Security Policy" in message for message in refused)


def test_a_name_that_looks_like_markup_is_text(opened):
    assert "</script><img src=x onerror=alert(1)>" in opened.find_element("id", "legend").text
    assert not opened.find_elements("css selector", "img")


def test_the_legend_hides_a_run_in_every_chart_and_shows_it_again(opened):
    selector = f".series[data-series='{HIDE_ME}']"
    before = figures(opened, selector)
    assert {name for name, count in before.items() if count} == CHARTS
    button = opened.find_element("css selector", f"#legend button[data-series='{HIDE_ME}']")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert not any(figures(opened, selector).values())
    assert figures(opened, ".series[data-series='l8-e4']")["loss"] == 1
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert figures(opened, selector) == before


def test_a_chart_whose_series_are_all_hidden_says_so(opened):
    for button in opened.find_elements("css selector", "#legend button"):
        button.click()
    text = opened.find_element("css selector", "figure[data-chart='loss'] .plot svg").text
    assert text == "all series are hidden"


def test_the_pointer_shows_the_values_of_every_run(opened):
    said = over(opened, "loss").splitlines()
    assert said[0].startswith("tokens seen, both sides, without padding: ")
    assert "l4-e16" in said and "l8-e16" in said
    values = [float(line) for line in said if re.fullmatch(r"\d\.\d+", line)]
    assert len(values) == 5 and all(3 < value < 9 for value in values)
    assert values == sorted(values, reverse=True)


def test_the_tip_of_a_cost_says_how_bleu_was_measured(opened):
    said = over(opened, "bleu_core_hours", 0.1, 0.9)
    assert "test, beam of 4, step 400" in said


def test_the_tip_of_a_language_names_the_languages_that_were_averaged(opened):
    said = over(opened, "delta_bleu_by_language")
    assert re.search(r"l\d\d, l\d\d, l\d\d \(.* pairs\)", said)


def test_the_tip_of_a_cell_says_layer_expert_and_load(opened):
    said = over(opened, "expert_load_l4-e4", 0.4, 0.1)
    assert re.fullmatch(r"encoder 1, expert \d\n\d\.\d+", said)


def test_the_keyboard_reads_the_points(opened):
    plot = opened.find_element("css selector", "figure[data-chart='loss'] .plot svg")
    opened.execute_script("arguments[0].focus()", plot)
    from selenium.webdriver import Keys

    plot.send_keys(Keys.ARROW_RIGHT)
    first = opened.find_element("id", "tip").text
    for _ in range(8):
        plot.send_keys(Keys.ARROW_RIGHT)
    assert first and opened.find_element("id", "tip").text not in ("", first)
    plot.send_keys(Keys.ESCAPE)
    assert opened.execute_script("return document.getElementById('tip').hidden")


def test_another_run_can_be_chosen_for_its_experts(opened):
    from selenium.webdriver.support.select import Select

    Select(opened.find_element("id", "which-run")).select_by_visible_text("l8-e16")
    wait(opened, "return document.querySelectorAll('figure[data-run=l8-e16] .cell').length > 0")
    shown = opened.execute_script(
        "return [...document.querySelectorAll('figure[data-run]')].filter(f => !f.hidden)"
        ".map(f => f.dataset.run)"
    )
    assert set(shown) == {"l8-e16"} and len(shown) == len(HEATS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_system_s_scheme_and_the_button_overrules_it(opened, scheme):
    def background():
        rgb = opened.execute_script("return getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", rgb)[:3]))

    browser.prefer(opened, scheme)
    is_dark = scheme == "dark"
    assert (background() < 150) == is_dark
    button = opened.find_element("id", "theme")
    label = "Light" if is_dark else "Dark"
    # Colours change at once; the page hears of it, and names the button, with a later frame.
    wait(opened, f"return document.getElementById('theme').textContent === '{label}'")
    button.click()
    assert (background() < 150) != is_dark


@pytest.mark.parametrize("width", [360, 390])
def test_a_phone_shows_it_all_without_scrolling_sideways(opened, width):
    browser.resize(opened, width, 800)
    opened.refresh()
    wait(opened, "return document.querySelectorAll('figure .plot svg').length > 10")
    wide = opened.execute_script("return document.documentElement.scrollWidth")
    assert wide == width
    # No text of a chart is cut off by its edge.
    cut = opened.execute_script(
        """const cut = [];
        for (const svg of document.querySelectorAll('.plot svg')) {
          const frame = svg.getBoundingClientRect();
          for (const text of svg.querySelectorAll('text')) {
            const box = text.getBoundingClientRect();
            if (box.width && (box.left < frame.left - 2 || box.right > frame.right + 2))
              cut.push(svg.closest('figure').dataset.chart + ': ' + text.textContent);
          }
        }
        return cut;"""
    )
    assert cut == []


def test_the_table_sorts_by_value_and_not_by_text(opened):
    head = opened.find_element("xpath", "//table[@id='table-points']//th/button[text()='params']")
    column = """return [...document.querySelectorAll('#table-points tbody tr')]
        .map(row => row.cells[8].dataset.value)"""
    head.click()
    values = list(map(int, opened.execute_script(column)))
    assert values == sorted(values) and len(set(values)) == 4
    head.click()
    assert list(map(int, opened.execute_script(column))) == values[::-1]


def test_links_lead_to_the_runs_and_the_files_that_were_written(opened, page):
    links = opened.execute_script(
        "return [...document.querySelectorAll('a[href]')].map(a => a.getAttribute('href'))"
    )
    files = [link for link in links if not link.startswith("#")]
    missing = [link for link in files if not (page.parent / link).exists()]
    assert missing == [] and len(files) > 50
    assert "../l4-e4/config.gin" in files and "plots/loss.svg" in files
    here = [link for link in links if link.startswith("#")]
    assert all(opened.find_elements("css selector", link) for link in here) and len(here) == 8


def test_damage_stands_at_the_top(opened):
    said = opened.find_element("id", "damage").text
    assert "l8-e4: train/metrics.jsonl: the last line is cut off" in said


def test_values_of_a_chart_can_be_read_as_a_table(opened):
    figure = opened.find_element("css selector", "figure[data-chart='bleu_core_hours']")
    opened.execute_script("arguments[0].querySelector('details').open = true", figure)
    wait(opened, "return document.querySelectorAll('figure[data-chart=bleu_core_hours] td').length")
    rows = figure.find_elements("css selector", "tr")
    assert len(rows) == 1 + 5
