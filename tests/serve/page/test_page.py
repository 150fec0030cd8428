"""How the page is served, and the page as a whole: looks, keys, names for screen readers, small screens, no network."""

import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from pippin.serve.page import page as routes

VIEWS = ["chat", "structured", "tools", "live"]


@pytest.fixture(scope="module")
def client():
    app = FastAPI()
    app.include_router(routes.router)
    with TestClient(app) as client:
        yield client


# --- the files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(routes.assets()))
def test_every_file_is_served_with_its_type_and_the_policy(client, name):
    answer = client.get("/" if name == "index.html" else f"/page/{name}")
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert answer.status_code == 200
    assert answer.headers["content-type"].partition(";")[0] == kinds[name.rpartition(".")[2]]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in answer.headers["content-security-policy"]


def test_a_file_that_the_browser_has_is_not_sent_again(client):
    first = client.get("/page/app.js")
    again = client.get("/page/app.js", headers={"if-none-match": f'"other", W/{first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["cache-control"] == "no-cache"
    assert client.get("/page/app.js", headers={"if-none-match": '"other"'}).status_code == 200
    head = client.head("/page/app.js")
    assert (head.content, head.headers["content-length"]) == (b"", str(len(first.content)))


@pytest.mark.parametrize("path", ["/page/", "/page/page.py", "/page/..%2fpage.py", "/page/index.html", "/page/nothing"])
def test_nothing_else_of_the_package_can_be_asked_for(client, path):
    assert client.get(path).status_code == 404


class Inline(HTMLParser):
    """Collects what a strict policy would block, and what is referred to."""

    def __init__(self):
        super().__init__()
        self.found, self.links = [], []

    def handle_starttag(self, tag, attributes):
        names = dict(attributes)
        self.found += [name for name in names if name.startswith("on") or name == "style"]
        self.found += [tag] * (tag == "style" or (tag == "script" and "src" not in names))
        self.links += [names[name] for name in ("src", "href") if name in names and not names[name].startswith("#")]


def test_nothing_is_inline_and_nothing_comes_from_elsewhere():
    reader = Inline()
    reader.feed(routes.assets()["index.html"].content.decode())
    assert reader.found == []
    assert {link.removeprefix("page/") for link in reader.links} <= set(routes.assets())
    for name, asset in routes.assets().items():
        text = asset.content.decode()
        addresses = re.findall(r"(?:https?:)?//[\w.-]+\.\w{2,}[^\s\"']*", text)
        if not name.startswith("vendor/"):  # a library names its home in a comment and in a message
            assert set(addresses) <= {"http://www.w3.org/2000/svg"}, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            name
        )


def test_libraries_are_the_files_of_their_packages_unchanged():
    table = (files("pippin.serve.page") / "vendor" / "README.md").read_text(encoding="utf-8")
    libraries = {name: asset for name, asset in routes.assets().items() if name.startswith("vendor/")}
    assert libraries
    for name, asset in libraries.items():
        row = next(line for line in table.splitlines() if f"`{name.removeprefix('vendor/')}`" in line)
        assert hashlib.sha256(asset.content).hexdigest() in row


def test_every_module_that_is_imported_exists():
    for name, asset in routes.assets().items():
        for module in re.findall(r'from "\./([^"]+)"', asset.content.decode()):
            assert module in routes.assets(), name


# --- colors ----------------------------------------------------------------------------------------------------------

# For each piece of text that is in sight: its color on what lies behind it, by the formula of WCAG 2.2.
CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parse = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const light = (color) => {
    const [r, g, b] = color.slice(0, 3).map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255, 1]);
  };
  const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const bad = [];
  let seen = 0;
  const judge = (element, color, least, what) => {
    const ground = behind(element);
    const found = ratio(over(parse(color), ground), ground);
    seen += 1;
    if (found < least) bad.push(`${what}: ${found.toFixed(2)}`);
  };
  for (const element of document.querySelectorAll("body *")) {
    const box = element.getBoundingClientRect();
    if (!box.width || !box.height || !element.checkVisibility() || element.closest(".unseen")) continue;
    const style = getComputedStyle(element);
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    const name = `${element.tagName}.${element.id || element.className} “${element.textContent.slice(0, 30)}”`;
    if (own) judge(element, style.color, large ? 3 : 4.5, name);
    if (element.placeholder) judge(element, getComputedStyle(element, "::placeholder").color, 4.5, `hint of ${name}`);
    if (element.matches("input, select, textarea:not(#prompt)"))
      judge(element.parentElement, style.borderTopColor, 3, `edge of ${name}`);
    if (element.matches("svg.icon")) judge(element, style.color, 3, `icon in ${element.parentElement.className}`);
  }
  return [seen, bad];
}"""


def fill_all_views(ui):
    """Bring every kind of thing onto the page."""
    ui.click("#tab-tools")
    ui.check("#tool-calculator")
    ui.click("#tab-chat")
    ui.watch.expected += ["status of 429"]
    for text in ("tour", "think", 'call calculator {"expression": "1/0"}', "short", "busy"):
        ui.fill("#prompt", text)
        ui.press("#prompt", "Enter")
        if text.startswith("call"):
            ui.click(".call button:has-text('Approve')")
        ui.wait_for_selector("#log[aria-busy=false]")
    ui.fill("#prompt", 'call calculator {"expression": "1"}')
    ui.press("#prompt", "Enter")
    ui.wait_for_selector(".call button:has-text('Approve')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_and_control_stands_out_enough(open_page, scheme):
    ui = open_page(color_scheme=scheme, size=(1400, 900), reduced_motion="reduce")
    fill_all_views(ui)
    total, bad = ui.evaluate(CONTRAST)
    for view in VIEWS[1:]:
        ui.click(f"#tab-{view}")
        if view == "structured":
            ui.click("#fill")
            ui.wait_for_selector("#result-state.approved")
        if view == "live":
            ui.wait_for_selector("#view-live .badge.approved")
        seen, more = ui.evaluate(CONTRAST)
        total, bad = total + seen, bad + more
    assert bad == []
    assert total > 150


def test_colors_follow_the_system_and_the_switch_wins(open_page):
    def ground(ui):
        return ui.evaluate("getComputedStyle(document.body).backgroundColor")

    ui = open_page(color_scheme="dark")
    dark = ground(ui)
    ui.emulate_media(color_scheme="light")
    light = ground(ui)
    assert light != dark
    seen = {}
    for _ in range(3):
        ui.click("#theme")
        seen[ui.get_attribute("#theme", "aria-label")] = ground(ui)
    assert seen == {"Colors: light": light, "Colors: dark": dark, "Colors: as the system": light}
    ui.click("#theme")
    ui.click("#theme")
    ui.reload()
    assert ground(ui) == dark


def test_less_motion_is_no_motion(open_page):
    ui = open_page(reduced_motion="reduce")
    ui.fill("#prompt", "endless")
    ui.press("#prompt", "Enter")
    ui.wait_for_selector(".status.busy")
    moving = """() => document.getAnimations().length + [...document.querySelectorAll("*")].filter((element) => {
      const { animationName, transitionDuration } = getComputedStyle(element);
      return animationName !== "none" || transitionDuration.split(", ").some((time) => parseFloat(time) > 0);
    }).length"""
    assert ui.evaluate(moving) == 0
    ui.press("#prompt", "Escape")


# --- without a mouse, without a screen --------------------------------------------------------------------------------


def focused(ui):
    name = "e.id || e.getAttribute('aria-label') || e.textContent.trim()"
    return ui.evaluate(f"() => {{ const e = document.activeElement; return {name}; }}")


def focus_is_visible(ui):
    return ui.evaluate(
        """() => {
      const here = [document.activeElement, document.activeElement.closest("#composer")].filter(Boolean);
      return here.some((element) => getComputedStyle(element).outlineStyle !== "none");
    }"""
    )


def tab_to(ui, wanted, most=40):
    for _ in range(most):
        ui.keyboard.press("Tab")
        assert focus_is_visible(ui), focused(ui)
        if focused(ui) == wanted:
            return
    raise AssertionError(f"Tab does not reach {wanted!r}")


def test_everything_can_be_done_with_the_keyboard(ui, scripted):
    ui.focus(".skip")
    assert ui.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
    ui.keyboard.press("Enter")
    assert focused(ui) == "prompt"
    ui.focus(".skip")
    ui.keyboard.press("Tab")
    assert focused(ui) == "tab-chat"
    ui.keyboard.press("ArrowRight")
    ui.keyboard.press("ArrowRight")
    assert focused(ui) == "tab-tools"
    tab_to(ui, "tool-calculator")
    ui.keyboard.press("Space")
    ui.keyboard.press("Shift+Tab")
    for _ in range(20):
        if focused(ui) == "tab-tools":
            break
        ui.keyboard.press("Shift+Tab")
    ui.keyboard.press("Home")
    assert focused(ui) == "tab-chat"
    tab_to(ui, "prompt")
    ui.keyboard.type('call calculator {"expression": "6 * 7"}')
    ui.keyboard.press("Enter")
    ui.wait_for_selector(".call button:has-text('Approve')")
    assert focused(ui) == "Approve"
    ui.keyboard.press("Enter")
    ui.wait_for_selector("#log[aria-busy=false]")
    assert "The tool says: 42" in ui.inner_text("article.reply")
    assert focused(ui) == "prompt"
    ui.keyboard.type("first line")
    ui.keyboard.press("Shift+Enter")
    ui.keyboard.type("second line")
    assert ui.input_value("#prompt") == "first line\nsecond line"
    assert len(scripted.asked) == 2


def test_a_dialog_on_a_small_screen_keeps_the_focus_and_gives_it_back(open_page):
    ui = open_page(size=(700, 800))
    assert not ui.evaluate("document.getElementById('settings').open")
    ui.focus("#toggle-settings")
    ui.keyboard.press("Enter")
    ui.wait_for_selector("#settings[open]")
    assert ui.evaluate("document.getElementById('settings').matches(':modal')")
    for _ in range(25):
        ui.keyboard.press("Tab")
        inside = ui.evaluate(
            "document.activeElement === document.body || !!document.activeElement.closest('#settings')"
        )
        assert inside
    ui.keyboard.press("Escape")
    ui.wait_for_selector("#settings:not([open])", state="attached")
    assert focused(ui) == "toggle-settings"
    ui.wait_for_selector("#toggle-settings[aria-expanded=false]")  # said by an event that comes after the closing


CONTROLS = {"button", "textbox", "combobox", "checkbox", "switch", "tab", "link", "spinbutton", "searchbox"}


def test_every_control_has_a_name_of_its_own(open_page):
    ui = open_page(size=(1400, 900))
    fill_all_views(ui)
    session = ui.context.new_cdp_session(ui)
    found = []
    for view in VIEWS:
        ui.click(f"#tab-{view}")
        if view == "structured":
            ui.select_option("#example", "A recipe")
        nodes = session.send("Accessibility.getFullAXTree")["nodes"]
        for node in nodes:
            role, name = (node.get(key, {}).get("value", "") for key in ("role", "name"))
            if role in CONTROLS or role in ("region", "dialog", "image", "tabpanel", "tablist", "navigation"):
                found.append((view, role, name))
        roles = {node.get("role", {}).get("value") for node in nodes}
        assert {"banner", "main", "navigation", "heading"} <= roles
    assert [row for row in found if not row[2].strip()] == []
    assert len([row for row in found if row[1] in CONTROLS]) > 80


def test_ids_are_unique_and_references_lead_somewhere(open_page):
    ui = open_page(size=(1400, 900))
    fill_all_views(ui)
    code = """() => {
      const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
      const doubles = ids.filter((id, index) => ids.indexOf(id) !== index);
      const lost = [];
      for (const name of ["for", "aria-controls", "aria-labelledby", "aria-describedby"])
        for (const element of document.querySelectorAll(`[${name}]`))
          for (const id of element.getAttribute(name).split(" ")) if (!ids.includes(id)) lost.push(`${name}=${id}`);
      return [doubles, lost];
    }"""
    assert ui.evaluate(code) == [[], []]
    selected = "[...document.querySelectorAll('#tabs [aria-selected=true]')].map((e) => [e.id, e.tabIndex])"
    assert ui.evaluate(selected) == [["tab-chat", 0]]


def test_an_answer_is_announced_once_when_it_is_complete(ui):
    ui.evaluate(
        """() => {
      window.said = [];
      const region = document.getElementById("announcer");
      const listen = () => region.textContent && said.push(region.textContent);
      new MutationObserver(listen).observe(region, { childList: true });
    }"""
    )
    ui.fill("#prompt", "one two three four five six")
    ui.press("#prompt", "Enter")
    ui.wait_for_selector("article.reply .figures")
    ui.until("said.length > 0")
    assert ui.evaluate("said") == ["Answer: You said: one two three four five six"]
    live = "[...document.querySelectorAll('[aria-live], [role=log], [role=status], [role=alert]')].map((e) => e.id)"
    assert set(ui.evaluate(live)) <= {"announcer", ""}
    assert ui.get_attribute("#announcer", "aria-live") == "polite"


@pytest.mark.parametrize("size", [(360, 640), (768, 1024)])
def test_nothing_sticks_out_of_the_screen(open_page, size):
    ui = open_page(size=size, has_touch=size[0] < 500)
    for text in ("tour", "x" * 300, "attack"):
        ui.fill("#prompt", text)
        ui.press("#prompt", "Enter")
        ui.wait_for_selector("#log[aria-busy=false]")
    for view in VIEWS:
        ui.click(f"#tab-{view}")
        if view == "structured":
            ui.select_option("#example", "A recipe")
            ui.click("#fill")
            ui.wait_for_selector("#result-state.approved")
        wide = """() => [...document.querySelectorAll("body, main, .view:not([hidden]), .scroll, .column")]
          .filter((element) => element.scrollWidth > element.clientWidth + 1)
          .map((element) => [element.id || element.className, element.scrollWidth, element.clientWidth])"""
        assert ui.evaluate(wide) == [], view
    small = """() => [...document.querySelectorAll("button, select, [role=tab]")]
      .filter((e) => e.checkVisibility())
      .filter((e) => Math.min(e.getBoundingClientRect().height, e.getBoundingClientRect().width) < 24)
      .map((e) => e.textContent)"""
    assert ui.evaluate(small) == []


# --- with the real server ---------------------------------------------------------------------------------------------


def test_the_page_needs_no_key_and_its_answers_do(server, open_page):
    ui = open_page(server.url, ready=False)
    ui.watch.expected += ["status of 401"]
    ui.wait_for_selector("#alerts [role=alert]")
    assert "API key" in ui.inner_text("#alerts")
    ui.fill("#api-key", "wrong")
    ui.press("#api-key", "Tab")
    ui.fill("#api-key", server.key)
    ui.press("#api-key", "Tab")
    ui.wait_for_selector("#status.ready", state="attached")
    assert ui.inner_text("#status-text") == "tiny"
    assert ui.evaluate("[Object.values(sessionStorage), Object.values(localStorage)]") == [[server.key], []]


@pytest.fixture
def real(server, open_page):
    """The page of the real server over the tiny model, with its key."""
    ui = open_page(server.url, ready=False)
    ui.watch.expected += ["status of 401"]
    ui.fill("#api-key", server.key)
    ui.press("#api-key", "Tab")
    ui.wait_for_selector("#status.ready", state="attached")
    return ui


def test_a_real_model_answers_and_can_be_stopped(server, real):
    real.fill("#max_tokens", "40")
    real.fill("#seed", "7")
    real.fill("#prompt", "Hello")
    real.press("#prompt", "Enter")
    real.wait_for_selector("article.reply .figures")
    assert "40 tokens out" in real.inner_text("article.reply .figures")
    real.fill("#max_tokens", "1500")
    real.evaluate(
        """new MutationObserver((_, observer) => {
          if (document.querySelectorAll("article.reply .text").length < 2) return;
          observer.disconnect();
          document.getElementById("send").click();
        }).observe(document.getElementById("log"), { subtree: true, childList: true })"""
    )
    real.fill("#prompt", "Go on")
    real.press("#prompt", "Enter")
    real.wait_for_selector("article.reply:nth-of-type(4) .text", state="attached")
    real.wait_for_selector("#log[aria-busy=false]")
    assert "Stopped." in real.inner_text("article.reply:nth-of-type(4)")
    real.until(
        """async () => {
          const { getJson } = await import("/page/api.js");
          return (await getJson("/v1/stats")).active === 0;
        }"""
    )


def test_a_real_model_fills_the_form_with_a_valid_answer(real):
    real.click("#tab-structured")
    real.click("#way-json")
    schema = '{"type": "object", "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}, '
    schema += '"list": {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 3}}, '
    schema += '"required": ["ok", "size", "list"], "additionalProperties": false}'
    real.fill("#schema", schema)
    real.click("#fill")
    real.wait_for_selector("#result-state.approved", timeout=30_000)
    assert real.inner_text("#result-state") == "valid"
    assert real.locator(".choice.chosen").count() == 1


def test_the_live_view_shows_the_real_servers_figures(real):
    real.click("#tab-live")
    real.wait_for_selector("#view-live .badge.approved")
    real.wait_for_selector("#view-live td:has-text('loaded')")
    assert "tiny" in real.inner_text("#view-live")


def test_a_call_of_a_real_model_runs_once_it_is_approved(real):
    real.click("#tab-tools")
    real.check("#tool-roll_dice")
    real.check("#must-call")
    real.click("#tab-chat")
    real.fill("#max_tokens", "1200")
    real.fill("#seed", "3")
    real.fill("#prompt", "Roll")
    real.press("#prompt", "Enter")
    real.wait_for_selector(".call button:has-text('Approve')")
    assert set(json.loads(real.inner_text(".call .arguments"))) == {"count", "sides"}
    real.locator(".call").first.get_by_role("button", name="Approve").click()
    others = real.locator(".call button:has-text('Deny')")  # "Deny", and "Deny call" once that was chosen
    while others.count():
        others.first.click()
    real.wait_for_selector("article.reply .figures")
    assert '"sum":' in real.inner_text(".call .result")
