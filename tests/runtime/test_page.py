"""The page in a real browser. Needs the extra `browser` and an installed Chromium; skipped with the reason otherwise."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import Server
from .stub_model import blocks, ids, make_ranks, write_script

pytestmark = pytest.mark.browser
playwright = pytest.importorskip("playwright.sync_api", reason='the page is tested with pip install ".[browser]"')

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
MARKDOWN = """Some thought.
</think>

# Title

Text with `code`, **strong** and *soft*, [a link](https://example.org/x) and [no link](javascript:alert(1)).

- one
  - nested
- two

```python
if a < b:
    pass
```

| a | b |
|---|---|
| 1 | 2 |

<img src=x onerror="document.title='hacked'"><script>document.title='hacked'</script>"""
TOOL = "</think>\n\n<tool_call>\n<function=look_up>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
TOOLS = json.dumps([{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}])
SLOW = {"blocks": [[token] for token in ids("Hm.</think>\n\n" + "word " * 600)], "delay_ms": 15}
QUICK = {"blocks": blocks("Think.\n</think>\n\nHello world", 2), "delay_ms": 2}

Start = Callable[..., Server]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


class Tab:
    """A page of the server, its faults, and every address it asked for."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(15_000)
        self.faults: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", lambda line: self.faults.append(line.text) if line.type == "error" else None)
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)
        self.page.wait_for_selector("#pulse .good")

    def ask(self, text: str) -> None:
        self.page.fill("#question", text)
        self.page.press("#question", "Enter")

    def wait_text(self, text: str) -> None:
        """Until the last answer is `text` and nothing else."""
        playwright.expect(self.answer().locator(".text")).to_have_text(text, timeout=15_000)

    def answer(self) -> Any:
        return self.page.locator(".turn.assistant").last

    def whole(self) -> Any:
        """The last answer, once it has come to its end."""
        self.answer().locator("button[data-again]").wait_for()
        return self.answer()


@pytest.fixture
def open_tab(browser: Any) -> Iterator[Callable[..., Tab]]:
    tabs: list[Tab] = []

    def open_one(url: str, **options: Any) -> Tab:
        tabs.append(Tab(browser, url, **options))
        return tabs[-1]

    yield open_one
    for tab in tabs:
        tab.context.close()


@pytest.fixture
def serve(start_server: Start, tmp_path: Path) -> Start:
    def start(*answers: dict[str, Any], options: tuple[str | Path, ...] = ()) -> Server:
        script = write_script(tmp_path / "script.jsonl", *answers)
        return start_server(make_ranks(tmp_path / "ranks", 2), "--backend", f"scripted:{script}", *options)

    return start


def test_an_answer_streams_and_its_markdown_is_shown_as_nodes_not_as_html(
    serve: Start, open_tab: Callable[..., Tab]
) -> None:
    server = serve({"blocks": blocks(MARKDOWN, 2), "delay_ms": 8})
    tab = open_tab(server.url)
    tab.ask("Show me")
    tab.answer().locator("h1").wait_for()
    assert tab.page.locator("#send").text_content() == "Stop"  # the headline stands while the rest is on its way
    answer = tab.whole()
    assert answer.locator("h1").text_content() == "Title"
    assert answer.locator("strong").text_content() == "strong" and answer.locator("em").text_content() == "soft"
    assert answer.locator("ul ul li").text_content() == "nested"
    assert answer.locator("pre code").text_content() == "if a < b:\n    pass"
    assert answer.locator("td").all_text_contents() == ["1", "2"]
    (link,) = answer.locator("a").all()
    assert link.get_attribute("href") == "https://example.org/x"
    assert link.get_attribute("rel") == "noopener noreferrer"
    assert answer.locator("img, script").count() == 0
    assert "<script>document.title='hacked'</script>" in answer.text_content()
    thought = answer.locator("details.think")
    assert thought.get_attribute("open") is None and thought.locator("div").text_content() == "Some thought."
    thought.locator("summary").click()
    assert thought.locator("div").is_visible()
    assert re.search(r"tok/s.*% of drafts accepted.*\d+ tokens", answer.locator(".foot").text_content())
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer.locator("button[data-copy=code]").click()
    playwright.expect(answer.locator("button[data-copy=code]")).to_have_text("Copied")
    assert tab.page.evaluate("navigator.clipboard.readText()") == "if a < b:\n    pass"
    answer.locator("button[data-copy=answer]").click()
    playwright.expect(answer.locator("button[data-copy=answer]")).to_have_text("Copied")
    assert tab.page.evaluate("navigator.clipboard.readText()") == MARKDOWN.partition("</think>")[2].lstrip("\n")
    assert tab.page.title() == "ranks"
    assert tab.faults == []
    assert all(address.startswith(server.url) for address in tab.asked)


def test_stop_regenerate_and_the_keyboard(serve: Start, open_tab: Callable[..., Tab]) -> None:
    server = serve(SLOW, QUICK)
    tab = open_tab(server.url)
    tab.page.evaluate("document.activeElement.blur()")
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("one")
    tab.page.keyboard.press("Shift+Enter")
    tab.page.keyboard.type("two")
    tab.page.keyboard.press("Enter")
    assert tab.page.locator(".turn.user").text_content() == "one\ntwo"
    tab.answer().get_by_text("word word").wait_for()
    tab.page.keyboard.press("Escape")
    answer = tab.whole()
    assert "stopped" in answer.locator(".foot").text_content()
    deadline = time.monotonic() + 10
    while server.metric("cancelled_total") != 1 or server.metric("running"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    answer.locator("button[data-again]").click()
    assert tab.whole().locator(".text").text_content() == "Hello world"
    assert tab.page.locator(".turn").count() == 2  # the stopped answer has made room
    tab.page.press("#question", "ArrowUp")
    assert tab.page.input_value("#question") == "one\ntwo"
    assert tab.faults == []


def test_a_reload_keeps_the_conversation_and_what_was_on_its_way(serve: Start, open_tab: Callable[..., Tab]) -> None:
    server = serve(QUICK, SLOW, QUICK)
    tab = open_tab(server.url)
    tab.ask("first")
    tab.whole()
    tab.ask("second")
    tab.answer().get_by_text("word word").wait_for()
    tab.page.reload()
    assert tab.page.locator(".turn").count() == 4
    answer = tab.whole()
    assert "word word" in answer.locator(".text").text_content()
    assert "broken off when the page was left" in answer.locator(".foot").text_content()
    answer.locator("button[data-again]").click()
    tab.wait_text("Hello world")
    assert [text for text in tab.page.locator(".turn.user").all_text_contents()] == ["first", "second"]
    tab.page.click("#fresh")
    assert tab.page.locator(".turn").count() == 0
    tab.page.reload()
    assert tab.page.locator(".turn").count() == 0 and tab.page.locator("#empty").is_visible()


def test_ranks_that_die_in_mid_answer_are_an_error_and_then_an_answer(
    serve: Start, open_tab: Callable[..., Tab]
) -> None:
    server = serve(SLOW)
    tab = open_tab(server.url)
    tab.page.evaluate("document.getElementById('max_tokens').value = 40")
    tab.ask("go on")
    tab.answer().get_by_text("word").wait_for()
    os.kill(server.rank_pids()[1], signal.SIGKILL)
    answer = tab.whole()
    assert "broken off" in answer.locator(".error").text_content()
    server.wait_log("ready on", count=2)
    tab.page.wait_for_selector("#pulse .good")
    answer.locator("button[data-again]").click()
    assert "cut at the length limit" in tab.whole().locator(".foot").text_content()
    assert not tab.whole().locator(".error").is_visible()


def test_a_server_that_restarts_in_mid_answer(
    serve: Start, open_tab: Callable[..., Tab], start_server: Start, tmp_path: Path
) -> None:
    server = serve(SLOW)
    tab = open_tab(server.url)
    tab.ask("go on")
    tab.answer().get_by_text("word word").wait_for()
    server.kill()
    answer = tab.whole()
    assert "connection broke off" in answer.locator(".error").text_content()
    assert "word word" in answer.locator(".text").text_content()
    tab.page.wait_for_selector("#pulse .bad")
    assert "not reached" in tab.page.locator("#pulse").text_content()
    answer.locator("button[data-again]").click()
    assert "cannot be reached" in tab.whole().locator(".error").text_content()
    script = write_script(tmp_path / "script.jsonl", QUICK)
    port = server.url.rpartition(":")[2]  # as a server of an operator has it: the same as before
    start_server(tmp_path / "ranks", "--backend", f"scripted:{script}", "--port", port)
    tab.page.wait_for_selector("#pulse .good")
    tab.whole().locator("button[data-again]").click()
    tab.wait_text("Hello world")


def test_a_key_is_asked_for_and_kept_out_of_lasting_storage(
    serve: Start, open_tab: Callable[..., Tab], tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("sesame")
    server = serve(QUICK, options=("--api-key-file", tmp_path / "keys"))
    tab = open_tab(server.url)
    tab.ask("hi")
    assert "wrong or missing API key" in tab.whole().locator(".error").text_content()
    assert tab.page.evaluate("document.activeElement.id") == "key"
    tab.page.keyboard.type("sesame")
    tab.whole().locator("button[data-again]").click()
    tab.wait_text("Hello world")
    assert "sesame" not in tab.page.evaluate("JSON.stringify(localStorage)")


def test_a_tool_call_is_shown_and_its_answer_goes_back(serve: Start, open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(serve({"blocks": blocks(TOOL, 3)}, QUICK).url)
    tab.page.click("#toggle")
    tab.page.fill("#tools", TOOLS)
    tab.ask("Weather?")
    call = tab.whole().locator(".call")
    assert call.locator("header").text_content() == "Calls look_up"
    assert json.loads(call.locator("pre").text_content()) == {"city": "Paris"}
    call.locator("input").fill("sunny")
    with tab.page.expect_request("**/v1/chat/completions") as asked:
        call.locator("input").press("Enter")
    roles = [(message["role"], message["content"]) for message in asked.value.post_data_json["messages"]]
    assert roles == [("user", "Weather?"), ("assistant", ""), ("tool", "sunny")]
    tab.wait_text("Hello world")
    assert tab.faults == []


def test_settings_travel_with_the_question_and_bad_ones_do_not(serve: Start, open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(serve(QUICK).url)
    tab.page.click("#toggle")
    tab.page.fill("#temperature", "7")
    tab.ask("hi")
    assert "Temperature" in tab.page.locator("#notice").text_content()
    tab.page.fill("#temperature", "0.5")
    tab.page.fill("#seed", "7")
    tab.page.fill("#system", "Be brief.")
    tab.page.select_option("#thinking", "false")
    with tab.page.expect_request("**/v1/chat/completions") as asked:
        tab.ask("again")
    body = asked.value.post_data_json
    assert (body["temperature"], body["seed"], body["chat_template_kwargs"]) == (0.5, 7, {"enable_thinking": False})
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    tab.page.reload()
    assert tab.page.input_value("#seed") == "7"


def test_a_dropped_image_is_refused_in_words_where_the_model_reads_text_only(
    serve: Start, open_tab: Callable[..., Tab]
) -> None:
    tab = open_tab(serve(QUICK).url)
    tab.page.evaluate(
        """() => {
          const data = new DataTransfer();
          data.items.add(new File(["x"], "x.png", {type: "image/png"}));
          document.dispatchEvent(new DragEvent("drop", {dataTransfer: data, cancelable: true}));
        }"""
    )
    assert "reads text only" in tab.page.locator("#notice").text_content()


def test_a_dropped_image_goes_with_the_question(
    start_server: Start, tmp_path: Path, open_tab: Callable[..., Tab]
) -> None:
    """A model that reads images: the page shows it, sends it as a data URL, and the server takes it."""
    ranks = tmp_path / "ranks" / "rank-0-of-1"
    ranks.mkdir(parents=True)
    tiny = Path(__file__).parents[2] / "tiny" / "checkpoint"
    for file in [*tiny.glob("*.json"), tiny / "chat_template.jinja"]:
        shutil.copy(file, ranks)
    script = write_script(tmp_path / "script.jsonl", {"blocks": [[100], [3026]]})
    tab = open_tab(start_server(ranks.parent, "--backend", f"scripted:{script}").url)
    tab.page.evaluate(
        """async () => {
          const canvas = document.createElement("canvas");
          canvas.width = canvas.height = 64;
          const data = new DataTransfer();
          const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
          data.items.add(new File([blob], "x.png", {type: "image/png"}));
          document.dispatchEvent(new DragEvent("drop", {dataTransfer: data, cancelable: true}));
        }"""
    )
    tab.page.locator("#images img").wait_for()
    with (
        tab.page.expect_request("**/v1/chat/completions") as asked,
        tab.page.expect_response("**/v1/chat/completions") as answered,
    ):
        tab.ask("What is this?")
    image, text = asked.value.post_data_json["messages"][-1]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert text == {"type": "text", "text": "What is this?"}
    assert answered.value.status == 200
    tab.whole()
    assert tab.page.locator(".turn.user img").count() == 1
    assert tab.faults == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_status_view_on_a_phone(serve: Start, open_tab: Callable[..., Tab], scheme: str) -> None:
    server = serve(SLOW, options=("--lanes", "2"))
    tab = open_tab(server.url, viewport={"width": 360, "height": 740}, color_scheme=scheme)
    tab.ask("hi")
    tab.page.click("#tab-status")
    tab.page.get_by_text("In lockstep.").wait_for()
    tab.page.locator("#board").get_by_text("1 of 2").wait_for()
    text = tab.page.locator("#board").inner_text()
    for words in (
        "mailbox-cpu",
        "Restarts: 0",
        "This backend keeps no keys and values",
        "Clocks and temperatures",
        "idle",
    ):
        assert words in text
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
    back = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    red = int(re.findall(r"\d+", back)[0])
    assert (red > 200) == (scheme == "light")
    tab.page.click("#tab-chat")
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
    assert tab.faults == []
