"""Structured answers in a browser: schemas by fields and by text, the form that fills, and what is said of it."""

import itertools
import json

import pytest


@pytest.fixture
def form(ui):
    ui.click("#tab-structured")
    return ui


def fill(form):
    form.click("#fill")
    form.wait_for_selector("#result-state:is(.approved, .denied)")


def test_the_form_fills_step_by_step_and_ends_valid(form, scripted):
    scripted.pause = 0.004
    form.evaluate(
        """() => {
      window.states = [];
      const watch = () => {
        const shown = [...document.querySelectorAll(".form-view .value:not(.empty)")].map((e) => e.textContent);
        if (JSON.stringify(shown) !== JSON.stringify(states.at(-1))) states.push(shown);
      };
      new MutationObserver(watch).observe(document.querySelector(".form-view"),
        { subtree: true, childList: true, characterData: true, attributes: true });
    }"""
    )
    assert form.locator(".form-view .value.empty").count() == 3
    fill(form)
    assert form.inner_text("#result-state") == "valid"
    states = form.evaluate("states")
    assert len(states) >= 8
    for earlier, later in itertools.pairwise(states):
        assert all(now.startswith(before) for before, now in zip(earlier, later, strict=False)), (earlier, later)
        assert len(later) >= len(earlier)
    assert states[-1] == ['Ada "Countess" Lovelace 🍏', "1815", "London", "mathematician", "writer"]
    assert not any(state[1:2] in (["1"], ["18"], ["181"]) for state in states)  # a number is shown once it is complete
    assert json.loads(form.text_content(".raw"))["birth_year"] == 1815
    assert "first after" in form.inner_text(".notes")
    sent = scripted.last["response_format"]
    assert sent["type"] == "json_schema"
    assert sent["json_schema"]["strict"] is True
    assert sent["json_schema"]["schema"]["required"] == ["name", "birth_year", "birthplace", "occupations"]


def test_lists_of_groups_are_drawn_as_they_come(form):
    form.select_option("#example", "A recipe")
    fill(form)
    assert form.locator(".form-view .array > li > .object").count() == 2
    assert "Simmer, then blend." in form.inner_text(".form-view")
    assert form.inner_text(".form-view .value.boolean") == "Yes"


def test_a_choice_is_marked_only_once_it_is_sure(form):
    form.select_option("#example", "A support ticket")
    assert form.locator(".choice").count() == 7
    ticket = {"summary": "s", "urgency": "high", "area": "login", "customer": "Kim", "needs_reply": True}
    form.fill("#schema-prompt", json.dumps(ticket))
    fill(form)
    assert form.locator(".choice.chosen").all_inner_texts() == ["high", "login"]
    assert form.locator("[aria-current=true]").count() == 2


def test_an_answer_that_does_not_fit_is_told_with_its_places(form):
    form.fill("#schema-prompt", '{"name": 5, "birthplace": "x", "occupations": [1], "more": 1}')
    fill(form)
    assert form.inner_text("#result-state") == "not valid"
    shown = form.inner_text(".notes")
    for part in ("birth_year is missing", "name is integer, expected string", "occupations[0]", "more is not part"):
        assert part in shown


def test_an_answer_that_is_no_json_is_told(form):
    for prompt, state, why in [
        ("{nonsense", "not JSON", "not JSON"),
        ('{"name": "A', "cut short", "ended before the JSON"),
    ]:
        form.fill("#schema-prompt", prompt)
        fill(form)
        assert form.inner_text("#result-state") == state
        assert why in form.inner_text(".notes")


def test_errors_of_the_server_are_shown_with_a_way_on(form, scripted):
    form.watch.expected += ["status of 400"]
    form.fill("#schema-prompt", "too long")
    fill(form)
    assert "9000 tokens" in form.inner_text(".notes [role=alert]")
    form.fill("#schema-prompt", "fine")
    form.get_by_role("button", name="Try again").click()
    form.wait_for_selector("#result-state.approved")


def test_filling_can_be_stopped(form, scripted):
    scripted.pause = 0.05
    form.click("#fill")
    form.wait_for_selector(".value.growing")
    form.keyboard.press("Escape")
    form.until("document.getElementById('result-state').textContent === 'stopped'")
    assert form.inner_text("#fill") == "Fill in"


def test_fields_become_a_schema_and_a_schema_becomes_fields(form, scripted):
    form.click("#way-json")
    form.fill("#schema", '{"type": "object", "properties": {}}')
    form.click("#way-fields")
    assert form.locator(".builder-row").count() == 0
    add = form.get_by_role("button", name="Add field")
    add.click()
    form.keyboard.type("color")
    row = form.locator(".builder-row").nth(0)
    row.get_by_label("Type").select_option("enum")
    row.get_by_label("Allowed values").fill("red, green,, red")
    row.get_by_label("Description").fill("of the skin")
    add.click()
    form.keyboard.type("seeds")
    row = form.locator(".builder-row").nth(1)
    row.get_by_label("required").uncheck()
    row.get_by_label("Type").select_option("array")
    row.get_by_label("Items").select_option("object")
    row.get_by_role("button", name="Add field").click()
    form.keyboard.type("weight")
    row.locator(".builder-row").get_by_label("Type").select_option("number")
    form.click("#way-json")
    seed = {
        "type": "object",
        "properties": {"weight": {"type": "number"}},
        "required": ["weight"],
        "additionalProperties": False,
    }
    assert json.loads(form.input_value("#schema")) == {
        "type": "object",
        "properties": {
            "color": {"type": "string", "enum": ["red", "green"], "description": "of the skin"},
            "seeds": {"type": "array", "items": seed},
        },
        "required": ["color"],
        "additionalProperties": False,
    }
    form.click("#way-fields")
    assert form.locator(".builder-row").count() == 3
    form.get_by_role("button", name="Remove field").first.click()
    assert "color" not in form.input_value("#schema")


def test_a_schema_that_fields_cannot_show_stays_text(form):
    form.click("#way-json")
    form.fill(
        "#schema", '{"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "integer"}}}'
    )
    form.click("#way-fields")
    assert "more than fields can show" in form.inner_text("#view-structured .problem")
    assert form.locator("#panel-json").is_visible()
    form.fill("#schema-prompt", '{"a": 3}')
    fill(form)
    assert form.inner_text(".form-view .value.integer") == "3"
    assert form.inner_text("#result-state") == "valid"


def test_a_schema_that_is_none_is_refused_before_anything_is_sent(form, scripted):
    form.click("#way-json")
    for text in ("{", "[]", "3", '"x"', ""):
        form.fill("#schema", text)
        form.click("#fill")
        assert "not JSON" in form.inner_text("#view-structured .problem")
    assert scripted.asked == []


EVIL = "<img src=x onerror=window.stolen=1>"


def test_hostile_schemas_and_values_stay_text(form):
    form.click("#way-json")
    properties = {
        EVIL: {"type": "string", "title": EVIL, "description": EVIL},
        "b": {"enum": [EVIL, "x"], "title": {"not": "text"}},
        "__proto__": {"type": "object", "properties": {"polluted": {"type": "string"}}},
        "c": True,
    }
    form.fill("#schema", json.dumps({"type": "object", "title": EVIL, "properties": properties}))
    value = {EVIL: EVIL, "b": EVIL, "__proto__": {"polluted": "yes"}, "c": [{"d": EVIL}], "e": {"f": [None, 1.5, {}]}}
    form.fill("#schema-prompt", json.dumps(value))
    fill(form)
    assert form.locator("main img").count() == 0
    assert form.evaluate("[window.stolen ?? null, ({}).polluted ?? null]") == [None, None]
    assert form.inner_text(".form-view").count("<img") >= 4
    assert json.loads(form.text_content(".raw")) == value


def test_a_schema_that_refers_to_itself_ends(form):
    form.click("#way-json")
    node = {"type": "object", "properties": {"name": {"type": "string"}, "next": {"$ref": "#"}}, "required": ["name"]}
    form.fill("#schema", json.dumps(node))
    assert 1 < form.locator(".form-view dt").count() < 20
    value = {"name": "end"}
    for depth in range(40):
        value = {"name": str(depth), "next": value}
    form.fill("#schema-prompt", json.dumps(value))
    fill(form)
    assert form.inner_text("#result-state") == "valid"


def test_a_value_from_the_text_is_marked_in_it(form, scripted):
    form.check("#quoted")
    form.fill("#schema-prompt", "😀 Ada Lovelace <b>was</b> here")
    fill(form)
    assert form.inner_text("#result-state") == "from the text"
    assert scripted.last["input"] == "😀 Ada Lovelace <b>was</b> here"
    assert scripted.last["schema"]["required"] == ["name", "birth_year", "birthplace", "occupations"]
    assert form.locator(".source mark").count() == 1
    assert form.inner_text(".source mark").startswith("Ada")
    assert form.get_attribute(".source mark", "title") == "name 88 %"
    assert "<b>was</b> here" in form.inner_text(".source")
    assert "a note" in form.inner_text(".notes")
    assert json.loads(form.text_content(".raw")) == {"name": "Ada"}
