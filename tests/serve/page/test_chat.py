"""Conversations in a browser: streaming, stopping, going back, errors, files, tools and their consent."""

import json

import pytest


def say(ui, text, *, wait=True):
    ui.fill("#prompt", text)
    ui.press("#prompt", "Enter")
    if wait:
        ui.wait_for_selector("#log[aria-busy=false]")


def replies(ui):
    return ui.locator("article.reply .text").all_inner_texts()


# --- streaming --------------------------------------------------------------------------------------------------------


def test_an_answer_grows_while_it_is_written_and_has_its_figures(ui, scripted):
    scripted.pause = 0.01
    ui.evaluate(
        """() => {
      window.lengths = new Set();
      const watch = () => lengths.add(document.querySelector("article.reply .text")?.textContent.length ?? 0);
      new MutationObserver(watch).observe(document.getElementById("log"), { subtree: true, childList: true });
    }"""
    )
    text = "a sentence that is long enough to arrive in many pieces, one after the other, as it does from a model"
    say(ui, text)
    assert replies(ui) == [f"You said: {text}"]
    lengths = ui.evaluate("[...lengths]")
    assert len(lengths) > 6
    assert lengths == sorted(lengths)
    figures = ui.inner_text("article.reply .figures")
    assert "24 tokens in, 12 cached" in figures
    assert "tokens/s" in figures
    assert scripted.last["stream"] is True
    assert scripted.last["stream_options"] == {"include_usage": True}
    assert scripted.last["messages"] == [{"role": "user", "content": text}]


def test_finished_blocks_of_a_long_answer_are_not_drawn_again(ui, scripted):
    scripted.pause = 0.005
    say(ui, "tour", wait=False)
    ui.wait_for_selector("article.reply .text ol > li:nth-child(2)")
    ui.evaluate(
        """document.querySelectorAll(".reply .text > :is(h3, p):not(:last-child), .reply li:not(:last-child)")
          .forEach((e) => (e.mark = 1))"""
    )
    # Only what a further line cannot change: neither the last block nor the last item.
    ui.evaluate("window.marked = [...document.querySelectorAll('.text *')].filter((e) => e.mark).length")
    ui.wait_for_selector("#log[aria-busy=false]")
    again = "[...document.querySelectorAll('.text *')].filter((e) => e.mark).length === marked && marked >= 3"
    assert ui.evaluate(again)
    assert (
        ui.inner_text(".text pre") == "def lean(angle, speed):\n    return angle * speed ** 2  # not a law of nature\n"
    )
    assert ui.locator(".text table tbody tr").count() == 2
    assert ui.locator(".text ol > li > ul > li").count() == 2


def test_the_end_stays_in_sight_until_the_reader_scrolls_up(ui, scripted):
    at_end = "(([e]) => e.scrollHeight - e.scrollTop - e.clientHeight < 60)(document.querySelectorAll('.scroll'))"
    scripted.pause = 0
    say(ui, "endless", wait=False)
    ui.until("document.querySelector('.scroll').scrollHeight > 1400")
    ui.until(at_end)
    ui.hover(".scroll")
    ui.mouse.wheel(0, -400)
    ui.wait_for_selector("#to-end:visible")
    assert not ui.evaluate(at_end)
    ui.click("#to-end")
    ui.until(at_end)
    ui.press("#prompt", "Escape")


@pytest.mark.parametrize("way", ["Escape", "button"])
def test_stopping_keeps_what_came_and_frees_the_server(ui, scripted, way):
    scripted.pause = 0.005
    say(ui, "endless", wait=False)
    ui.until("document.querySelector('article.reply .text')?.textContent.length > 40")
    if way == "Escape":
        ui.press("#prompt", "Escape")
    else:
        ui.click("#send")
    ui.wait_for_selector("#log[aria-busy=false]")
    kept = replies(ui)[0]
    assert "Stopped." in ui.inner_text("article.reply")
    for _ in range(200):
        if scripted.cut:
            break
        ui.wait_for_timeout(10)
    assert scripted.cut == 1
    say(ui, "and now")
    assert [message["role"] for message in scripted.last["messages"]] == ["user", "assistant", "user"]
    assert scripted.last["messages"][1]["content"].split() == kept.split()


def test_a_long_wait_is_explained(ui):
    ui.clock.install()
    ui.route("**/v1/chat/completions", lambda route: None)  # never answered
    say(ui, "hello", wait=False)
    ui.wait_for_selector(".waiting")
    ui.clock.fast_forward(2000)
    assert "loading" not in ui.inner_text(".waiting")
    ui.clock.fast_forward(2000)
    assert "may still be loading" in ui.inner_text(".waiting")
    ui.press("#prompt", "Escape")
    ui.wait_for_selector("#log[aria-busy=false]")
    assert ui.locator(".waiting").count() == 0


def test_thinking_is_shown_apart_and_not_sent_back(ui, scripted):
    say(ui, "think")
    assert "First I look at it from all sides." in ui.text_content("article.reply details.thought")
    assert replies(ui) == ["You said: think"]
    say(ui, "more")
    assert scripted.last["messages"][1] == {"role": "assistant", "content": "You said: think"}


def test_an_answer_that_reached_its_longest_length_says_so(ui):
    say(ui, "short")
    assert "Max tokens" in ui.inner_text("article.reply .note")


# --- going back -------------------------------------------------------------------------------------------------------


def test_regenerate_asks_the_same_again_and_drops_what_followed(ui, scripted):
    say(ui, "one")
    say(ui, "two")
    ui.locator("article.reply").first.get_by_role("button", name="Regenerate answer").click()
    ui.wait_for_selector("#log[aria-busy=false]")
    assert scripted.asked[0]["messages"] == scripted.asked[2]["messages"]
    assert replies(ui) == ["You said: one"]
    assert ui.locator("article.user").count() == 1


def test_a_message_can_be_changed_and_sent_again(ui, scripted):
    say(ui, "one")
    say(ui, "two")
    first = ui.locator("article.user").first
    first.hover()
    first.get_by_role("button", name="Edit message").click()
    area = first.get_by_role("textbox")
    area.press("Escape")
    assert replies(ui) == ["You said: one", "You said: two"]
    first.get_by_role("button", name="Edit message").click()
    area.fill("three")
    area.press("Enter")
    ui.wait_for_selector("#log[aria-busy=false]")
    assert scripted.last["messages"] == [{"role": "user", "content": "three"}]
    assert replies(ui) == ["You said: three"]


def test_copying_gives_the_text_as_the_model_wrote_it(open_page):
    ui = open_page(permissions=["clipboard-read", "clipboard-write"])
    say(ui, "some *stars*")
    ui.get_by_role("button", name="Copy answer").click()
    ui.wait_for_selector(".done")
    assert ui.evaluate("navigator.clipboard.readText()") == "You said: some *stars*"


def test_a_conversation_is_saved_opened_and_gone_on_with(ui, scripted, tmp_path):
    ui.fill("#system", "Be kind.")
    ui.click("#tab-tools")
    ui.check("#tool-calculator")
    ui.click("#tab-chat")
    say(ui, 'call calculator {"expression": "2+2"}', wait=False)
    ui.click(".call button:has-text('Approve')")
    ui.wait_for_selector("#log[aria-busy=false]")
    with ui.expect_download() as saving:
        ui.click("#save")
    path = tmp_path / "conversation.json"
    saving.value.save_as(path)
    whole = json.loads(path.read_text())
    assert [entry["role"] for entry in whole["turns"][0]["entries"]] == ["assistant", "tool", "assistant"]
    ui.click("#new")
    assert ui.locator("article").count() == 0
    ui.fill("#system", "")
    ui.set_input_files("#open-file", path)
    ui.wait_for_selector("article.reply")
    assert ui.input_value("#system") == "Be kind."
    before = scripted.last["messages"]
    say(ui, "go on")
    assert scripted.last["messages"] == [
        *before,
        {"role": "assistant", "content": "The tool says: 4"},
        {"role": "user", "content": "go on"},
    ]


BAD_FILES = [
    "{",
    '{"format": "other"}',
    '{"format": "pippin-conversation", "version": 2, "turns": []}',
    '{"format": "pippin-conversation", "version": 1, "turns": [{"user": "a", "entries": [{"role": "system"}]}]}',
    '{"format": "pippin-conversation", "version": 1, "turns": [{"user": 3, "entries": []}]}',
]


def test_a_file_that_is_no_conversation_is_refused_and_changes_nothing(ui, tmp_path):
    say(ui, "stays")
    for number, text in enumerate(BAD_FILES):
        path = tmp_path / f"file{number}.json"
        path.write_text(text)
        ui.set_input_files("#open-file", path)
        ui.wait_for_selector(f"#alerts [role=alert]:has-text('file{number}.json')")
        assert replies(ui) == ["You said: stays"]
    ui.get_by_role("button", name="Dismiss").click()
    assert ui.inner_text("#alerts") == ""


# --- options and errors -----------------------------------------------------------------------------------------------


def test_every_option_is_sent_under_its_name(ui, scripted):
    given = {"temperature": "0.7", "top_p": "0.9", "top_k": "40", "max_tokens": "99", "seed": "5"}
    for name, value in given.items():
        ui.fill(f"#{name}", value)
    ui.get_by_label("Stop texts").fill("END\n\nSTOP")
    ui.select_option("#reasoning", "low")
    ui.select_option("#model", "qwen3-0.6b")
    ui.fill("#system", "Short.")
    say(ui, "hi")
    sent = {name: scripted.last[name] for name in given}
    assert sent == {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "max_tokens": 99, "seed": 5}
    assert scripted.last["stop"] == ["END", "STOP"]
    assert scripted.last["reasoning_effort"] == "low"
    assert scripted.last["model"] == "qwen3-0.6b"
    assert scripted.last["messages"][0] == {"role": "system", "content": "Short."}
    assert "tools" not in scripted.last
    ui.get_by_role("button", name="Reset options").click()
    say(ui, "hi")
    assert not {*given, "stop", "reasoning_effort"} & set(scripted.last)
    assert ui.locator("#model option").all_inner_texts() == ["smollm2-135m", "qwen3-0.6b"]  # encoders cannot talk


def test_an_option_out_of_range_is_refused_before_anything_is_sent(ui, scripted):
    ui.fill("#temperature", "3")
    say(ui, "hi")
    assert "Temperature" in ui.inner_text("article.reply [role=alert]")
    assert scripted.asked == []


ERRORS = [
    ("busy", "too many requests", "Try again in 7 s.", 429),
    ("too long", "9000 tokens", "Start a new conversation", 400),
    ("cut", "ended the stream", "Check that the server still runs", 200),
]


def test_an_error_says_what_happened_and_what_to_do(ui, scripted):
    for text, message, advice, status in ERRORS:
        ui.watch.expected += [f"status of {status}"]
        scripted.asked.clear()
        say(ui, text)
        trouble = ui.locator("article.reply").last.get_by_role("alert")
        assert message in trouble.inner_text().lower()
        assert advice in trouble.inner_text()
        trouble.get_by_role("button", name="Try again").click()
        ui.wait_for_selector("#log[aria-busy=false]")
        assert len(scripted.asked) == 2
        assert trouble.count() == 1
    say(ui, "fine")
    assert replies(ui)[-1] == "You said: fine"


def test_a_server_that_is_gone_is_told_and_nothing_is_lost(ui):
    ui.watch.expected += ["net::ERR"]
    ui.route("**/v1/chat/completions", lambda route: route.abort())
    say(ui, "are you there")
    assert "cannot be reached" in ui.inner_text("article.reply [role=alert]")
    ui.unroute("**/v1/chat/completions")
    ui.get_by_role("button", name="Try again").click()
    ui.locator("article.reply .text", has_text="You said: are you there").wait_for()
    assert replies(ui) == ["You said: are you there"]


def test_a_missing_key_is_asked_for(open_page, scripted):
    scripted.key = "secret"
    ui = open_page(ready=False)
    ui.watch.expected += ["status of 401"]
    ui.wait_for_selector("#alerts [role=alert]")
    assert "API key" in ui.inner_text("#alerts")
    ui.fill("#api-key", "secret")
    ui.press("#api-key", "Tab")
    ui.wait_for_selector("#status.ready", state="attached")
    assert ui.inner_text("#alerts") == ""
    say(ui, "open")
    assert replies(ui) == ["You said: open"]


# --- hostile text -----------------------------------------------------------------------------------------------------

INERT = """() => {
  const strange = document.querySelectorAll("main :is(img, script, iframe, style, object, embed, video, base, link)");
  const handled = (e) => [...e.attributes].some((a) => a.name.startsWith("on"));
  const handlers = [...document.querySelectorAll("main *")].filter(handled);
  const links = [...document.querySelectorAll("main a")].map((a) => [new URL(a.href).protocol, a.rel, a.target]);
  return [window.stolen ?? null, strange.length, handlers.length, links];
}"""


def test_hostile_answers_stay_text(ui):
    say(ui, "attack")
    stolen, strange, handlers, links = ui.evaluate(INERT)
    assert (stolen, strange, handlers) == (None, 0, 0)
    assert links
    assert all(link == ["https:", "noopener noreferrer nofollow", "_blank"] for link in links)
    shown = ui.inner_text("article.reply .text")
    for part in (
        "<img src=x onerror=",
        "<script>window.stolen=1</script>",
        "<b>bold</b>",
        "<iframe src=",
        "<svg onload=",
    ):
        assert part in shown
    assert "(outside.example)" in shown


def test_hostile_messages_files_and_names_stay_text(ui, scripted, tmp_path):
    evil = '<img src=x onerror="window.stolen=1">'
    entries = [
        {"role": "assistant", "content": evil, "tool_calls": [{"function": {"name": evil, "arguments": evil}}]},
        {"role": "tool", "tool_call_id": "x", "content": evil},
    ]
    whole = {"format": "pippin-conversation", "version": 1, "model": evil, "instructions": evil}
    path = tmp_path / "evil.json"
    path.write_text(json.dumps(whole | {"turns": [{"user": evil, "entries": entries}]}))
    ui.set_input_files("#open-file", path)
    ui.wait_for_selector("article.reply")
    say(ui, evil)
    say(ui, f"call nothing {json.dumps({'x': evil})}", wait=False)
    ui.wait_for_selector(".call .problem")
    assert ui.evaluate(INERT)[:3] == [None, 0, 0]
    assert ui.inner_text("#log").count("<img src=x") >= 7


# --- tools ------------------------------------------------------------------------------------------------------------


def tool_ui(ui, *names):
    ui.click("#tab-tools")
    for name in names:
        ui.check(f"#tool-{name}")
    ui.click("#tab-chat")
    return ui


def test_nothing_runs_before_it_is_approved_and_then_the_loop_goes_on(ui, scripted):
    tool_ui(ui, "calculator", "clock")
    say(ui, 'call calculator {"expression": "(2 + 3) * 4"}', wait=False)
    ui.wait_for_selector(".call button:has-text('Approve')")
    assert '"expression": "(2 + 3) * 4"' in ui.inner_text(".call .arguments")
    assert len(scripted.asked) == 1
    assert [tool["function"]["name"] for tool in scripted.last["tools"]] == ["clock", "calculator"]
    ui.click(".call button:has-text('Approve')")
    ui.wait_for_selector("#log[aria-busy=false]")
    call, output = scripted.last["messages"][1:]
    assert call["tool_calls"][0]["function"] == {"name": "calculator", "arguments": '{"expression": "(2 + 3) * 4"}'}
    assert output == {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "20"}
    assert replies(ui) == ["The tool says: 20"]
    ui.click("#tab-tools")
    assert "ran" in ui.inner_text(".call-log")


def test_the_model_can_be_made_to_call_a_tool_first(ui, scripted):
    tool_ui(ui, "clock")
    ui.click("#tab-tools")
    ui.get_by_label("must call a tool").check()
    ui.click("#tab-chat")
    say(ui, "call clock {}", wait=False)
    ui.click(".call button:has-text('Approve')")
    ui.wait_for_selector("#log[aria-busy=false]")
    assert [request.get("tool_choice") for request in scripted.asked] == ["required", None]


def test_a_denied_call_tells_the_model_why(ui, scripted):
    tool_ui(ui, "roll_dice")
    say(ui, 'call roll_dice {"count": 1, "sides": 6}', wait=False)
    ui.click(".call button:has-text('Deny')")
    ui.get_by_label("Why not?").fill("no gambling")
    ui.get_by_label("Why not?").press("Enter")
    ui.wait_for_selector("#log[aria-busy=false]")
    assert scripted.last["messages"][2]["content"].startswith("The user denied this call: no gambling")
    assert "denied" in ui.inner_text(".call header")


def test_arguments_can_be_changed_and_are_checked_first(ui, scripted):
    tool_ui(ui, "roll_dice")
    say(ui, 'call roll_dice {"count": 99, "sides": 6}', wait=False)
    ui.wait_for_selector(".call .problem")
    assert "count is more than 20" in ui.inner_text(".call .problem")
    assert ui.get_by_role("button", name="Approve").is_disabled()
    ui.click(".call button:has-text('Edit')")
    area = ui.get_by_role("textbox", name="Arguments")
    for bad, why in (("{", "not JSON"), ('{"count": 2}', "sides is missing")):
        area.fill(bad)
        ui.click(".call button:has-text('Keep changes')")
        assert why in ui.inner_text(".call [role=alert]")
    area.fill('{"count": 3, "sides": 2}')
    ui.click(".call button:has-text('Keep changes')")
    ui.click(".call button:has-text('Approve')")
    ui.wait_for_selector("#log[aria-busy=false]")
    call, output = scripted.last["messages"][1:]
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"count": 3, "sides": 2}
    rolled = json.loads(output["content"])
    assert len(rolled["rolls"]) == 3
    assert set(rolled["rolls"]) <= {1, 2}
    assert rolled["sum"] == sum(rolled["rolls"])


def test_a_tool_of_ones_own_asks_for_its_result(ui, scripted):
    ui.click("#tab-tools")
    ui.fill("#tool-name", "get weather")
    ui.get_by_role("button", name="Add tool").click()
    assert "1 to 64" in ui.inner_text("#view-tools [role=alert]")
    ui.fill("#tool-name", "get_weather")
    ui.fill("#tool-schema", '{"type": "string"}')
    ui.get_by_role("button", name="Add tool").click()
    assert "“object”" in ui.inner_text("#view-tools [role=alert]")
    ui.fill("#tool-schema", '{"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}')
    ui.get_by_role("button", name="Add tool").click()
    ui.click("#tab-chat")
    assert ui.inner_text("#tools-on") == "get_weather"
    say(ui, 'call get_weather {"town": "Bergen"}', wait=False)
    ui.click(".call button:has-text('Approve')")
    ui.get_by_label("Result of get_weather").fill("rain, 9 °C")
    ui.get_by_role("button", name="Give result").click()
    ui.wait_for_selector("#log[aria-busy=false]")
    assert replies(ui) == ["The tool says: rain, 9 °C"]
    ui.click("#tab-tools")
    ui.get_by_role("button", name="Remove get_weather").click()
    assert ui.locator(".tool").count() == 3


def test_two_calls_at_once_are_decided_one_by_one(ui, scripted):
    tool_ui(ui, "calculator", "clock")
    say(ui, "call calculator_and_clock {}", wait=False)
    ui.wait_for_selector(".call >> nth=1 >> button:has-text('Approve')")
    assert "expression is missing" in ui.inner_text(".call >> nth=0")
    ui.locator(".call").nth(1).get_by_role("button", name="Approve").click()
    assert len(scripted.asked) == 1
    ui.locator(".call").nth(0).get_by_role("button", name="Deny").click()
    ui.get_by_role("button", name="Deny call").click()
    ui.wait_for_selector("#log[aria-busy=false]")
    outputs = [message["content"] for message in scripted.last["messages"][2:]]
    assert outputs[0].startswith("The user denied this call.")
    assert "20" in outputs[1]  # a year


def test_a_tool_that_is_not_there_can_only_be_denied(ui):
    say(ui, "call delete_everything {}", wait=False)
    ui.wait_for_selector(".call .problem")
    assert "delete_everything is not a tool here" in ui.inner_text(".call .problem")
    assert ui.get_by_role("button", name="Approve").is_disabled()


def test_stopping_while_a_call_waits_leaves_a_conversation_that_can_go_on(ui, scripted):
    tool_ui(ui, "clock")
    say(ui, "call clock {}", wait=False)
    ui.wait_for_selector(".call button:has-text('Approve')")
    ui.keyboard.press("Escape")
    ui.wait_for_selector("#log[aria-busy=false]")
    say(ui, "hello")
    assert scripted.last["messages"] == [
        {"role": "user", "content": "call clock {}"},
        {"role": "user", "content": "hello"},
    ]


# --- the live view ----------------------------------------------------------------------------------------------------


def test_the_live_view_counts_this_pages_requests_and_asks_only_while_in_sight(ui):
    asked = []
    ui.on("request", lambda request: request.url.endswith("/v1/stats") and asked.append(request))
    say(ui, "one message with a few more words than that")
    say(ui, "and another one that is long enough to be timed")
    assert asked == []
    ui.click("#tab-live")
    ui.wait_for_selector("#view-live .badge.approved")
    ui.until("document.querySelector('.gauge .line').getAttribute('d')")
    assert "48 tokens read, 24 of them from the cache" in ui.inner_text("#totals")
    labels = ui.locator("#view-live svg[role=img]").evaluate_all("all => all.map((e) => e.getAttribute('aria-label'))")
    assert len(labels) == 6
    assert all("now" in label and "least" in label for label in labels)
    assert "34" in labels[0] or "35" in labels[0]
    assert "1,428 of 65,536 tokens" in ui.inner_text("#view-live")
    ui.click("#tab-chat")
    ui.wait_for_timeout(1200)
    seen = len(asked)
    ui.wait_for_timeout(1200)
    assert len(asked) == seen
