"""Concepts, styles and the text encoder against what can be computed by hand or by another library."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from pippin.core.errors import CorruptedFile, InvalidArgument, InvalidInput, OfflineError, UnsupportedInputImage
from pippin.core.store import store
from pippin.kits.image import Drawing, Mask, Style, extract, read_details
from pippin.kits.image.concepts import joined, read_image
from pippin.kits.image.styles import choose, finished, styles_of
from pippin.recipes.prompt_encoder import PromptEncoder


@pytest.fixture(scope="module")
def encoder():
    """The real one."""
    try:
        store.pull("all-minilm-l6-v2", show_progress=False)
    except OfflineError as error:
        pytest.skip(f"the encoder is not in the cache: {error}")
    return PromptEncoder.load(device="cpu")


def test_tokens_are_hidden_states_scaled(encoder):
    texts = ["two white squares", "one gray disc and three white diamonds"]
    states, mask = encoder.encode(texts)
    hidden, real = encoder.encoder.hidden(texts)
    assert torch.equal(mask, real)
    # the vectors of sentences, which are tested against another library, are the means of these
    pooled = (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)
    torch.testing.assert_close(pooled, encoder.encoder.embed(texts, normalize=False), atol=1e-5, rtol=0)
    by_hand = (hidden - hidden.mean(-1, keepdim=True)) / hidden.std(-1, keepdim=True, correction=0)
    torch.testing.assert_close(states, by_hand * mask[..., None], atol=1e-3, rtol=0)


def test_a_text_is_encoded_the_same_in_any_company(encoder):
    alone, _ = encoder.encode(["a red kite"])
    both, mask = encoder.encode(["a red kite", "", "a very long description of a small gray harbour"])
    torch.testing.assert_close(both[0, : alone.shape[1]], alone[0], atol=1e-5, rtol=0)
    assert mask.sum(1).tolist()[1] == 0
    assert encoder.condition(["a red kite"]).text.shape == alone.shape
    short = PromptEncoder(encoder.name, encoder.sha256, encoder.encoder, max_tokens=6)
    assert short.encode(["a very long description of a small gray harbour"])[1].sum() == 6


@pytest.mark.parametrize(
    ("texts", "error", "message"),
    [
        ("abc", InvalidArgument, "at least one"),
        ([], InvalidArgument, "at least one"),
        ([3], InvalidInput, "is not a string"),
    ],
)
def test_what_is_no_list_of_texts_is_refused(encoder, texts, error, message):
    with pytest.raises(error, match=message):
        encoder.encode(texts)
    with pytest.raises(InvalidArgument, match="2 to 256 tokens"):
        PromptEncoder.load(max_tokens=1)


def test_phrases_by_meaning_are_those_that_the_text_is_about(encoder):
    text = "On Monday we sailed the old wooden boat. Later there were forms to fill in, and tea."
    assert extract(text, max_concepts=1, encoder=encoder) == ["old wooden boat"]


def test_phrases_by_rule():
    text = "The red kite flew. A red kite, a red kite! Some tea was there."
    assert extract(text, max_concepts=1)[0].lower().startswith("red kite")
    assert extract(text, max_concepts=2, title="tea")[-1] == "tea"
    with pytest.raises(InvalidInput, match="no phrase"):
        extract("the of and")
    with pytest.raises(InvalidArgument, match="max_concepts must be"):
        extract(text, max_concepts=0)
    assert joined(["a", "b"]) == "a and b"


def test_a_stroke_covers_what_its_length_and_width_say():
    size, width = 200, 0.1
    raster = Drawing([[(0.2, 0.3), (0.8, 0.6)]], stroke_width=width).raster((1, size, size))
    length = np.hypot(0.6, 0.3)
    area = length * width + np.pi * (width / 2) ** 2
    assert ((raster + 1) / 2).mean().item() == pytest.approx(area, rel=0.01)
    dot = Drawing([[(0.5, 0.5)]], stroke_width=0.4).raster((1, size, size))
    assert ((dot + 1) / 2).mean().item() == pytest.approx(np.pi * 0.04, rel=0.01)
    for strokes in ([], [[(0.5, 1.2)]]):
        with pytest.raises(InvalidArgument, match="its points lie in 0 to 1"):
            Drawing(strokes)
    with pytest.raises(InvalidArgument, match="stroke_width must be"):
        Drawing([[(0.5, 0.5)]], stroke_width=0)


def test_pictures_of_every_form_are_the_same_picture(tmp_path):
    levels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(levels).save(tmp_path / "a.png")
    tensor = torch.from_numpy(levels.copy()).permute(2, 0, 1)
    sources = [tmp_path / "a.png", str(tmp_path / "a.png"), levels, Image.fromarray(levels), tensor]
    sources.append(tensor.float() / 127.5 - 1)
    found = [read_image(source, (3, 8, 8)) for source in sources]
    assert all(torch.allclose(one, found[0]) for one in found)
    gray = np.asarray(Image.fromarray(levels).convert("L")).astype(float) / 127.5 - 1
    assert np.abs(read_image(levels, (1, 8, 8))[0].numpy() - gray).max() < 1.01 / 127.5
    wide = np.concatenate([levels, levels[:, ::-1]], 1)
    assert torch.allclose(read_image(wide, (3, 8, 8)), read_image(wide[:, 4:12], (3, 8, 8)))
    assert read_image(levels, (3, 16, 16)).shape == (3, 16, 16)
    assert torch.equal(Mask(levels[..., 0] > 127).raster((3, 8, 8))[0], torch.from_numpy(levels[..., 0] > 127))
    (tmp_path / "b.png").write_bytes(b"no picture")
    with pytest.raises(UnsupportedInputImage, match=r"b\.png"):
        read_image(tmp_path / "b.png", (3, 8, 8))
    assert read_details(tmp_path / "a.png") == {}


def test_finishes_are_what_pillow_computes():
    levels = np.random.default_rng(1).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    image, x = Image.fromarray(levels), torch.from_numpy(levels.copy()).permute(2, 0, 1) / 127.5 - 1
    gray = finished(x, Style("gray", finish="gray"))
    assert torch.equal(gray[0], gray[2])
    assert np.abs((gray[0].numpy() + 1) * 127.5 - np.asarray(image.convert("L"))).max() <= 1
    poster = finished(x, Style("poster", finish="poster"))
    assert sorted(set(((poster + 1) * 1.5).round().flatten().tolist())) == [0, 1, 2, 3]
    assert (poster - x).abs().max() <= 1 / 3 + 1e-6
    assert torch.equal(finished(poster, Style("poster", finish="poster")), poster)
    sobel = [
        ImageFilter.Kernel((3, 3), k, 8, 128) for k in ((1, 2, 1, 0, 0, 0, -1, -2, -1), (1, 0, -1, 2, 0, -2, 1, 0, -1))
    ]
    soft = image.convert("L")
    down, right = (np.asarray(soft.filter(k)).astype(float) - 128 for k in sobel)
    edge = np.clip(np.hypot(down, right) / 127.5 * 2, 0, 1)[1:-1, 1:-1]
    mine = (1 - finished(x, Style("sketch", finish="sketch"))[0, 1:-1, 1:-1]) / 2
    assert np.abs(mine.numpy() - edge).max() < 0.04
    flat = finished(torch.full((1, 4, 4), 0.3), Style("sketch", finish="sketch"))
    assert torch.equal(flat, torch.ones(1, 4, 4))
    white = finished(torch.ones(3, 2, 2), Style("sepia", finish="sepia"))
    assert white[:, 0, 0].tolist() == pytest.approx([1.0, 0.68, 0.28])


def test_styles_of_a_model_are_checked():
    styles = styles_of({"styles": {"oil": {"template": "{prompt}, oil on canvas"}}})
    assert choose("oil", styles).apply("a boat") == "a boat, oil on canvas"
    assert choose("oil", styles).apply("") == ""
    with pytest.raises(InvalidArgument, match=r"'oli' is not available; .*did you mean 'oil'"):
        choose("oli", styles)
    for bad in (
        {"oil": {"template": "no place"}},
        {"oil": {"finish": "gold"}},
        {"oil": {"guidance": -1.0}},
        ["oil"],
        {"oil": {"x": 1}},
    ):
        with pytest.raises(CorruptedFile, match="styles that are none"):
            styles_of({"styles": bad})
