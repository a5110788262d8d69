"""The page at `/` in headless Chromium, used by the keyboard alone but for the choice of files."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.serving import Server, wait_until

webdriver = pytest.importorskip("selenium.webdriver", reason="the page's tests need selenium")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(None in (CHROMIUM, DRIVER), reason="there is no chromium with its chromedriver"),
]
QUIET = ["background-networking", "component-update", "sync", "quic", "gpu", "dev-shm-usage", "default-apps"]
PHONE, DESK = (360, 740), (1200, 900)
PHOTOS = "mobilenet-v1-cifar10"
ENTER, TAB, SPACE, CONTROL, HOME, DOWN = "\ue007", "\ue004", " ", "\ue009", "\ue011", "\ue015"


@pytest.fixture(scope="module")
def served(start: Callable[..., Server]) -> Server:
    return start("wide-deep-criteo", "wide-deep-criteo@fp32", "multi30k-en-de", PHOTOS, "--workers", "1")


@pytest.fixture(scope="module")
def texts(start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A sentence encoder and a cross-encoder, tiny and random."""
    pytest.importorskip("torch", reason="needs the train extra")
    pytest.importorskip("transformers", reason="needs the test extra")
    from helpers.text_models import built

    return start(*(built(tmp_path_factory.mktemp("texts"), labels) for labels in (0, 1)), "--workers", "1")


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from PIL import Image

    path = tmp_path_factory.mktemp("photo") / "photo.png"
    Image.radial_gradient("L").convert("RGB").save(path)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ["headless=new", "no-sandbox", "no-first-run", *(f"disable-{name}" for name in QUIET)]:
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(service=webdriver.ChromeService(DRIVER), options=options)
    yield driver
    driver.quit()


class Page:
    """The page as a user has it."""

    def __init__(self, browser: Any, server: Server, size: tuple[int, int] = DESK, scheme: str = "light") -> None:
        self.browser, self.server = browser, server
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        browser.get("about:blank")
        browser.get(server.url)
        wait_until(lambda: self.all("#model option"))

    def all(self, selector: str) -> list[Any]:
        return list(self.browser.find_elements("css selector", selector))

    def one(self, selector: str) -> Any:
        wait_until(lambda: self.all(selector))
        return self.all(selector)[0]

    def script(self, text: str, *arguments: Any) -> Any:
        return self.browser.execute_script(text, *arguments)

    def press(self, *keys: str) -> None:
        self.browser.switch_to.active_element.send_keys(*keys)

    def choose(self, name: str) -> None:
        """By the arrow keys where the list of models has the focus."""
        names = self.script("return [...document.querySelectorAll('#model option')].map((each) => each.value)")
        self.one("#model").send_keys(HOME, *[DOWN] * names.index(name))
        assert self.script("return document.querySelector('#model').value") == name

    def error(self) -> str:
        return str(self.one("#error").text)

    def write(self, selector: str, text: str) -> None:
        """Into a field, in place of what is there."""
        self.one(selector).clear()
        self.one(selector).send_keys(text)

    def rows(self) -> list[list[str]]:
        """The cells of the table that is shown, as soon as there is one."""
        wait_until(lambda: self.all(".split"))
        return [[cell.text for cell in row.find_elements("css selector", "td")] for row in self.all("tbody tr")]

    def use(self, name: str, photo: Path) -> None:
        """Try a model as its view has it."""
        self.choose(name)
        if name == PHOTOS:
            self.one("#files").send_keys(str(photo))
        else:
            if self.all("#query"):
                self.write("#query", "the zoo")
            self.one("#work button").click()
        wait_until(lambda: self.all(".split"))


def test_sentences_are_translated_as_they_are_typed(browser: Any, served: Server) -> None:
    page = Page(browser, served)
    page.choose("multi30k-en-de")
    text = page.one("#text")
    text.clear()
    text.send_keys("A dog runs.", ENTER, "Two men are cooking.")  # nobody presses a button
    wait_until(lambda: [element.text for element in page.all(".to")].count("…") == 0 and len(page.all(".to")) == 2)
    expected = served.json("/v1/models/multi30k-en-de:run", b"A dog runs.\nTwo men are cooking.", "text/plain")[
        "results"
    ]
    assert [element.text for element in page.all(".to")] == [result["translation"] for result in expected]
    wait_until(lambda: page.all(".split"))
    assert "model" in page.one(".keys").text


def test_rows_are_scored_by_the_keyboard_alone_in_both_precisions(
    browser: Any, served: Server, lines: list[bytes]
) -> None:
    page = Page(browser, served)
    page.choose("wide-deep-criteo")
    page.script("document.querySelector('#rows').value = arguments[0]", b"\n".join(lines[:3]).decode())
    page.press(TAB)  # from the model to the rows
    assert page.script("return document.activeElement.id") == "rows"
    page.press(TAB)
    page.press(SPACE)  # fp32 beside int8
    page.press(TAB)
    page.press(ENTER)
    wait_until(lambda: len(page.all("tbody tr")) == 6 and len(page.all(".split")) == 2)
    shown = [float(element.text) for element in page.all("td.number")]
    for name, scores in (("wide-deep-criteo", shown[:3]), ("wide-deep-criteo@fp32", shown[3:])):
        expected = served.json(f"/v1/models/{name}:run", b"\n".join(lines[:3]), "text/tab-separated-values")
        assert scores == pytest.approx([result["probability"] for result in expected["results"]], abs=6e-5)
    assert [element.text for element in page.all("h2")] == ["int8, native", page.all("h2")[1].text]
    assert "fp32" in page.all("h2")[1].text


def test_a_photo_gets_labels(browser: Any, served: Server, photo: Path) -> None:
    page = Page(browser, served)
    page.choose(PHOTOS)
    page.one("#files").send_keys(str(photo))
    wait_until(lambda: page.all("tbody tr"))
    expected = served.json(f"/v1/models/{PHOTOS}:run", photo.read_bytes(), "image/png")["results"][0]
    assert page.one("tbody td").text == str(expected["label"])
    assert page.script("return document.querySelector('.photo img').naturalWidth") == 256


def test_texts_are_found_by_their_vectors(browser: Any, texts: Server) -> None:
    documents = ["the cat", "a zebra, a zoo", "b c d e f g"]
    page = Page(browser, texts)
    page.choose("texts-0")
    page.write("#text", "\n".join(documents))
    page.write("#query", "the zoo" + ENTER)
    rows = page.rows()
    answers = texts.json("/v1/models/texts-0:run", "\n".join(["the zoo", *documents]).encode(), "text/plain")["results"]
    asked, *vectors = np.array([answer["embedding"] for answer in answers])
    cosines = vectors @ asked / np.linalg.norm(vectors, axis=1) / np.linalg.norm(asked)
    order = np.argsort(-cosines)
    assert [row[0] for row in rows] == [documents[i] for i in order]
    assert [float(row[-1]) for row in rows] == pytest.approx(cosines[order].tolist(), abs=6e-5)


def test_texts_are_ranked_by_a_cross_encoder(browser: Any, texts: Server) -> None:
    documents = ["the cat", "a zebra, a zoo", "b c d e f g"]
    page = Page(browser, texts)
    page.choose("texts-1")
    page.write("#text", "\n".join(documents))
    page.write("#query", "the zoo" + ENTER)
    rows = page.rows()
    pairs = "\n".join(f"the zoo\t{document}" for document in documents).encode()
    scores = [result["score"] for result in texts.json("/v1/models/texts-1:run", pairs, "text/plain")["results"]]
    order = sorted(range(3), key=lambda i: -scores[i])
    assert [row[0] for row in rows] == [documents[i] for i in order]
    assert [float(row[1]) for row in rows] == pytest.approx([scores[i] for i in order], abs=6e-5)


def test_what_is_wrong_is_said(browser: Any, served: Server) -> None:
    page = Page(browser, served)
    page.choose("wide-deep-criteo")
    page.one("#rows").clear()
    page.one("#rows").send_keys("1,2", CONTROL + ENTER)
    wait_until(lambda: "found 1 column" in page.error() or "found 2 columns" in page.error())
    assert not page.all("tbody")


def test_what_is_typed_never_becomes_html(browser: Any, served: Server) -> None:
    page = Page(browser, served)
    page.choose("multi30k-en-de")
    page.one("#text").clear()
    page.one("#text").send_keys("<img src=x> a dog", CONTROL + ENTER)
    wait_until(lambda: page.all(".from"))
    assert page.one(".from").text == "<img src=x> a dog"
    assert not page.all("main img[src=x]")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["wide-deep-criteo", "multi30k-en-de", PHOTOS, "texts-0", "texts-1"])
def test_it_fits_a_phone_in_light_and_dark(
    browser: Any, request: pytest.FixtureRequest, photo: Path, name: str, scheme: str
) -> None:
    server = request.getfixturevalue("texts" if name.startswith("texts") else "served")
    page = Page(browser, server, PHONE, scheme)
    page.use(name, photo)
    over = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.script(over) == 0
    ground = page.script("return getComputedStyle(document.body).backgroundColor")
    red = int(ground.removeprefix("rgb(").split(",")[0])
    assert red < 60 if scheme == "dark" else red > 200
    assert page.script("return document.querySelector('#work button').getBoundingClientRect().height") >= 44


def test_it_loads_nothing_from_elsewhere_and_breaks_no_policy(browser: Any, served: Server) -> None:
    page = Page(browser, served)
    loaded = page.script("return performance.getEntriesByType('resource').map((each) => each.name)")
    assert len(loaded) >= 3
    assert all(url.startswith(served.url) for url in loaded)
    said = [
        line for line in browser.get_log("browser") if "favicon" not in line["message"] and "400" not in line["message"]
    ]
    assert said == []
    labelled = "return [...document.querySelectorAll('select, textarea, input')].every((each) => each.labels.length)"
    assert page.script(labelled)


def test_a_key_is_asked_for_where_the_server_wants_one(
    browser: Any, start: Callable[..., Server], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-of-a-test-0123456789\n")
    server = start("wide-deep-criteo", "--workers", "1", "--api-key-file", keys)
    browser.get("about:blank")
    browser.get(server.url)
    wait_until(lambda: browser.find_element("id", "secret").is_displayed())
    browser.find_element("id", "secret").send_keys("secret-of-a-test-0123456789", ENTER)
    wait_until(lambda: browser.find_elements("css selector", "#model option"))
    assert not browser.find_element("id", "secret").is_displayed()
