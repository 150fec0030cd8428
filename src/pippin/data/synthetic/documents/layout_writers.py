"""Layouts of documents: each is a function from the contents to the pieces of the text.

Notable here:
- lines, table, markdown, setting, compact and columns show labels; prose, email and chat show sentences
- mixed has a letterhead, sentences and tables; thread has older values of the same fields below, quoted; amended has
  them beside the new ones
- columns is what remains of a page with two columns, read line by line
- card has values of which most have no label
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pippin.data.synthetic.documents import names
from pippin.data.synthetic.documents.amendments import amended, superseded
from pippin.data.synthetic.documents.blocks import (
    TABLES,
    boilerplate,
    cell,
    label,
    labeled,
    list_block,
    order,
    other_line,
    plain,
    separator,
    table,
    title,
    width,
)
from pippin.data.synthetic.documents.contents import Contents, Piece
from pippin.data.synthetic.documents.kind_files import camel, slug
from pippin.data.synthetic.documents.sentences import (
    Pieces,
    filler,
    in_a_row,
    item_pieces,
    labeled_sentence,
    sentences,
    written,
)


def lines(contents: Contents) -> Pieces:
    """A title, then a label and a value in each line."""
    rng = contents.rng
    between, manner = separator(contents), rng.choice(("", "", "", "upper"))
    out = [*title(contents), Piece("\n" * rng.randint(1, 2))]
    if rng.random() < 0.3:
        out += plain(other_line(contents) + "\n")
    blocks = [labeled(contents, path, between, manner) + plain("\n") for path in order(contents)]
    for _extra in range(rng.randint(0, 2)):
        blocks.insert(rng.randint(0, len(blocks)), plain(other_line(contents) + "\n"))
    groups = [list_block(contents, name) for name in contents.lists]
    at = rng.choice((0, len(blocks), len(blocks)))
    for group in groups:
        blocks.insert(at, plain("\n") + group + plain("\n"))
    for block in blocks:
        out += block
        if rng.random() < 0.12:
            out += plain("\n")
    return out + plain("\n") + boilerplate(contents)


def as_table(contents: Contents) -> Pieces:
    """A table of labels and values, in one of several manners."""
    rng = contents.rng
    out = [*title(contents), Piece("\n\n")]
    rows = [[[label(contents, path)], cell(contents, contents.leaves[path])] for path in order(contents)]
    manner = rng.choice(TABLES)
    out += table(rows, manner, header=False) if rows else []
    for name in contents.lists:
        out += plain("\n") + list_block(contents, name, rng.choice(("table", "table", "bullets")))
    return out + plain("\n") + boilerplate(contents)


def markdown(contents: Contents) -> Pieces:
    """Markdown: headings, bullets or a table, a quotation."""
    rng = contents.rng
    out = [Piece("# "), *title(contents), Piece("\n\n")]
    if rng.random() < 0.4:
        out += plain(filler(contents) + "\n\n")
    manner = rng.choice(("bullets", "table", "bold"))
    colon = " :" if contents.language == "fr" else ":"
    rows = [[[label(contents, path)], cell(contents, contents.leaves[path])] for path in order(contents)]
    if manner == "table" and rows:
        out += table([[plain(" "), plain(" ")], *rows], "markdown", header=True)
    for name, value in rows if manner != "table" else []:
        mark = rng.choice(("**", "**", "")) if manner == "bullets" else "**"
        out += [Piece("- " if manner == "bullets" else ""), Piece(mark), *name, Piece(colon + mark + " ")]
        out += [*value, Piece("\n" if manner == "bullets" else "  \n")]
    for listed in contents.lists:
        out += plain("\n") + list_block(contents, listed, rng.choice(("markdown", "bullets", "numbers")))
    if rng.random() < 0.5:
        out += plain(f"\n> {filler(contents, 'ad')}\n")
    return out + plain("\n---\n" if rng.random() < 0.4 else "\n") + boilerplate(contents, 2)


SETTINGS: Final = (
    ("", "=", ""),
    ("", " = ", ""),
    ("", ": ", ""),
    ("", '="', '"'),
    ('"', '": "', '",'),
    ("<", ">", "</>"),
)


def setting(contents: Contents) -> Pieces:
    """Names and values as programs write them: key=value, YAML, something like JSON or XML."""
    rng = contents.rng
    before, between, after = rng.choice(SETTINGS)
    change: Callable[[str], str] = rng.choice((slug, lambda text: camel(slug(text)), lambda text: slug(text).upper()))
    out: Pieces = [Piece(rng.choice(("# ", "; ", "// "))), *title(contents), Piece("\n")]
    own_names = rng.random() < 0.3  # English names of the fields, whatever the language

    def entry(name: str, value: Pieces, indent: str = "") -> Pieces:
        end = after.replace("</>", f"</{name}>")
        return [Piece(indent + before), Piece(name, None, "label"), Piece(between), *value, Piece(end + "\n")]

    for path in order(contents):
        leaf = contents.leaves[path]
        out += entry(
            change(leaf.form.name if own_names else contents.label(leaf.form)), contents.pieces(leaf, "setting")
        )
    for listed, rows in contents.lists.items():
        form = next(each for each in contents.kind.fields if each.name == listed)
        name = change(listed if own_names else contents.label(form))
        heads = [change(each.name if own_names else contents.label(each)) for each in form.fields]
        keys = dict(zip([each.name for each in form.fields], heads, strict=True))
        if not rows:
            out += entry(name, plain("[]"))
        for i, row in enumerate(rows):
            for key, leaf in row.items():
                place = f"{name}.{i}.{keys[key]}" if key else f"{name}.{i}"
                out += entry(place, contents.pieces(leaf, "setting"))
    comment = rng.choice(("# ", "// ", "; "))
    for _ in range(rng.randint(1, 3)):
        out += plain(f"{comment}{other_line(contents)}\n")
    return out


def compact(contents: Contents) -> Pieces:
    """Everything in a line or two."""
    rng = contents.rng
    between = rng.choice((" · ", "; ", " | ", " / ", ", ", " — ", " * "))
    colon = rng.choice((": ", " ", ": ", "="))
    out = [*title(contents), Piece(rng.choice((": ", " - ", between, ". ")))]
    contents.one_line = True
    parts = [labeled(contents, path, colon) for path in order(contents)]
    for name in contents.lists:
        form = next(each for each in contents.kind.fields if each.name == name)
        parts.append([Piece(contents.label(form) + ": ", None, "label"), *in_a_row(contents, name)])
    for i, part in enumerate(parts):
        out += plain(between if i else "") + part
    return out + plain(".\n\n") + boilerplate(contents)


def columns(contents: Contents) -> Pieces:
    """Two columns of a page, read line by line: labels beside labels, or above their values."""
    rng = contents.rng
    out = [*title(contents), Piece("\n")]
    above, gap = rng.random() < 0.4, rng.randint(3, 8)
    colon = "" if above else rng.choice((": ", " ", ":   "))
    cells = [([label(contents, path)], cell(contents, contents.leaves[path])) for path in order(contents)]
    if rng.random() < 0.5:
        text = other_line(contents)
        cells.insert(rng.randint(0, len(cells)), (plain(text[:34].rsplit(" ", 1)[0]), []))
    for i in range(0, len(cells), 2):
        pair = cells[i : i + 2]
        rows = [[a for a, _ in pair], [b for _, b in pair]] if above else [[a + plain(colon) + b for a, b in pair]]
        wide = max(width(row[0]) for row in rows) + gap
        for row in rows:
            out += row[0]
            if len(row) > 1:
                out += plain(" " * (wide - width(row[0]))) + row[1]
            out += plain("\n")
        out += plain("\n" if rng.random() < 0.2 else "")
    for name in contents.lists:
        out += list_block(contents, name, rng.choice(("table", "bullets", "table")))
    return out + boilerplate(contents)


def card(contents: Contents) -> Pieces:
    """A business card or the end of a message: what speaks for itself (`bare: NAME NAME` of the kind) has no label."""
    rng, between = contents.rng, contents.rng.choice((": ", " ", " ", ":  "))
    bare = contents.kind.settings.get("bare", "").split()
    gap = rng.choice(("\n", "\n", "\n", " | ", " · "))
    contents.one_line = gap != "\n"
    out: Pieces = []
    for form in contents.kind.fields:
        row = {
            path.rpartition(".")[2]: leaf for path, leaf in contents.leaves.items() if path.split(".")[0] == form.name
        }
        if form.kind == "record" and row:
            block = item_pieces(contents, form.name, row)
        elif form.name in contents.lists:
            block = [Piece(contents.label(form) + ": ", None, "label"), *in_a_row(contents, form.name)]
        elif row:
            leaf = row[form.name]
            block = cell(contents, leaf) if form.name in bare else labeled(contents, form.name, between)
        else:
            continue
        out += plain("" if not out else "\n" if rng.random() < 0.2 else gap) + block
    start = plain(rng.choice(("", "", contents.word("closing") + "\n\n", "-- \n")))
    return start + out + plain("\n") + boilerplate(contents, 2)


def wrapped(pieces: Pieces, limit: int) -> Pieces:
    """Pieces with line breaks in place of some spaces that belong to no fact."""
    out: Pieces = []
    column = 0
    for piece in pieces:
        if piece.leaf is not None or piece.role == "fixed" or "\n" in piece.text:
            tail = piece.text.rpartition("\n")
            column = len(tail[2]) if tail[1] else column + len(piece.text)
            out.append(piece)
            continue
        words = piece.text.split(" ")
        text = words[0]
        column += len(words[0])
        for word in words[1:]:
            if column + len(word) > limit and word:
                text, column = text + "\n" + word, len(word)
            else:
                text, column = text + " " + word, column + 1 + len(word)
        out.append(piece._replace(text=text))
    return out


def paragraphs(contents: Contents, paths: list[str], *, lists: bool = True) -> Pieces:
    """Sentences that state all of these facts, in paragraphs of a few, with lists between or after them."""
    rng = contents.rng
    listed = list(contents.lists) if lists else []
    found, left = sentences(contents, paths + listed)
    late = [path for path in left if path not in listed]
    if len(late) > 3:  # many facts of no sentence stand together after the text
        block = [labeled(contents, path, ": ") + plain("\n") for path in late]
    else:
        block = []
        for path in late:
            found.insert(rng.randint(1, len(found)) if found else 0, labeled_sentence(contents, path))
    for _ in range(rng.choice((0, 0, 1, 2))):
        found.insert(rng.randint(0, len(found)), plain(filler(contents)))
    out: Pieces = []
    run = rng.randint(2, 5)
    for i, each in enumerate(found):
        out += plain("" if not i else "\n\n" if i % run == 0 else " ") + each
    if rng.random() < 0.35:
        out = wrapped(out, rng.randint(56, 90))
    out += plain("\n")
    for each in block:
        out += each
    for name in listed:
        if name in left:
            out += plain("\n") + list_block(contents, name)
    return out


def greeting(contents: Contents) -> Pieces:
    """The salutation, to the reader whose name is a fact, if the kind has one."""
    rng = contents.rng
    path = contents.kind.settings.get("greet", "")
    if path in contents.leaves and rng.random() < 0.6:
        phrase = rng.choice(names.words(contents.language)["greeting_name"])
        return written(phrase, contents, contents.pieces(contents.leaves[path], "sentence"))
    return plain(contents.word("greeting"))


def signature(contents: Contents) -> Pieces:
    """The closing line and who signs: a fact, if the kind has one; else anybody, or an office instead of a name."""
    out = plain(contents.word("closing") + "\n")
    path = contents.kind.settings.get("sign")
    if path in contents.leaves:
        return out + contents.pieces(contents.leaves[path], "sentence") + plain("\n")
    office = contents.draw("department")
    if path is None and contents.rng.random() < 0.75:
        office = contents.draw("person") + ("\n" + office if contents.rng.random() < 0.4 else "")
    return out + plain(office + "\n")


def stated(pieces: Pieces) -> set[int]:
    """Identities of the leaves that pieces state."""
    return {id(each.leaf) for each in pieces if each.leaf is not None}


def body(contents: Contents, *pieces: Pieces) -> Pieces:
    """Paragraphs about what the given pieces have not stated yet."""
    done = set().union(*(stated(each) for each in pieces))
    return paragraphs(contents, [path for path, leaf in contents.leaves.items() if id(leaf) not in done])


def prose(contents: Contents) -> Pieces:
    """Sentences: a letter, or a text with a title where the kind is no letter."""
    if contents.kind.settings.get("voice") == "plain":
        start = [*title(contents), Piece("\n\n")] if contents.rng.random() < 0.7 else []
        return start + body(contents) + boilerplate(contents, 2)
    start, end = greeting(contents) + plain("\n\n"), signature(contents)
    return start + body(contents, start, end) + plain("\n") + end + boilerplate(contents, 2)


def email(contents: Contents) -> Pieces:
    """An e-mail: header, greeting, sentences, signature."""
    rng = contents.rng
    sender, to, subject, day, sent = (contents.written(each) for each in names.words(contents.language)["from"])
    colon = " : " if contents.language == "fr" else ": "
    head: Pieces = []
    avoid = contents.kind.settings.get("avoid", "").split()
    people = [
        contents.draw("department") if "person" in avoid else contents.draw("person"),
        contents.draw("department"),
    ]
    for name, who in zip((sender, to), people, strict=True):
        mail = "" if "email" in avoid else f" <{names.email(contents.style, rng, who)}>"
        if rng.random() < 0.8:
            head += [Piece(name + colon, None, "label"), Piece(who + mail + "\n")]
    path = contents.kind.settings.get("sent", "")
    if path in contents.leaves:
        head += [Piece(rng.choice((day, sent)) + colon, None, "label")]
        head += [*contents.pieces(contents.leaves[path], "cell"), Piece("\n")]
    elif not path and rng.random() < 0.6:
        head += [Piece(rng.choice((day, sent)) + colon, None, "label"), Piece(contents.draw("date") + "\n")]
    head += [Piece(subject + colon, None, "label"), *title(contents), Piece("\n\n")]
    start, end = greeting(contents) + plain("\n\n"), signature(contents)
    return head + start + body(contents, head, start, end) + plain("\n") + end + boilerplate(contents, 2)


def mixed(contents: Contents) -> Pieces:
    """A letterhead, a block of labels, sentences, lists as tables, a closing and a footer."""
    rng = contents.rng
    out: Pieces = []
    path = contents.kind.settings.get("head")
    avoid = contents.kind.settings.get("avoid", "").split()
    if path in contents.leaves:
        out += [*contents.pieces(contents.leaves[path], "cell"), Piece("\n")]
    elif path is None and "company" not in avoid:
        out += plain(contents.draw("company") + "\n")
        if "address" not in avoid:
            out += plain(contents.draw("address") + "\n")
    out += [Piece("\n"), *title(contents), Piece("\n\n")]
    done = stated(out)
    paths = [each for each in order(contents) if id(contents.leaves[each]) not in done]
    share = rng.uniform(0.3, 0.7)
    between = separator(contents)
    top = [each for each in paths if rng.random() < share]
    for each in top:
        out += labeled(contents, each, between) + plain("\n")
    rest = [each for each in paths if each not in top]
    end = signature(contents) if contents.kind.settings.get("voice") != "plain" else []
    rest = [each for each in rest if id(contents.leaves[each]) not in stated(end)]
    out += plain("\n") + paragraphs(contents, rest, lists=rng.random() < 0.3)
    have = stated(out)
    for name, rows in contents.lists.items():
        if not rows or id(next(iter(rows[0].values()))) not in have:
            out += plain("\n") + list_block(contents, name, "table")
    return out + plain("\n") + end + boilerplate(contents)


def thread(contents: Contents) -> Pieces:
    """A message that corrects another one, which stands below it, quoted, with the old values."""
    rng = contents.rng
    start = plain(contents.word("greeting") + "\n\n") + plain(contents.word("correction") + "\n")
    end = signature(contents)
    if rng.random() < 0.5:
        middle = body(contents, start, end)
    else:
        between, done = separator(contents), stated(end)
        middle = []
        for path in order(contents):
            if id(contents.leaves[path]) not in done:
                middle += labeled(contents, path, between) + plain("\n")
        for name in contents.lists:
            middle += list_block(contents, name)
    out = start + middle + plain("\n") + end + plain("\n")
    old, paths = superseded(contents)
    out += plain(contents.word("old_mail") + "\n")
    for path in paths:
        if rng.random() < 0.8:
            quoted = labeled(old, path, ": ")
            out += [Piece("> ", None, "fixed"), *(Piece(each.text.replace("\n", " ")) for each in quoted), Piece("\n")]
    return out


def chat(contents: Contents) -> Pieces:
    """Messages of two people with names and perhaps times; the facts are in what one of them says."""
    rng = contents.rng
    stamp, clock = rng.choice(("[{t}] {n}: ", "{n} ({t}): ", "{n}: ", "<{n}> ", "{t} - {n}: ")), rng.randint(420, 1200)
    people = [contents.draw("first_name"), contents.draw("first_name")]
    if "person" in contents.kind.settings.get("avoid", ""):
        people = ["A", "B"]
    found, left = sentences(contents, [*contents.leaves, *contents.lists], openings=False)
    for path in left:
        if path in contents.leaves:
            found.append(labeled_sentence(contents, path))
        else:
            form = next(each for each in contents.kind.fields if each.name == path)
            found.append([Piece(contents.label(form) + ": ", None, "label"), *in_a_row(contents, path)])
    turns: list[tuple[int, Pieces]] = [(1, plain(contents.word("chat_start")))]
    for each in found:
        turns.append((0, each))
        if rng.random() < 0.4:
            turns.append((1, plain(contents.word("chat_reply"))))
    out: Pieces = []
    for who, said in turns:
        clock += rng.randint(0, 3)
        text = stamp.replace("{n}", people[who]).replace("{t}", f"{clock // 60:02}:{clock % 60:02}")
        out += [Piece(text, None, "fixed"), *said, Piece("\n")]
    return out


def log(contents: Contents) -> Pieces:
    """Lines of a log: a stamp, a level, then a message or names with values."""
    rng = contents.rng
    levels = rng.choice((("INFO", "WARN", "DEBUG"), ("info", "warning", "notice"), ("[I]", "[W]", "[D]")))
    out: Pieces = []
    paths = order(contents)
    events: list[Pieces] = []
    while paths:
        size = rng.randint(1, 3)
        taken, paths = paths[:size], paths[size:]
        event: Pieces = []
        for path in taken:
            leaf = contents.leaves[path]
            event += [Piece(slug(contents.label(leaf.form)), None, "label"), Piece("=")]
            event += [*contents.pieces(leaf, "setting"), Piece(" ")]
        events.append(event)
    for name in contents.lists:
        form = next(each for each in contents.kind.fields if each.name == name)
        rows, head = contents.lists[name], [Piece(slug(contents.label(form)) + "=", None, "label")]
        if rows and len(rows[0]) > 1:  # an event each; which list it is of needs no word where there is one list
            events += [(head if len(contents.lists) > 1 else []) + item_pieces(contents, name, row) for row in rows]
        else:
            events.append([*head, *in_a_row(contents, name)])
    for _ in range(rng.randint(2, 7)):
        events.insert(rng.randint(0, len(events)), plain(contents.word("log_message")))
    count = rng.randint(100, 9000)
    for event in events:
        count += rng.randint(1, 9)
        out += [Piece(f"{count:06} {rng.choice(levels)} {contents.draw('brand').lower()}: ", None, "fixed")]
        out += [*event, Piece("\n")]
    return out


LAYOUTS: Final[dict[str, Callable[[Contents], Pieces]]] = {
    "lines": lines,
    "table": as_table,
    "markdown": markdown,
    "setting": setting,
    "compact": compact,
    "columns": columns,
    "card": card,
    "prose": prose,
    "email": email,
    "mixed": mixed,
    "thread": thread,
    "amended": amended,
    "chat": chat,
    "log": log,
}
