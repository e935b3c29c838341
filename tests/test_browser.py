"""Where no browser is installed its tests are skipped with the reason, and do not fail."""

import browser
import pytest


@pytest.mark.parametrize(
    ("installed", "reason"),
    [((), "no browser is installed"), (("chromium",), "chromedriver is not installed")],
)
def test_a_missing_browser_or_driver_is_a_reason_to_skip(monkeypatch, installed, reason):
    monkeypatch.setattr(browser.shutil, "which", lambda name: name if name in installed else None)
    with pytest.raises(pytest.skip.Exception, match=reason):
        browser.found()
