"""The page at / used as a person would, in a headless Chromium where there is one."""

import json
import re
import shutil

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.server.live import LiveServer, chat_prompt, expected_text

SECONDS = 30.0  # for anything to appear
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium here (Debian: apt install chromium): the page is not tested in a browser")
    expect.set_options(timeout=SECONDS * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """visit(url, **options of the browser context) -> Page. Fails at the end where the browser had to complain."""
    complaints, contexts = [], []

    def open_page(url: str, ready: bool = True, before=lambda page: None, **options) -> Page:
        contexts.append(browser.new_context(**({"viewport": {"width": 1280, "height": 860}} | options)))
        page = contexts[-1].new_page()
        page.set_default_timeout(SECONDS * 1000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
        before(page)
        page.goto(url)
        if ready:
            expect(page.locator("#model")).to_have_text("org/fake-model")
        return page

    yield open_page
    for context in contexts:
        context.close()
    refused = "Failed to load resource"  # keys that are wrong, servers that end: what comes of it is tested
    assert [text for text in complaints if not text.startswith(refused)] == []


@pytest.fixture(scope="module")
def live(folder):
    with LiveServer(folder, "--step-seconds", "0.02", engine={"num_blocks": 64}) as live:
        yield live


def set_parameters(page: Page, **values) -> None:
    page.click("#parameters-button")
    for name, value in values.items():
        page.fill(f"#parameters [name={name}]", str(value))
    page.click("#parameters-button")


def ask(page: Page, text: str = "hello") -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def test_tokens_arrive_one_after_the_other_and_are_those_of_the_api(live, visit):
    page = visit(live.url)
    set_parameters(page, seed=7, max_tokens=400, temperature=1)
    ask(page)
    expect(page.locator("#stop")).to_be_visible()
    text = page.locator(".answer .text")
    expect(text).not_to_be_empty()
    early = text.text_content()
    expect(page.locator("#send")).to_be_visible()
    complete = expected_text(chat_prompt("hello"), 7, 400)
    assert complete.startswith(early) and 0 < len(early) < len(complete)
    assert text.text_content() == complete
    expect(page.locator(".answer .note")).to_contain_text("400 tokens in")
    expect(page.locator("#tile-ttft")).to_contain_text("s")
    expect(page.locator("#announcer")).to_have_text("The answer is complete.")


def test_sliders_begin_at_the_defaults_of_the_model_and_stay_where_they_are_put(live, visit):
    def serve_defaults(route) -> None:
        answer = route.fetch()
        models = answer.json()
        models["data"][0]["default_sampling_params"] |= {"temperature": 0.35, "top_p": 0.85}
        route.fulfill(response=answer, json=models)

    page = visit(live.url, before=lambda page: page.route("**/v1/models", serve_defaults))
    expect(page.locator("#temperature")).to_have_value("0.35")
    expect(page.locator("#top_p")).to_have_value("0.85")
    expect(page.locator("#parameters-summary")).to_contain_text("temperature 0.35")
    set_parameters(page, temperature=1.5)
    page.reload()
    expect(page.locator("#model")).to_have_text("org/fake-model")
    expect(page.locator("#temperature")).to_have_value("1.5")
    expect(page.locator("#top_p")).to_have_value("0.85")


def test_what_was_said_before_is_sent_again(live, visit):
    page = visit(live.url)
    set_parameters(page, max_tokens=4)
    for number in (1, 2):
        ask(page, f"question {number}")
        expect(page.locator(".answer .note")).to_have_count(number)
        expect(page.locator(".note").last).to_contain_text("prompt")
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, "question 3")
    roles = [message["role"] for message in request.value.post_data_json["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "user"]
    page.click("#new-chat")
    expect(page.locator(".question")).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()


def test_a_message_that_is_faster_than_the_name_of_the_model_waits_for_it(live, visit):
    waiting, held = [], [True]

    def hold(route) -> None:
        waiting.append(route) if held else route.continue_()

    page = visit(live.url, ready=False, before=lambda page: page.route("**/v1/models", hold))
    expect(page.locator("#phase")).to_have_text("ready")
    ask(page)
    held.clear()
    for route in waiting:
        route.continue_()
    expect(page.locator(".answer .note")).to_contain_text("tokens in")


def test_stop_ends_the_request_on_the_server(live, visit):
    page = visit(live.url)
    set_parameters(page, max_tokens=400)
    before = live.aborts()
    ask(page)
    expect(page.locator(".answer .text")).not_to_be_empty()
    page.click("#stop")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".sample header")).to_contain_text("stopped")
    live.wait_idle()
    assert live.aborts() == before + 1


def test_two_samples_side_by_side_share_the_blocks_of_their_prompt(folder, visit):
    with LiveServer(folder, "--step-seconds", "0.1") as live:  # the samples outlast every expectation
        page = visit(live.url)
        set_parameters(page, n=2, max_tokens=400)
        ask(page, "a prompt of two blocks of sixteen")
        tables = page.locator(".table")
        expect(tables).to_have_count(2)
        expect(tables.nth(0).locator("li")).not_to_have_count(0)
        first, second = (table.locator("li") for table in tables.all())
        expect(first.nth(4)).to_be_visible()
        expect(second.nth(4)).to_be_visible()
        a, b = first.all_text_contents(), second.all_text_contents()
        assert a[:2] == b[:2] and not set(a[3:]) & set(b[3:])
        expect(first.nth(0)).to_have_class("shared")
        expect(page.locator("#feed")).to_contain_text("Copy-on-write")
        first.nth(0).hover()
        expect(page.locator("#inspector")).to_contain_text("Ref count 2")
        expect(page.locator("#inspector")).to_contain_text("It is full, so nobody will write to it.")
        left, right = (card.bounding_box() for card in page.locator(".sample").all())
        assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
        page.click("#stop")
        live.wait_idle()


def test_tokens_are_shaded_by_their_probability(live, visit):
    page = visit(live.url)
    page.click("#parameters-button")
    page.check("[name=logprobs]")
    page.fill("[name=max_tokens]", "12")
    ask(page)
    expect(page.locator(".token")).to_have_count(12)
    assert "%" in page.locator(".token").first.get_attribute("title")


def test_parameters_are_kept_and_bad_ones_are_told(live, visit):
    page = visit(live.url)
    set_parameters(page, max_tokens=100000, top_k=7)
    expect(page.locator("#parameters-summary")).to_contain_text("100000 tokens")
    ask(page)
    expect(page.locator(".note.failed")).to_contain_text("max_tokens")
    expect(page.locator("#prompt")).to_have_value("hello")  # to be sent again
    set_parameters(page, max_tokens=0)  # which the browser would refuse without a word, as the field is hidden
    page.click("#send")
    expect(page.locator(".note.failed").last).to_contain_text("max_tokens must be")
    page.reload()
    assert page.input_value("[name=top_k]") == "7"


def stream_of(*pieces: str) -> str:
    chunks = [{"id": "chatcmpl-x", "choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def test_what_a_model_writes_is_text_and_never_markup(live, visit):
    page = visit(live.url)
    hostile = "<img src=x onerror=alert(1)><script>document.title = 'owned'</script><b>no</b> "
    body = stream_of(hostile, "**bold** `<i>` ", "```js\n<u>", "code</u>\n```", "x" * 2000)
    page.route("**/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    ask(page, hostile)
    text = page.locator(".answer .text")
    expect(text.locator("pre")).to_have_text("<u>code</u>\n")
    expect(text).to_contain_text(hostile.strip())
    assert text.locator("img, script, i, u").count() == 0 and text.locator("b").all_text_contents() == ["bold"]
    assert text.locator("code").first.text_content() == "<i>" and "owned" not in page.title()
    expect(page.locator(".question")).to_have_text(hostile.strip())
    assert text.evaluate("node => node.scrollWidth <= node.clientWidth"), "a long word is broken"


def test_a_server_that_is_gone_leaves_its_last_picture_and_what_was_written(live, visit):
    page = visit(live.url)
    expect(page.locator("#pool")).to_contain_text("64 blocks")
    page.context.set_offline(True)
    notice = page.locator("#memory-off")
    expect(notice).to_contain_text("cannot be reached; this is what it showed last")
    expect(page.locator("#memory-body")).to_have_class(re.compile("stale"))
    expect(page.locator("#phase")).to_have_text("unreachable")
    ask(page, "are you there?")
    expect(page.locator(".note.failed")).to_contain_text("cannot be reached")
    expect(page.locator("#prompt")).to_have_value("are you there?")
    page.context.set_offline(False)
    expect(notice).to_be_hidden()
    expect(page.locator("#memory-body")).not_to_have_class(re.compile("stale"))
    page.press("#prompt", "Enter")
    expect(page.locator(".answer .note").last).to_contain_text("tokens in")


def test_a_key_is_asked_for_and_stays_in_the_tab(folder, visit):
    with LiveServer(folder, api_key=("sk-one",)) as live:
        page = visit(live.url, ready=False)
        dialog = page.locator("#key-dialog")
        expect(dialog).to_be_visible()
        page.fill("#key-input", "sk-wrong")
        page.press("#key-input", "Enter")
        expect(page.locator("#key-reason")).to_contain_text("did not accept")
        page.fill("#key-input", "sk-one")
        page.get_by_role("button", name="Use this key").click()
        expect(dialog).to_be_hidden()
        expect(page.locator("#model")).to_have_text("org/fake-model")
        expect(page.locator("#pool")).to_contain_text("256 blocks")
        ask(page)
        expect(page.locator(".answer .text")).not_to_be_empty()
        assert page.evaluate("sessionStorage.getItem('pageserve.key')") == "sk-one"
        assert page.evaluate("JSON.stringify(localStorage) + document.cookie").count("sk-one") == 0
        fresh = visit(live.url, ready=False)
        expect(fresh.locator("#key-dialog")).to_be_visible()


def test_with_several_keys_there_is_a_chat_and_no_picture(folder, visit):
    with LiveServer(folder, api_key=("sk-one", "sk-two")) as live:
        page = visit(live.url, ready=False)
        page.fill("#key-input", "sk-two")
        page.press("#key-input", "Enter")
        expect(page.locator("#memory-off")).to_contain_text("--debug-kv")
        expect(page.locator("#memory-body")).to_be_hidden()
        ask(page)
        expect(page.locator(".answer .text")).not_to_be_empty()


def test_blocks_are_explained_by_keyboard(live, visit):
    page = visit(live.url)
    expect(page.locator("#pool")).to_contain_text("64 blocks of 16 tokens")
    page.focus("#zoom-fit")
    page.keyboard.press("Tab")
    for key in ("End", "ArrowLeft"):
        page.keyboard.press(key)
    expect(page.locator("#inspector")).to_contain_text(re.compile(r"Block 62 is (free|cached)"))
    page.keyboard.press("+")
    page.keyboard.press("Home")
    inspector = page.locator("#inspector")
    expect(inspector).to_contain_text(re.compile(r"Block 0 is (free|cached)"))
    expect(inspector).to_have_attribute("aria-live", "off")  # what the next snapshots say is not read aloud


def test_looking_back(live, visit):
    page = visit(live.url)
    set_parameters(page, max_tokens=300)
    ask(page)
    expect(page.locator("#tile-running")).to_have_text("1")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#tile-running")).to_have_text("0")
    page.focus("#scrub")
    for _ in range(200):
        page.keyboard.press("ArrowLeft")
        if page.text_content("#tile-running") == "1":
            break
    expect(page.locator("#tile-running")).to_have_text("1")
    expect(page.locator("#when")).to_contain_text("−")
    page.click("#pause")
    expect(page.locator("#when")).to_have_text("live")


POLLS = """async ([paused, polls]) => {
  const { Monitor } = await import("/page/memory.js");
  const blocks = 400_000, states = ".".repeat(blocks); // of so many 20 moments are kept
  const counts = { num_running: 0, num_waiting: 0 };
  const bodies = {
    kv: { num_blocks: blocks, block_size: 16, states, sequences: [], shared: {}, partial: {}, ...counts },
    steps: { steps: [], columns: [], max_num_seqs: 1, max_num_batched_tokens: 1, ...counts },
  };
  window.fetch = async (url) => new Response(JSON.stringify(bodies[String(url).split("/").at(-1)]));
  const monitor = new Monitor();
  const polled = () => new Promise((done) => {
    for (const type of ["snapshot", "grown"]) monitor.addEventListener(type, done, { once: true });
    monitor.wake();
  });
  for (let i = 0; i < 25; i++) await polled();
  if (paused) {
    monitor.pause(true);
    monitor.show(5);
  }
  const shown = monitor.shown;
  for (let i = 0; i < polls; i++) await polled();
  return [monitor.history.length, monitor.history.indexOf(shown)];
}"""


@pytest.mark.parametrize("paused, place", [(True, 0), (False, -1)])
def test_as_many_moments_are_kept_while_paused_and_what_is_on_show_among_them(live, visit, paused, place):
    assert visit(live.url).evaluate(POLLS, [paused, 40]) == [20, place]


def test_filling_the_memory_shows_evictions_and_preemptions(folder, visit):
    with LiveServer(folder, "--step-seconds", "0.002", engine={"num_blocks": 64}) as live:
        page = visit(live.url)
        page.click("[data-tour=repeat]")
        expect(page.locator("#callout-steps")).to_contain_text("came from the cache")
        page.click("[data-tour=fill]")
        steps = page.locator("#callout-steps")
        for text in ("8 stories at once", "evicted", "gives up its blocks", "every story complete"):
            expect(steps).to_contain_text(text)
        live.wait_idle()


def test_the_demonstration_of_an_equal_prompt_tells_of_the_block_that_was_found_in_part(live, visit):
    page = visit(live.url)
    page.click("[data-tour=repeat]")
    why = page.locator("#callout-steps li").nth(3)
    expect(why).to_contain_text("The last token is always computed")
    cost = page.locator("#callout-steps li").nth(2).text_content()
    cached, prompt = map(int, re.search(r"(\d+) of (\d+) prompt tokens came from the cache", cost).groups())
    in_part = f"The other {cached % 16} tokens are the start of one more block."
    assert (in_part in why.text_content()) == (cached % 16 > 0)
    assert cached == prompt - 1 or not cached % 16


def shorten_answers(page: Page, max_tokens: int) -> None:
    """Also those of the demonstrations."""

    def shorten(route) -> None:
        route.continue_(post_data=route.request.post_data_json | {"max_tokens": max_tokens})

    page.route("**/chat/completions", shorten)


@pytest.mark.parametrize("late", [False, True], ids=["polls", "late polls"])
def test_the_demonstration_of_two_samples_names_the_copy_that_one_of_them_made(live, visit, late):
    """Not the copy that the prompt got from the prefix cache, also where the answer is faster than the polls."""
    page, stale = visit(live.url), {}
    shorten_answers(page, 40)
    callout = page.locator("#callout-steps")
    page.click("[data-tour=samples]")
    expect(callout).to_contain_text("Both are done")
    if late:
        for view in ("kv", "steps"):
            stale[f"{live.url}/debug/{view}"] = page.request.get(f"{live.url}/debug/{view}").json()
        page.route(
            "**/debug/*", lambda route: route.fulfill(json=stale[route.request.url]) if stale else route.continue_()
        )
    page.click("[data-tour=samples]")  # its prompt shares a part of a block with the first one's
    if late:
        expect(page.locator(".answer .note")).to_contain_text("tokens in")
        for _ in range(2):
            with page.expect_response("**/debug/steps"):
                pass
        expect(callout).not_to_contain_text("Both are done")
        stale.clear()
    expect(callout).to_contain_text("Both are done")
    view = page.request.get(f"{live.url}/debug/steps").json()
    steps = [dict(zip(view["columns"], step, strict=True)) for step in view["steps"]]
    (cached, from_cache), (source, target) = [copy for step in steps for copy in step["copies"]][-2:]
    assert source == from_cache, "a sample copied the block that the prompt had got as a copy"
    expect(callout).to_contain_text(f"the prompt's last block, {source}, was not full")
    expect(callout).to_contain_text(f"got a copy, block {target},")
    feed = page.locator("#feed")
    expect(feed).to_contain_text(f"a block that another one holds too: {source} → {target}.")
    expect(feed).to_contain_text(f"the first tokens of a block, and continues in a copy: {cached} → ")


def test_the_demonstration_of_two_samples_says_that_no_copy_was_needed_where_that_is_so(folder, visit):
    with LiveServer(folder, engine={"block_size": 8}) as live:  # its prompt of 120 tokens fills 15 blocks
        page = visit(live.url)
        shorten_answers(page, 40)
        page.click("[data-tour=samples]")
        expect(page.locator("#callout-steps")).to_contain_text("No copy was needed: the prompt ended just where")


def test_closing_the_tour_stops_what_it_started(live, visit):
    page = visit(live.url)
    page.click("[data-tour=fill]")
    expect(page.locator("#tile-running")).not_to_have_text("0")
    page.click("#callout-close")
    live.wait_idle()
    expect(page.locator("#callout")).to_be_hidden()


def test_dark_and_light(live, visit):
    def ground(page: Page) -> int:
        return sum(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))))

    light, dark = (visit(live.url, color_scheme=scheme) for scheme in ("light", "dark"))
    assert ground(light) > 600 and ground(dark) < 120
    dark.click("#theme-button")
    assert ground(dark) > 600
    dark.reload()
    assert ground(dark) > 600, "the choice is kept"


CUT = """(head) => [...head.querySelectorAll("*")].filter((part) =>
  part.offsetParent && (part.scrollWidth > part.clientWidth + 1 && getComputedStyle(part).overflowX === "hidden" ||
    part.getBoundingClientRect().right > head.getBoundingClientRect().right - 15)).map((part) => part.id)"""


def test_no_text_of_the_heading_is_cut_at_any_width_of_a_desk(folder, visit):
    with LiveServer(folder, engine={"num_blocks": 16_384}) as live:
        page = visit(live.url)
        for text in ("first [0-9,]+ shown: show all 16,384", "all 16,384 shown: show used"):
            expect(page.locator("#extent")).to_have_text(re.compile(text))
            for width in (1000, 1181, 1200, 1281, 1400, 1601):
                page.set_viewport_size({"width": width, "height": 860})
                assert page.locator(".memory .section-head").evaluate(CUT) == [], width
            page.click("#extent")


CONTRASTS = """async () => {
  const { theme } = await import("/page/theme.js");
  const { panel, muted, ink, evict, hit, copy, accent, own, other } = theme();
  const luminance = (colour) => {
    const channels = colour.match(/[\\d.]+/g).slice(0, 3).map((value) => value / 255);
    const [r, g, b] = channels.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const against = (colour) => {
    const [low, high] = [luminance(colour), luminance(panel)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const least = (colours) => Math.min(...colours.map(against));
  return [least([ink, muted, evict, accent]), least([...own, ...other, hit, copy])];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_that_of_wcag_aa(live, visit, scheme):
    """4.5 for text, 3 for what else has to be told from its ground (WCAG 2.2, 1.4.3 and 1.4.11)."""
    text, graphics = visit(live.url, color_scheme=scheme).evaluate(CONTRASTS)
    assert text >= 4.5 and graphics >= 3


def assert_within(page: Page, *selectors: str) -> None:
    """Wholly in the window."""
    size = page.viewport_size
    for selector in selectors:
        box = page.locator(selector).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= size["width"], selector
        assert box["y"] >= 0 and box["y"] + box["height"] <= size["height"], selector


BUSY_STEP = """async () => {
  const { describeStep } = await import("/page/steps.js"), caption = document.getElementById("steps-caption");
  const before = caption.getBoundingClientRect().height;
  caption.textContent = describeStep({ step_id: 123456, num_decodes: 127, num_chunk_tokens: 2048, num_chunks: 12,
    num_hit_tokens: 1024, copies: [1, 2, 3], num_evicted: 34, num_preempted: 2, compute_seconds: 0.1234 });
  return [caption.textContent, caption.getBoundingClientRect().height - before];
}"""


@pytest.mark.parametrize("width", [1400, 1024])
def test_the_description_of_a_busy_step_moves_nothing(live, visit, width):
    text, growth = visit(live.url, viewport={"width": width, "height": 900}).evaluate(BUSY_STEP)
    assert growth == 0
    work, events = "127 decoding, 2,048 tokens of 12 prompts, 1,024 cached", "3 copied, 34 evicted, 2 preempted"
    assert text == f"Step 123,456: {work}, {events}, 123.4 ms"


@pytest.mark.parametrize("width", [1280, 1000, 920])
def test_the_head_of_the_memory_holds_what_it_says_of_a_large_pool(live, visit, width):
    page = visit(live.url, viewport={"width": width, "height": 700})
    page.evaluate("""() => {
      const extent = document.getElementById("extent");
      extent.hidden = false;
      extent.textContent = "first 512 shown: show all";
    }""")
    edge, when = (page.locator(selector).bounding_box() for selector in ("#memory", "#when"))
    assert when["x"] + when["width"] <= edge["x"] + edge["width"] - 8


SHARES = """() => {
  const value = document.querySelector(".wide-tile dd"), text = document.createRange();
  text.selectNodeContents(value);
  return [value.innerText, text.getBoundingClientRect().width - value.clientWidth];
}"""


def test_a_share_that_is_small_is_not_said_to_be_nothing_and_its_text_has_room(folder, visit):
    with LiveServer(folder, "--step-seconds", "0.05", engine={"num_blocks": 16_384}) as live:
        page = visit(live.url)
        expect(page.locator("#tile-used")).to_have_text("0 %")
        set_parameters(page, max_tokens=400)
        ask(page)  # it holds one to four blocks while the test looks
        expect(page.locator("#tile-used")).to_have_text("<0.1 %")
        page.click("#stop")
        expect(page.locator("#tile-cached")).to_have_text("+ <0.1 %")
        page.click("#pause")
        page.locator("#tile-used").evaluate("node => node.textContent = '<0.1 %'")
        sizes = ((341, 740), (421, 740), (600, 400), (667, 375), (844, 390), (920, 700), (1181, 860), (1280, 860))
        for width, height in sizes:
            page.set_viewport_size({"width": width, "height": height})
            text, excess = page.evaluate(SHARES)
            assert text == "<0.1 % + <0.1 %" and excess <= 1, (width, excess)


def test_a_phone_shows_chat_and_memory_without_scrolling_sideways(live, visit):
    page = visit(live.url, viewport={"width": 360, "height": 740}, has_touch=True)
    set_parameters(page, n=2, max_tokens=400)
    page.fill("#prompt", "hello")
    page.tap("#send")
    expect(page.locator(".answer .text").first).not_to_be_empty()
    tour = tuple(f"[data-tour={name}]" for name in ("samples", "repeat", "fill"))
    assert_within(page, "#blocks", "#prompt", "#stop", "#tile-rate", "#tile-cached", *tour)
    page.tap("#parameters-button")
    assert_within(page, "#parameters [name=system]", "#parameters [name=logprobs]", "#prompt", "#stop")
    page.tap("#parameters-button")
    assert page.evaluate("document.scrollingElement.scrollWidth") == 360
    page.tap("#expand")
    expect(page.locator("#inspector")).to_be_visible()
    page.locator("#blocks").tap(position={"x": 20, "y": 20})
    expect(page.locator("#inspector")).to_contain_text("Block 0")
    assert page.evaluate("document.scrollingElement.scrollWidth") == 360
    page.tap("#expand")
    expect(page.locator("#prompt")).to_be_visible()


@pytest.mark.parametrize(
    "size", [(844, 390), (667, 375), (568, 320), (400, 420)], ids=lambda size: "{}x{}".format(*size)
)
def test_a_phone_in_landscape_has_room_for_the_chat(live, visit, size):
    page = visit(live.url, viewport=dict(zip(("width", "height"), size, strict=True)), has_touch=True)
    set_parameters(page, max_tokens=40)
    page.fill("#prompt", "hello")
    assert_within(page, "#prompt", "#send", "#messages", "#expand")
    page.tap("#send")
    expect(page.locator(".answer .note")).to_contain_text("tokens in")
    assert_within(page, "#messages", "#send", ".answer .note")
    assert page.locator("#messages").bounding_box()["height"] >= 120
    page.tap("#parameters-button")
    assert_within(page, "#prompt", "#send")
    page.locator("#parameters [name=logprobs]").scroll_into_view_if_needed()
    assert_within(page, "#parameters [name=logprobs]")
    page.tap("#parameters-button")
    page.tap("#expand")
    page.locator("#blocks").tap(position={"x": 20, "y": 20})
    expect(page.locator("#inspector")).to_contain_text("Block 0")
    page.tap("#expand")
    assert_within(page, "#send")
    assert page.evaluate("document.scrollingElement.scrollWidth") == size[0]


def test_a_pool_of_60000_blocks_is_drawn_and_polled_smoothly(folder, visit):
    with LiveServer(folder, "--step-seconds", "0.05", engine={"num_blocks": 60_000}) as live:
        page = visit(live.url, reduced_motion="reduce")
        expect(page.locator("#pool")).to_contain_text("60,000 blocks")
        expect(page.locator("#extent")).to_contain_text("first 512 shown")
        expect(page.locator("#welcome")).to_contain_text("the free ones of a large memory if you ask")
        page.click("#extent")
        expect(page.locator("#extent")).to_have_text("all 60,000 shown: show used")
        set_parameters(page, max_tokens=400)
        ask(page)
        expect(page.locator("#tile-running")).to_have_text("1")
        box = page.locator("#blocks").bounding_box()
        page.mouse.move(box["x"] + 11, box["y"] + 11)
        expect(page.locator("#inspector")).to_contain_text(re.compile(r"Block \d"))
        page.focus("#blocks")
        for _ in range(10):
            page.keyboard.press("+")
        expect(page.locator("#blocks")).to_have_class("zoomed")
        page.click("#zoom-fit")
        page.click("#stop")
        live.wait_idle()
