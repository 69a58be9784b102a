"""docs/report-*.png from a report: `python docs/report_screenshot.py DIR/report/index.html`."""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

with sync_playwright() as playwright:
    flags = ["--headless", "--no-sandbox", "--disable-gpu"]
    browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
    page = browser.new_page(viewport={"width": 1200, "height": 1150})
    for section in ("tables", "explorer"):
        page.goto(f"{Path(sys.argv[1]).resolve().as_uri()}#{section}")
        page.screenshot(path=Path(__file__).with_name(f"report-{section}.png"))
    browser.close()
