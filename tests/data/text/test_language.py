"""The language of a sentence, in each of the ways that it is told."""

import pytest

from pippin.data.text.language import language_of


@pytest.mark.parametrize(
    ("tag", "text"),
    [
        ("en", "The lamp was lit by hand and nobody knew why it was there."),
        ("de", "Die Lampe wurde von Hand angezündet und niemand wusste, warum sie nicht aus war."),
        ("fr", "La lampe était allumée à la main et personne ne savait pourquoi elle est dans le port."),
        ("es", "La lámpara se encendía a mano y nadie sabía por qué no se apagaba en el puerto."),
        ("it", "La lampada era accesa a mano e nessuno sapeva perché non si spegneva con il vento."),
        ("nl", "De lamp werd met de hand aangestoken en niemand wist waarom het niet uit was."),
        ("ru", "Лампу зажигали вручную, и никто не знал почему."),
        ("ja", "ランプは手で灯された。"),
        ("zh", "灯是用手点亮的。"),
        ("el", "Η λάμπα άναβε με το χέρι."),
        (None, "xqz 123"),
        (None, ""),
    ],
)
def test_languages(tag, text):
    assert language_of(text) == tag
