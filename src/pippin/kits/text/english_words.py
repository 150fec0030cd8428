"""English word lists of the proofreading rules: confused words, agreement, function words.

Notable here:
- the lists hold what people confuse, not what is right: the model decides that in context
- no dictionary: the words of the model's own vocabulary are one (see `pippin.kits.text.lexicon`)
"""

from __future__ import annotations


def _groups(text: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(part.strip() for part in line.split(",")) for line in text.strip().splitlines())


def word_set(text: str) -> frozenset[str]:
    """The words of a text, each once."""
    return frozenset(text.split())


CONFUSIONS = _groups(
    """
    there, their, they're
    your, you're
    its, it's
    whose, who's
    to, too, two
    then, than
    of, have, 've
    affect, effect
    affects, effects
    affected, effected
    accept, except
    advice, advise
    loose, lose
    loosing, losing
    weather, whether
    were, where, we're
    here, hear
    quite, quiet, quit
    brake, break
    peace, piece
    principal, principle
    passed, past
    lead, led
    form, from
    desert, dessert
    compliment, complement
    complimentary, complementary
    stationary, stationery
    everyday, every day
    maybe, may be
    who, whom
    fewer, less
    bare, bear
    buy, by, bye
    know, no, now
    knew, new
    right, write
    threw, through, though, thorough
    thought, taught, though
    wear, where
    which, witch
    whole, hole
    site, sight, cite
    sea, see
    son, sun
    week, weak
    wait, weight
    waist, waste
    plane, plain
    sale, sail
    role, roll
    hour, our, are
    one, won
    meet, meat
    fair, fare
    heard, herd
    higher, hire
    knight, night
    patience, patients
    personal, personnel
    device, devise
    choose, chose
    breath, breathe
    precede, proceed
    ensure, insure
    farther, further
    prey, pray
    trail, trial
    angel, angle
    dairy, diary
    casual, causal
    untied, united
    of, off
    an, and
    some, same
    most, must
    four, for
    than, that
    """
)

AGREEMENT = _groups(
    """
    is, are, am, be
    was, were
    has, have, had
    does, do, did
    a, an
    this, these
    that, those
    doesn't, don't, didn't
    isn't, aren't
    wasn't, weren't
    hasn't, haven't
    go, goes, went, gone
    me, i
    him, he
    her, she
    them, they
    us, we
    much, many
    come, comes, came
    say, says, said
    see, saw, seen, sees
    take, takes, took, taken
    give, gives, gave, given
    know, knows, knew, known
    write, writes, wrote, written
    eat, eats, ate, eaten
    do, done, does, did
    run, runs, ran
    begin, begins, began, begun
    break, breaks, broke, broken
    speak, speaks, spoke, spoken
    drive, drives, drove, driven
    choose, chooses, chose, chosen
    make, makes, made
    get, gets, got
    think, thinks, thought
    buy, buys, bought
    bring, brings, brought
    leave, leaves, left
    tell, tells, told
    find, finds, found
    keep, keeps, kept
    good, well
    """
)

# A word and the apostrophe that is often left out. What is also a word by itself ("were", "its", "ill", "wed") stands
# in CONFUSIONS or nowhere.
CONTRACTIONS = {
    word.replace("'", ""): word
    for word in word_set(
        """
        don't doesn't didn't isn't aren't wasn't weren't hasn't haven't hadn't won't wouldn't can't couldn't
        shouldn't mustn't needn't i'm i've you're you've you'll they're they've they'll we've that's what's
        who's where's there's here's he's she's let's ain't it'll that'll
        """
    )
}

FUNCTION_WORDS = word_set(
    """
    a an the and or but nor so yet if then than that this these those which who whom whose what when where why
    how i you he she it we they me him her us them my your his its our their mine yours hers ours theirs
    myself is are am was were be been being do does did has have had having will would shall should can could
    may might must not no of to in on at by for from with without into onto over under about after before
    between through during against up down out off as because while although though since until unless once
    here there all any both each few more most other some such only own same too very just also ever never
    """
)

# Capitalised wherever they stand. "may", "march" and "august" are words, too.
CAPITALIZED = {
    word.casefold(): word
    for word in word_set(
        """
        Monday Tuesday Wednesday Thursday Friday Saturday Sunday January February April June July September
        October November December English French German Spanish Italian Chinese Japanese Russian Portuguese
        Christmas Easter
        """
    )
}

# Words that may occur twice in a row.
MAY_REPEAT = word_set("had that very so no bye ha yes long many far really blah knock night")
