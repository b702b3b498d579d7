"""The Temporal UI as a person uses it, in a real browser.

Made for UI 2.54 and found by what a person reads (labels, roles), not by the page's structure.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import Page, sync_playwright

FLAGS = (
    "--no-sandbox",  # Chromium refuses to run as root with it
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SHOTS = "SEAMLESSFLOW_SCREENSHOTS"
LIMIT_S = 60.0
WORKFLOW_URL = re.compile(r"/workflows/([^/?]+/[0-9a-f-]{36})")


def chromium() -> str | None:
    """Path of the browser, or None: playwright's own downloads are not used."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def browser_page(executable: str) -> Iterator[Page]:
    """A page of a fresh headless browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        try:
            page = browser.new_page(viewport={"width": 1440, "height": 1000}, reduced_motion="reduce")
            page.set_default_timeout(LIMIT_S * 1000)
            yield page
        finally:
            browser.close()


class TemporalUi:
    """The UI at ``url`` and what is done in it. Screenshots go to ``$SEAMLESSFLOW_SCREENSHOTS``, else to ``shots``."""

    def __init__(self, page: Page, url: str, namespace: str, shots: Path) -> None:
        self.page = page
        self._place = (url, namespace)
        self._workflows = f"{url}/namespaces/{namespace}/workflows"
        self._shots = Path(os.environ.get(SHOTS) or shots)
        self._shots.mkdir(parents=True, exist_ok=True)

    def start_workflow(self, workflow: str, queue: str, kind: str, data: str) -> None:
        """*Start Workflow* with ``data`` as JSON, then the page of the new workflow."""
        page = self.page
        page.goto(self._workflows)
        exact = {"name": "Start Workflow", "exact": True}  # each row of the list offers "Start Workflow Like This One"
        page.get_by_role("link", **exact).or_(page.get_by_role("button", **exact)).click()
        page.get_by_role("textbox", name="Workflow ID").fill(workflow)
        page.get_by_role("textbox", name="Task Queue").fill(queue)
        page.get_by_role("textbox", name="Workflow Type").fill(kind)
        self._type_json(data)
        page.get_by_role("button", name="Start Workflow", exact=True).click()
        started = page.get_by_role("link", name="Workflow started successfully")
        started.wait_for()
        self.shot(f"{workflow}-started")
        started.click()
        page.wait_for_url(re.compile(f"/{re.escape(quote(workflow, safe=''))}/[0-9a-f-]{{36}}"))

    def send_update(self, name: str, data: str) -> str:
        """*Send an Update* from the page of a running workflow; what the list of updates offered."""
        page = self.page
        page.get_by_role("button", name="More Actions").click()
        page.get_by_role("menuitem", name="Send an Update").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_role("button", name="Select an Update").click()
        offered = dialog.get_by_role("listbox").inner_text()
        self.shot(f"updates-before-{name}")
        dialog.get_by_role("option", name=re.compile(f"^{name}\\b")).click()
        self._type_json(data)
        dialog.get_by_role("button", name="Submit").click()
        dialog.wait_for(state="hidden")
        return offered

    def open_tab(self, tab: str) -> None:
        """A tab of the workflow whose page is open. *Example*: ``user-metadata``."""
        found = WORKFLOW_URL.search(self.page.url)
        assert found, f"{self.page.url} is no workflow"
        self.page.goto(f"{self._workflows}/{found[1]}/{tab}")

    def status(self) -> str:
        """The badge beside the workflow's name. *Example*: ``RUNNING``."""
        return self.page.get_by_role("main").get_by_role("status").first.inner_text().strip().upper()

    def result_until(self, status: str) -> str:
        """*Result* of the open workflow once its badge says ``status``."""
        page = self.page
        page.get_by_role("main").get_by_role("status").filter(has_text=re.compile(status, re.IGNORECASE)).wait_for()
        result = page.get_by_role("textbox", name="Result").filter(has_text="{")  # it reads "null" until it is loaded
        result.wait_for()
        text = result.inner_text()
        self.shot(f"result-{status}")
        return text

    def details_until(self, *texts: str, limit_s: float = LIMIT_S) -> str:
        """Current details of the open workflow once they contain all ``texts``; looks again like a person, with R."""
        self.open_tab("user-metadata")
        frame = self.page.frame_locator("#user-metadata-current-details")
        end = time.monotonic() + limit_s
        shown = ""
        while time.monotonic() < end:
            shown = frame.locator("main").inner_text()
            if all(text in shown for text in texts):
                return shown
            self.page.wait_for_timeout(500)
            self.page.keyboard.press("r")
        self.shot("details-not-reached")
        raise AssertionError(f"waited {limit_s:g} s for {texts} in the current details, which are:\n{shown}")

    @contextmanager
    def followed(self, text: str) -> Iterator[TemporalUi]:
        """The UI in the new window that a link of the current details opens."""
        with self.page.expect_popup() as popup:
            self.page.frame_locator("#user-metadata-current-details").get_by_role("link", name=text).first.click()
        try:
            popup.value.wait_for_url(WORKFLOW_URL)
            yield TemporalUi(popup.value, *self._place, self._shots)
        finally:
            popup.value.close()

    def shot(self, name: str) -> Path:
        """A picture of the window."""
        file = self._shots / f"{name.replace('/', '-')}.png"
        self.page.screenshot(path=file)
        return file

    def _type_json(self, data: str) -> None:
        box = self.page.get_by_role("textbox", name="Data")
        box.fill(data)
        box.blur()  # the editor tidies the text up now, which would swallow the next click
        self.page.wait_for_timeout(300)
