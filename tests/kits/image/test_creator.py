"""One suite for every family, then what a request may and may not ask for."""

import asyncio
import socket
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import pippin
from pippin.core.errors import (
    Cancelled,
    ConceptsBlocked,
    CreationFailed,
    CreationNotSupported,
    CreationUnavailable,
    InvalidArgument,
    NonFiniteSample,
    OverMemoryBudget,
    UnsupportedInputImage,
    UnsupportedLanguage,
    UnsupportedModel,
)
from pippin.generate.conditions import ConditioningSpec
from pippin.kits.image import (
    Blocked,
    CreatedImage,
    Drawing,
    ExtractedText,
    ImageCreator,
    ImageRef,
    Label,
    Mask,
    Progress,
    extract,
    read_details,
)
from pippin.session.guardrails import Guardrails

from .conftest import Words, creator, make, stirred

PROMPT = "two white squares"
START = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(3)) * 2 - 1
HALF = torch.zeros(8, 8, dtype=torch.bool)
HALF[:, 4:] = True


def drawn(made, concepts=PROMPT, **settings):
    """The images' numbers."""
    return torch.stack([picture.x for picture in made.images(concepts, **settings)])


# --- every family -----------------------------------------------------------------------------------------------------


def test_picture_i_depends_on_the_seed_plus_i_alone(family_creator):
    four = drawn(family_creator, limit=4, seed=7)
    assert torch.equal(four, drawn(family_creator, limit=4, seed=7))
    assert torch.equal(four[2:3], drawn(family_creator, seed=9))
    assert not torch.equal(four[0], four[1])
    batched = drawn(family_creator, limit=4, seed=7, batch_size=3)
    assert (batched - four).abs().max() <= 2.01 / 255


def test_the_description_is_read(family_creator):
    assert not torch.equal(drawn(family_creator, PROMPT), drawn(family_creator, "one gray disc"))


def test_guidance_of_one_is_the_model_itself(family_creator):
    once = drawn(family_creator, guidance=1.0, seed=2)
    assert torch.equal(once, drawn(family_creator, variety=1.0, seed=2))
    assert not torch.equal(once, drawn(family_creator, guidance=3.0, seed=2))
    if family_creator.backend.family == "composed diffusion":
        return  # a composition of one part is that part over the background: equal up to rounding
    condition = family_creator.plan(PROMPT, guidance=1.0).job.condition
    direct = family_creator.model.sample(condition, 1, seed=2)
    assert (once - direct.clamp(-1, 1)).abs().max() <= 1.01 / 255


def test_strength_goes_from_the_picture_to_nothing_of_it(family_creator):
    def changed(start, strength):
        return drawn(family_creator, [PROMPT, ImageRef(start)], strength=strength, seed=4)

    assert (changed(START, 0.0)[0] - START).abs().max() <= 1.01 / 255
    assert torch.equal(changed(START, 1.0), changed(-START, 1.0))
    assert torch.equal(changed(START, 1.0), drawn(family_creator, seed=4))
    assert not torch.equal(changed(START, 0.5), changed(-START, 0.5))


def test_what_the_mask_leaves_is_kept_to_the_level(family_creator):
    (picture,) = family_creator.edit(START, Mask(HALF), PROMPT, seed=1)
    kept = (picture.x - START).abs()[0]
    assert kept[:, :4].max() <= 1.01 / 255
    assert kept[:, 4:].max() > 0.05
    assert picture.details["task"] == "fill"


def test_progress_rises_to_its_total_and_shows_the_picture(family_creator):
    seen = []
    list(family_creator.images(PROMPT, limit=3, on_progress=seen.append))
    assert [one.done for one in seen] == sorted({one.done for one in seen})
    assert {one.total for one in seen} == {seen[-1].done}
    assert seen[-1].preview().shape == (1, 1, 8, 8)


def test_it_is_cancelled_within_one_step(family_creator):
    stop, steps = threading.Event(), []

    def tell(progress):
        steps.append(progress.done)
        if progress.done == 2:
            stop.set()

    with pytest.raises(Cancelled, match="the drawing was cancelled"):
        list(family_creator.images(PROMPT, limit=2, on_progress=tell, cancel=stop))
    assert steps == [1, 2]


def test_it_never_asks_the_network(family_creator, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    assert len(drawn(family_creator, limit=2)) == 2
    list(family_creator.edit(START, Mask(HALF), PROMPT))


def test_events_and_the_event_loop_give_the_same_pictures(family_creator):
    events = list(family_creator.events(PROMPT, limit=2, seed=3))
    assert {type(event) for event in events} == {Progress, CreatedImage}
    pictures = torch.stack([event.x for event in events if isinstance(event, CreatedImage)])
    assert torch.equal(pictures, drawn(family_creator, limit=2, seed=3))

    async def collect():
        return [picture.x async for picture in family_creator.aimages(PROMPT, limit=2, seed=3)]

    assert torch.equal(torch.stack(asyncio.run(collect())), pictures)


# --- leaving early, and what goes wrong -------------------------------------------------------------------------------


def test_a_loop_that_is_left_ends_its_thread(diffusion_creator):
    events = diffusion_creator.events(PROMPT, limit=64, steps=50)
    next(events)
    events.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "pippin images"]

    async def cancelled():
        async def draw():
            async for _ in diffusion_creator.aimages(PROMPT, limit=64, steps=50):
                pass

        task = asyncio.create_task(draw())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert not [thread for thread in threading.enumerate() if thread.name == "pippin images"]


def test_a_drawing_that_goes_wrong_names_its_step(diffusion_creator, monkeypatch):
    def run(self, job, on_step):
        raise NonFiniteSample("samples are not finite after step 3 of 4", step=3)

    monkeypatch.setattr(type(diffusion_creator.backend), "run", run)
    with pytest.raises(CreationFailed, match="image 0") as caught:
        list(diffusion_creator.images(PROMPT))
    assert caught.value.step == 3


@pytest.mark.parametrize(
    ("concepts", "settings", "error", "message"),
    [
        (PROMPT, {"limit": 0}, InvalidArgument, "limit must be from 1 to 64"),
        (PROMPT, {"style": "poste"}, InvalidArgument, "choose one of plain, .*did you mean 'poster'"),
        (PROMPT, {"size": (12, 12)}, InvalidArgument, r"\(12, 12\) is not reachable: the model draws 8 by 8"),
        (PROMPT, {"seed": -1}, InvalidArgument, "seed must be"),
        (PROMPT, {"variety": 1.5}, InvalidArgument, "variety must be"),
        (PROMPT, {"strategy": "copy"}, InvalidArgument, "strategy must be 'auto', 'resemble' or 'inspire'"),
        (PROMPT, {"styel": "plain"}, InvalidArgument, "'styel' is no setting"),
        ([], {}, InvalidArgument, "at least one concept"),
        ("  ", {}, InvalidArgument, "a description is empty"),
        ([3], {}, InvalidArgument, "int is no concept"),
        ([ImageRef(START), ImageRef(START)], {}, InvalidArgument, "2 images to begin from"),
        ([Label("disc")], {}, CreationNotSupported, "knows no classes"),
        ("Zwei weiße Quadrate und eine Scheibe auf dem Tisch", {}, UnsupportedLanguage, "in 'de'"),
        ([ImageRef("missing.png")], {}, UnsupportedInputImage, "no such file"),
        ([ImageRef(torch.zeros(2, 8, 8))], {}, UnsupportedInputImage, "1, 3 or 4 channels"),
        ([ImageRef(torch.full((1, 8, 8), 3.0))], {}, UnsupportedInputImage, "from -1 to 1"),
        ([ImageRef(object())], {}, UnsupportedInputImage, "object is no image"),
    ],
)
def test_each_bad_request_has_its_own_error_before_any_work(
    diffusion_creator, monkeypatch, concepts, settings, error, message
):
    monkeypatch.setattr(type(diffusion_creator.backend), "run", lambda *a: pytest.fail("work was begun"))
    with pytest.raises(error, match=message):
        diffusion_creator.images(concepts, **settings)


def test_a_guard_blocks_descriptions_and_a_judge_pictures():
    made = creator("diffusion", guard=Guardrails.default(), judge=lambda x: "too dark" if x.shape[-1] == 8 else None)
    with pytest.raises(ConceptsBlocked, match="at home' was blocked") as caught:
        made.images("how to build a pipe bomb at home")
    assert caught.value.category
    with pytest.raises(ConceptsBlocked, match=r"withheld image 0 \(too dark\), 1 \(too dark\)") as caught:
        list(made.images(PROMPT, limit=2))
    assert caught.value.category == "too dark"
    assert [type(event) for event in made.events(PROMPT)][-1] is Blocked

    async def collect():
        return [picture async for picture in made.aimages(PROMPT)]

    with pytest.raises(ConceptsBlocked, match="withheld"):
        asyncio.run(collect())


def test_a_guard_lets_ordinary_things_pass():
    made = creator("diffusion", guard=Guardrails.default())
    for words in ("disc", "one gray disc", "automobile", "ship", "T-shirt/top", "a red kite over hills"):
        assert made.plan(words).details["prompts"] == [words]
    for words in ("porn", "naked children"):
        with pytest.raises(ConceptsBlocked):
            made.plan(words)


def test_what_a_model_cannot_do_is_said():
    made = creator("diffusion", ConditioningSpec())
    assert len(drawn(made, [])) == 1
    with pytest.raises(CreationNotSupported, match="reads no description"):
        made.images(PROMPT)
    with pytest.raises(CreationNotSupported, match="does not animate; it can draw, fill, restyle"):
        made.animate(START)
    with pytest.raises(CreationNotSupported, match=r"guidance=3\.0"):
        made.images([], guidance=3.0)
    with pytest.raises(InvalidArgument, match="only a Diffusion with a condition composes"):
        creator("flow").__class__(make("flow"), compose="null")
    with pytest.raises(InvalidArgument, match="a mask needs the image"):
        creator("diffusion").plan(PROMPT, mask=Mask(HALF))
    with pytest.raises(UnsupportedInputImage, match="marks nothing"):
        creator("diffusion").edit(START, Mask(~HALF & HALF), PROMPT)
    with pytest.raises(UnsupportedModel, match="no backend draws with a Odd"):
        ImageCreator(type("Odd", (), {"metadata": {}, "condition": ConditioningSpec()})())


def test_classes_are_chosen_by_name_number_and_words():
    made = creator("diffusion", ConditioningSpec(num_classes=3, null=True))
    made.model.metadata = {"classes": ["disc", "square", "T-shirt/top"]}
    by_name = drawn(made, [Label("Square")], seed=5)
    assert torch.equal(by_name, drawn(made, [Label(1)], seed=5))
    assert torch.equal(by_name, drawn(made, "an image of two squares", seed=5))
    assert not torch.equal(by_name, drawn(made, [Label("disc")], seed=5))
    with pytest.raises(InvalidArgument, match="no class 'cat'; choose one of disc, square"):
        made.images([Label("cat")])
    with pytest.raises(CreationNotSupported, match="names none of them"):
        made.images("a cat")
    with pytest.raises(CreationNotSupported, match="names disc, square"):
        made.images("a disc and a square")


def test_a_drawing_steers_a_model_of_maps_and_else_begins_it(diffusion_creator):
    strokes = Drawing([[(0.2, 0.2), (0.8, 0.8)]])
    (begun,) = diffusion_creator.images([PROMPT, strokes])
    assert begun.details["strength"] == 0.75
    assert "not steered" in begun.details["notes"][0]
    steered = creator("diffusion", ConditioningSpec(map_channels=1, null=True))
    (picture,) = steered.images(strokes, guidance=1.0)
    assert picture.details["task"] == "draw"
    assert not torch.equal(picture.x, drawn(steered, Drawing([[(0.5, 0.5)]]), guidance=1.0)[0])


def test_compositions_take_each_concept_as_a_part():
    made = creator("composed diffusion")
    apart = made.plan(["one white disc", "one gray square"])
    assert len(apart.job.conditions) == 2
    assert len(creator("diffusion").plan(["one white disc", "one gray square"]).job.conditions) == 1
    alone = drawn(made, ["one white disc"], guidance=1.0, seed=3)
    assert not torch.equal(drawn(made, ["one white disc", "one gray square"], guidance=1.0, seed=3), alone)
    # the composition of one part over the null background is that part
    assert (alone - drawn(creator("diffusion"), "one white disc", guidance=1.0, seed=3)).abs().max() <= 2.01 / 255


def test_extracted_texts_are_shown_before_they_are_drawn(diffusion_creator, monkeypatch):
    text = "The white squares are here. White squares, and a disc."
    found = extract(text)
    monkeypatch.setattr(diffusion_creator._planner, "extract", lambda text, title, max_concepts: found)
    (picture,) = diffusion_creator.images(ExtractedText(text))
    assert picture.details["prompts"] == found


# --- folders, files, styles, sizes ------------------------------------------------------------------------------------


def test_a_folder_is_loaded_with_its_facts_and_pictures_say_what_made_them(tmp_path):
    model = make("diffusion")
    words = Words()
    model.metadata = {
        "styles": {"grid": {"template": "two {prompt}", "guidance": 3.0}},
        "text_encoder": {"name": "words", "sha256": words.sha256},
    }
    model.save(tmp_path / "painter")
    made = ImageCreator.load(tmp_path / "painter", device="cpu", guard=None)
    made._planner._encoder = words
    assert made.available_styles[-1] == "grid"
    (picture,) = made.images("discs", style="grid", seed=11, size=(16, 24)[:1] * 2)
    assert picture.details["prompts"] == ["two discs"]
    assert picture.details["guidance"] == 3.0
    assert picture.x.shape == (1, 16, 16)
    for name in ("a.png", "a.jpg", "a.webp"):
        picture.save(tmp_path / name)
        said = read_details(tmp_path / name)
        assert said["synthetic"] is True
        assert (said["seed"], said["index"], said["model"]) == (11, 0, "painter")
        assert said["model_sha256"] == made.model_hash == folders_hash(tmp_path / "painter")
    assert b"trainedAlgorithmicMedia" in (tmp_path / "a.png").read_bytes()
    with Image.open(tmp_path / "a.png") as file:
        assert np.array_equal(np.asarray(file), picture.levels[0].numpy())


def folders_hash(folder):
    """As any other tool computes it."""
    import hashlib

    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_what_is_missing_is_said_before_anything_is_loaded(tmp_path, monkeypatch):
    with pytest.raises(CreationUnavailable, match="is not there") as caught:
        ImageCreator.load(tmp_path / "nowhere")
    assert caught.value.reason == "weights missing"
    with pytest.raises(CreationUnavailable, match="holds no weights"):
        ImageCreator.load(tmp_path)
    model = make("diffusion")
    model.metadata = {"text_encoder": {"name": "all-minilm-l6-v2", "sha256": "another"}}
    model.save(tmp_path / "painter")
    with pytest.raises(OverMemoryBudget, match=r"of weights, the budget is 1\.0 kB") as over:
        ImageCreator.load(tmp_path / "painter", memory_budget=1000)
    assert over.value.budget == 1000 < over.value.estimate
    made = ImageCreator.load(tmp_path / "painter", guard=None)
    monkeypatch.setenv("PIPPIN_HOME", str(tmp_path / "empty"))
    with pytest.raises(CreationUnavailable, match="pippin pull all-minilm-l6-v2") as caught:
        made.images(PROMPT)
    assert caught.value.reason == "text encoder missing"
    monkeypatch.setattr("pippin.kits.image.planner.PromptEncoder.load", lambda *a, **k: Words())
    with pytest.raises(CreationUnavailable, match="other weights") as caught:
        made.images(PROMPT)
    assert caught.value.reason == "text encoder differs"


def test_a_clip_begins_with_its_picture(tmp_path):
    from pippin.generate.flows.starflow.config import StarFlowConfig
    from pippin.generate.flows.starflow.model import StarFlow

    config = StarFlowConfig(
        (3, 1, 8, 8), hidden_size=16, num_attention_heads=2, layers_per_block=(1, 1), noise_std=0.01, score=None
    )
    made = ImageCreator(stirred(StarFlow(config).initialize(0)))
    assert made.capabilities.frames == 3
    (clip,) = made.animate(START)
    assert clip.x.shape == (3, 1, 8, 8)
    assert (clip.x[0] - START).abs().max() < 0.1
    clip.save(tmp_path / "a.gif")
    with Image.open(tmp_path / "a.gif") as file:
        assert file.n_frames == 3
    assert '"synthetic": true' in (tmp_path / "a.json").read_text()
    with pytest.raises(CreationNotSupported, match="does not restyle"):
        made.images(ImageRef(START))


def test_variety_and_strategy_are_guidance_and_strength(diffusion_creator):
    plan = diffusion_creator.plan
    assert [plan(PROMPT, variety=value).job.guidance for value in (0.0, 0.5, 1.0)] == [3.0, 2.0, 1.0]
    strengths = [
        plan([PROMPT, ImageRef(START)], strategy=name).job.strength for name in ("resemble", "auto", "inspire")
    ]
    assert strengths == sorted(strengths)
    assert [plan(PROMPT, quality=name).job.steps for name in ("draft", "normal", "best")] == [2, 4, 8]


def test_the_face_has_it():
    assert pippin.ImageCreator is ImageCreator
    assert replace(Drawing([[(0, 0)]]), stroke_width=0.5).stroke_width == 0.5
