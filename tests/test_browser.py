"""What a person does in the UI: fill in the run form, watch, look at the result, cancel, run again.

Chromium is the system's. `CKPT_PICTURES=<folder>` keeps pictures of the run form and of the result, for the pages.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import DEADLINE, eventually
from playwright.sync_api import Locator, Page, expect, sync_playwright
from workers import LIGHT, Worker, deployed_worker

from ckpt import Result, resolve

CHROMIUM = os.environ.get("CKPT_CHROMIUM") or shutil.which("chromium")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
PICTURES = os.environ.get("CKPT_PICTURES")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.prefect,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium"),
]


class Ui:
    """The few pages of Prefect's UI that a training is run with; every wait ends at the deadline.

    The page of a flow run draws its timeline all the time, which takes a core from the training without a graphics card:
    the end of a run is waited for on the page of its deployment.
    """

    def __init__(self, page: Page, api: str) -> None:
        self.page = page
        self._home = api.removesuffix("/api")
        page.set_default_timeout(1000 * DEADLINE)
        expect.set_options(timeout=1000 * DEADLINE)

    def fill_in_run_form(self, run_name: str, **fields: str) -> None:
        """From the start page to the form of train/train, with these values; fields by their titles."""
        self.page.goto(self._home)
        self.page.get_by_role("link", name="Deployments", exact=True).click()
        self.page.locator("a[href*='/deployments/deployment/']", has_text="train").click()
        self.page.get_by_role("button", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Custom run").click()
        self.page.get_by_label("Run Name").fill(run_name)
        for title, value in fields.items():
            self._fill(title.replace("_", " "), value)

    def _fill(self, title: str, value: str) -> None:
        """The first thing to write into after the field's title: a text, or the editor for a mapping's JSON."""
        after = f"//label[starts-with(normalize-space(.), '{title}')]/following::*"
        if not value.startswith("{"):
            self.page.locator(f"{after}[self::textarea][1]").fill(value)
            return
        editor = self.page.locator(f"{after}[@contenteditable='true'][1]")
        expect(editor).to_contain_text("epochs")  # the editor comes first, the default later
        editor.click()
        self.page.keyboard.press("ControlOrMeta+a")
        self.page.keyboard.insert_text(value)
        expect(editor).to_have_text(value)

    def submit(self) -> None:
        self.page.get_by_role("button", name="Submit").click()
        expect(self.page.get_by_role("button", name="Run", exact=True)).to_be_visible()

    def wait_for_state(self, run_name: str, state: str) -> None:
        """On the deployment's page, loaded again until its list of runs says so."""
        link = self.page.get_by_role("link", name=run_name, exact=True)
        card = self.page.locator("[data-slot=card]", has=link).filter(has_text=state)

        def seen() -> int:
            self.page.reload()
            expect(link.first).to_be_visible()
            return card.count()

        eventually(seen, bool)

    def open_run(self, run_name: str) -> None:
        self.page.get_by_role("link", name=run_name, exact=True).first.click()
        expect(self.page.get_by_role("tab", name="Artifacts")).to_be_visible()

    def open_artifact(self, key: str) -> None:
        """Of the flow run that is shown."""
        self.page.get_by_role("tab", name="Artifacts").click()
        self.page.locator("a[href*='/artifacts/']", has_text=key).click()
        expect(self.page.get_by_role("tab", name="Raw")).to_be_visible()

    def cancel(self, run_name: str) -> None:
        """By the menu of the flow run's page; back on the deployment's page then."""
        self.open_run(run_name)
        self.page.get_by_role("button", name="Open menu").click()
        self.page.get_by_role("menuitem", name="Cancel").click()
        self.page.get_by_role("alertdialog").get_by_role("button", name="Cancel Flow Run").click()
        expect(self.page.get_by_role("alertdialog")).to_be_hidden()
        self.page.locator("a[href*='/deployments/deployment/']").first.click()

    def picture(self, name: str, top: Locator, height: int) -> None:
        """Keep what is below `top`, if pictures are wanted."""
        if PICTURES is not None:
            box = top.bounding_box()
            assert box is not None
            clip = {"x": box["x"] - 16, "y": box["y"] - 16, "width": 1280 - box["x"], "height": height}
            self.page.screenshot(path=Path(PICTURES) / f"{name}.png", clip=clip, full_page=True)


@pytest.fixture(scope="module")
def deployed(prefect_server, tmp_path_factory) -> Iterator[Worker]:
    """The deployments of deployments/prefect.yaml, and a worker."""
    with deployed_worker(tmp_path_factory.mktemp("worker")) as worker:
        yield worker
        print(worker.log.read_text(errors="replace"))  # shown where a test fails


@pytest.fixture
def ui(prefect_server, deployed, tmp_path) -> Iterator[Ui]:
    """In a browser of its own."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch_persistent_context(
            tmp_path / "profile", executable_path=CHROMIUM, args=FLAGS, viewport={"width": 1280, "height": 960}
        )
        yield Ui(browser.pages[0], prefect_server)
        browser.close()


@pytest.fixture
def runs(deployed) -> Path:
    """The folder that the form says, unless something else is filled in."""
    return deployed.log.parent / "default-runs"


def test_a_training_is_started_by_the_form_and_its_result_is_shown_with_plot_and_table(ui, runs):
    """The example with the form's defaults but for a name and the number of epochs."""
    ui.fill_in_run_form("by-the-form", Name="from-the-form", Training_settings='{"epochs": 3, "seed": 0}')
    ui.picture("run_form", ui.page.get_by_role("heading", name="Parameters"), 860)
    ui.submit()
    ui.wait_for_state("by-the-form", "Completed")

    ui.open_run("by-the-form")
    ui.open_artifact("ckpt-result-from-the-form")
    plot = ui.page.locator("img[src^='data:image/svg+xml']")
    expect(plot).to_be_visible()
    assert plot.evaluate("image => image.decode().then(() => image.naturalWidth)") > 100
    table = ui.page.get_by_role("table").last
    expect(table.get_by_role("row")).to_have_count(1 + 3)
    expect(table).to_contain_text("committed")
    ui.picture("result_in_ui", ui.page.get_by_role("heading", name="from-the-form"), 1140)
    assert [record.state.value for record in Result.from_path(runs / "from-the-form").history] == ["committed"] * 3


def test_a_run_that_is_cancelled_in_the_ui_goes_on_when_its_name_is_filled_in_again(ui, runs):
    """Cancelled in the UI means: saved just in time; the second run says in its metrics after which step it began."""
    run = runs / "stopped"
    given = {"Name": "stopped", "Training_function": f"{LIGHT}:train", "Score": "step"}
    ui.fill_in_run_form("first", **given, Training_settings='{"steps": 100000, "pause": 0.5}')
    ui.submit()
    eventually(lambda: list(run.glob("commits/*.json")), bool)
    ui.cancel("first")
    ui.wait_for_state("first", "Cancelled")
    saved = resolve(str(run)).metrics
    assert saved["just_in_time"] is True

    ui.fill_in_run_form("second", **given, Training_settings=f'{{"steps": {saved["step"] + 2}}}')
    ui.submit()
    ui.wait_for_state("second", "Completed")
    assert resolve(str(run)).metrics == {"step": saved["step"] + 1, "started_at": saved["step"] + 1}
