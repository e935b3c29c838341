"""A headless Chromium of the system, driven through selenium; nothing is downloaded."""

import contextlib
import shutil

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


def found():
    """Return the browser and its driver; skip the test where one of them is missing."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if browser is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)}")
    if driver is None:
        pytest.skip("chromedriver is not installed (Debian: chromium-driver)")
    return browser, driver


@contextlib.contextmanager
def opened():
    """Start a browser that logs what it asks the network for."""
    browser, driver = found()
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chromium = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield chromium
    finally:
        chromium.quit()


def resize(chromium, width, height=900):
    """Show a page as a screen of this many CSS pixels does; below 500 as a phone does."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def prefer(chromium, scheme):
    """Ask for the `light` or `dark` scheme, as the reader's system does."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
