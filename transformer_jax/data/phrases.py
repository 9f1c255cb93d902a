"""The built-in corpus `phrases`: sentences drawn from `grammar`, and their splits.

`grammar` holds the words of both languages and the rules that put them together; here
are the sampler, which decides what is said and how often, the division into train,
valid and test, and `pairs`, by which the other modules read the corpus.
"""

import functools
import random
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from transformer_jax.data.grammar import (
    ADJECTIVES_BY_KIND,
    ADVERBS,
    BECAUSE,
    DITRANSITIVE_VERBS,
    IF,
    INTRANSITIVE_VERBS,
    LIVING,
    NOUNS,
    PERSON,
    PLAIN_VERBS,
    PREPOSITIONS,
    PRONOUNS,
    REPORTING_VERBS,
    SEPARABLE_VERBS,
    THAT,
    UNOWNED,
    VERBS,
    Case,
    Clause,
    Pair,
    Phrase,
    noun_phrase,
    prepositional,
    question,
    statement,
    subordinate,
    subordinate_first,
)
from transformer_jax.errors import DataError

TRAIN_PAIRS, VALID_PAIRS, TEST_PAIRS = 8000, 200, 400
SEED = 2017
WORDS = (3, 14)  # fewest and most on either side of a pair
MIN_SIGHTINGS = 5  # pairs in training with each word of a held-out pair, at the least

T = TypeVar("T")

_NAMES_BY_KIND = {
    kind: [name for name, noun in NOUNS.items() if noun.kind == kind]
    for kind in ADJECTIVES_BY_KIND
}
_PRONOUNS = "I I he she we they"  # as often as they are drawn


class _Sampler:
    """Draws sentences; the state of the random generator decides which."""

    def __init__(self, rng: random.Random):
        self._random = rng.random  # of which Python promises the same numbers for ever
        self._used: set[str] = set()  # nouns of the clause: none occurs twice in it

    def _chance(self, probability: float) -> bool:
        return self._random() < probability

    def _choose(self, choices: Sequence[T]) -> T:
        return choices[int(self._random() * len(choices))]

    def _pick(self, words: str) -> str:
        return self._choose(words.split())

    def noun_phrase(self, kinds: str, case: Case, determiners: str) -> Phrase:
        """A phrase of one of the kinds; "2" among the determiners is any number."""
        kind = self._pick(kinds)
        names = [name for name in _NAMES_BY_KIND[kind] if name not in self._used]
        name = self._choose(names)
        self._used.add(name)
        determiner: str | int = self._pick(determiners)
        plural = determiner != "a" and kind != "drink" and self._chance(0.25)
        if determiner == "my" and name in UNOWNED:
            determiner = "the"
        elif kind == "drink" and determiner not in ("the", "no"):
            determiner = ""
        elif determiner == "2":
            determiner = self._choose(range(2, 100))
        adjective = self._pick(ADJECTIVES_BY_KIND[kind]) if self._chance(0.35) else ""
        return noun_phrase(determiner, NOUNS[name], case, adjective, plural)

    def subject(self, kinds: str, pronouns: str) -> Phrase:
        """The subject of a new clause."""
        self._used.clear()
        if self._chance(0.2):
            return PRONOUNS[self._pick(pronouns)]
        return self.noun_phrase(kinds, "nominative", "the the a my 2")

    def clause(self, shape: str, tenses: str = "present present perfect") -> Clause:
        """A clause for a sentence of the shape, in one of the tenses or modal."""
        groups = (PLAIN_VERBS, PLAIN_VERBS, SEPARABLE_VERBS, INTRANSITIVE_VERBS)
        group = self._choose((*groups, DITRANSITIVE_VERBS))
        verb = self._choose(group)
        person = bool(verb.objects) or verb is VERBS["work"]
        pronouns = "he she they" if shape == "question" else _PRONOUNS
        subject = self.subject(PERSON if person else LIVING, pronouns)
        negation = ""
        if shape != "question" and self._chance(0.25):
            negation = self._pick("not no") if verb.objects else "not"
        # "Not a" would be "kein", and "not two" has two meanings: no such objects.
        objects = []
        if group is DITRANSITIVE_VERBS:
            determiners = "the my" if negation else "the the a my"
            objects.append(self.noun_phrase(PERSON, "dative", determiners))
        if verb.objects:
            determiners = {"": "the the a a my 2", "not": "the my"}.get(negation, "no")
            objects.append(self.noun_phrase(verb.objects, "accusative", determiners))
        adjunct = None
        if verb.prepositions and self._chance(0.2 if verb.objects else 0.8):
            preposition = self._pick(verb.prepositions)
            _, case, kinds = PREPOSITIONS[preposition]
            phrase = self.noun_phrase(kinds, case, "the the a my")
            adjunct = prepositional(preposition, phrase)
        tense = self._pick(tenses if negation else f"{tenses} modal")
        adverb = ""
        if shape != "fronted" and not negation and self._chance(0.35):
            fitting = {"present": " ".join(ADVERBS), "modal": "today now"}
            adverb = self._pick(fitting.get(tense, "today often sometimes never"))
        return Clause(
            subject,
            verb,
            tuple(objects),
            adjunct,
            perfect=tense == "perfect",
            modal=self._pick("want can must") if tense == "modal" else "",
            adverb=adverb,
            negated=negation == "not",
        )

    def sentence(self) -> Pair:
        """A sentence of any construction."""
        shape = self._pick("plain plain fronted question because if that")
        if shape in ("because", "if"):
            # Conditions are hardly ever about what has happened.
            tenses = "present present perfect" if shape == "because" else "present"
            main, clause = self.clause(shape, tenses), self.clause(shape, tenses)
            conjunction = BECAUSE if shape == "because" else IF
            if self._chance(0.5):
                return subordinate_first(conjunction, clause, main)
            return subordinate(main, conjunction, clause)
        clause = self.clause(shape)
        if shape == "fronted":
            adverbs = "today often sometimes" + ("" if clause.perfect else " now")
            return statement(clause, self._pick(adverbs))
        if shape == "question":
            return question(clause)
        if shape == "plain":
            return statement(clause)
        subject = self.subject(PERSON, _PRONOUNS)
        verb = self._choose(REPORTING_VERBS)
        return subordinate(Clause(subject, verb), THAT, clause)


def draw(rng: random.Random) -> Pair:
    """A random pair, of any length; a pair can come again."""
    return _Sampler(rng).sentence()


def _words(pair: Pair) -> set[str]:
    text = " ".join(pair)
    for mark in ".,?":
        text = text.replace(mark, "")
    return set(text.split())


@functools.cache
def _splits() -> dict[str, list[Pair]]:
    rng = random.Random(SEED)
    drawn: list[Pair] = []
    seen: set[str] = set()
    while len(drawn) < TRAIN_PAIRS + VALID_PAIRS + TEST_PAIRS:
        pair = draw(rng)
        lengths = [len(side.split()) for side in pair]
        fits = WORDS[0] <= min(lengths) and max(lengths) <= WORDS[1]
        # Sides are compared apart, so that no sentence of either is in two splits.
        if fits and seen.isdisjoint(pair):
            seen.update(pair)
            drawn.append(pair)
    sightings: Counter[str] = Counter()
    for pair in drawn:
        sightings.update(_words(pair))
    splits: dict[str, list[Pair]] = {"valid": [], "test": [], "train": []}
    for pair in drawn:
        split = "valid" if len(splits["valid"]) < VALID_PAIRS else "test"
        words = _words(pair) if len(splits["test"]) < TEST_PAIRS else None
        if words and all(sightings[word] > MIN_SIGHTINGS for word in words):
            sightings.subtract(words)
            splits[split].append(pair)
        else:
            splits["train"].append(pair)
    return splits


def pairs(split: str) -> list[Pair]:
    """(English, German) pairs of split "train", "valid" or "test".

    They are the same at every call and on every machine. No sentence of either language
    occurs twice, and every word of valid and test occurs in train.
    """
    splits = _splits()
    if split not in splits:
        raise DataError(f"no split {split!r} in phrases: use train, valid or test")
    return list(splits[split])
