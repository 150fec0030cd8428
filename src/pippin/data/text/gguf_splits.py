"""Splitting rules of byte-level vocabularies by the names that GGUF files have for them (`tokenizer.ggml.pre`).

Notable here:
- a name stands for the rules of a model's own tokenizer.json; relatives share them
- rules that are written as code instead of as regular expressions are expressions here, by look-ahead
- the first name of equal rules is the one that an exported file gets

Source: llama.cpp's llama-vocab.cpp for the names; the rules are those of the models' own tokenizer.json.
"""

from __future__ import annotations

from typing import Final

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"


def _words(digits: str, symbols: str = _SYMBOLS + r"[\r\n]*", spaces: str = _SPACES, first: str = _CONTRACTIONS) -> str:
    """Words with the character before them, and parts of the rule in which families differ."""
    return "|".join(part for part in (first, r"[^\r\n\p{L}\p{N}]?\p{L}+", digits, symbols, spaces) if part)


_LLAMA3, _QWEN2 = _words(r"\p{N}{1,3}"), _words(r"\p{N}")
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{0}}"
_CASED_END = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_CONTRACTED = _CASED.replace("{0}", _CONTRACTIONS + "?")
_GPT4O = _CONTRACTED + r"|\p{N}{1,3}" + _CASED_END
_TEKKEN = _CASED.replace("{0}", "") + r"|\p{N}" + _CASED_END
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI = (
    r"\p{Han}+|"
    + _CONTRACTED.replace(_UPPER, _UPPER[:-1] + _NOT_HAN).replace(_LOWER, _LOWER[:-1] + _NOT_HAN)
    + rf"|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n]*|{_SPACES}"
)
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
_CJK = r"[一-龥぀-ゟ゠-ヿ]+"
_ASIAN = r"[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"
_DEEPSEEK3_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+"
)
_DEEPSEEK3 = rf"{_DEEPSEEK3_WORDS}[\r\n]*|{_SPACES}"
_OLD_CJK = r"[一-龥ࠀ-一가-퟿]+"
_THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # from the right, so that the first group may be shorter
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_RUNS_OF_SPACES = "|".join(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s"

_RULES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("default",): (_PUNCTUATION, _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ("gpt-2", "mpt", "olmo"): (_GPT2,),
    ("smollm", "starcoder", "refact", "command-r"): (r"\p{N}", _GPT2),
    ("falcon",): (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "falcon-h1", "midm-2.0", "jina-v5-nano"): (
        _LLAMA3,
    ),
    ("qwen2", "deepseek-r1-qwen"): (_QWEN2,),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "granite-embed-multi-97m"): (_GPT4O,),
    ("tekken",): (_TEKKEN,),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): (r"\p{N}{1,3}", _CJK, _DEEPSEEK3),
    (
        *("phi-2", "gigachat", "a.x-4.0", "mellum", "modern-bert", "exaone4", "jais", "trillion", "granite-docling"),
        *("jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en", "jina-v2-code", "roberta-bpe"),
    ): (_GPT2,),
    ("codeshell", "exaone", "minerva-7b", "mellum2"): (r"\p{N}", _GPT2),
    ("kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"): (_QWEN2,),
    ("qwen35",): (_QWEN35,),
    ("glm4", "chatglm-bpe", "dbrx", "smaug-bpe"): (_LLAMA3,),
    ("minicpm5",): (r"\p{N}{1,3}", _words(r"\p{N}+")),
    ("jais-2",): (_words(r"\p{N}{1,3}", spaces=rf"\s*[\r\n]+|{_RUNS_OF_SPACES}"),),
    ("ufakzeka",): (_words(r"\p{N}", first=""),),
    ("seed-coder",): (_words(r"\p{N}", symbols=r" ?[^\s\p{L}\p{N}\r\n]+"),),
    ("bailingmoe", "bailingmoe2", "llada-moe"): (
        _words(r"\p{N}", spaces=r"\s*[\r\n]|\s+(?!\S)|\s+", first=r"'(?i:[sdmt]|ll|ve|re)"),
    ),
    ("exaone-moe",): (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        rf"|{_SYMBOLS}[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    ("laguna",): (r"[^\n]+|[\n]+", _QWEN2),
    ("tiny_aya", "cohere2moe"): (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O),
    ("kimi-k2",): (_KIMI,),
    ("superbpe",): (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    ("afmoe",): (_THREES, _ASIAN, _DEEPSEEK3),
    ("spark2_5",): (r"\p{N}{1,3}", _CJK, rf"{_DEEPSEEK3_WORDS}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"),
    ("youtu",): (
        r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
        _CONTRACTED + r"|\p{N}" + _CASED_END,
    ),
    ("deepseek-llm",): (
        *(r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _OLD_CJK, r"\p{N}+"),
    ),
    ("deepseek-coder",): (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _OLD_CJK, r"\p{N}"),
    ("bloom", "poro-chat", "gpt3-finnish"): (_BLOOM,),
    ("viking",): (_BLOOM, r"\p{N}"),
    ("chameleon",): (
        *(r"<sentinel:[0-9]+>", r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", r"\p{N}"),
        *(r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
    ),
}

SPLITS: Final[dict[str, tuple[str, ...]]] = {name: rules for names, rules in _RULES.items() for name in names}
"""The rules of a name, applied in order, each within the pieces of the one before."""
_BEGUN_WHOLE = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken"}
_BEGUN_WHOLE |= {"falcon-h1", "midm-2.0", "jina-v5-nano"}
WHOLE_WORDS: Final = frozenset({*_BEGUN_WHOLE, "minicpm5", "youtu", "granite-embed-multi-97m"})
"""Here a word that is in the vocabulary is one token, whatever the merges are."""
BEGUN: Final = frozenset({*_BEGUN_WHOLE, "chameleon"})
"""Here a prompt begins with the begin token, where the file does not say."""
UNSPLIT: Final = frozenset({"gemma4", "granite-embed-multi-311m", "sarvam-moe"})
"""Here text is merged as a whole, in characters instead of bytes; spaces are written as SentencePiece writes them."""
COMPOSED: Final = frozenset({"qwen2", "deepseek-r1-qwen", "qwen35"})
"""Here text is normalized to NFC."""
