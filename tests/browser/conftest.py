"""A headless Chromium, where there is one: chromium, its chromedriver, and selenium (extra `browser`)."""

import shutil

import pytest


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """A driver of the browser, which may not reach any network."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (extra browser)")
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((path for name in names if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("there is no Chromium with a chromedriver on the path")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    flags = ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync")
    for flag in (*flags, "disable-background-networking", "disable-component-update", "disable-dev-shm-usage"):
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.add_argument("--window-size=1200,900")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    made.set_script_timeout(60)
    yield made
    made.quit()
