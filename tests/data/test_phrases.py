"""The built-in corpus: its splits, and its German against independent tables."""

import random
import re
from collections import Counter

import pytest

from transformer_jax.data import phrases
from transformer_jax.data.grammar import ADJECTIVES, Pair
from transformer_jax.errors import DataError

SPLITS = ("train", "valid", "test")


def test_sizes():
    assert [len(phrases.pairs(split)) for split in SPLITS] == [8000, 200, 400]


def test_another_split_is_refused():
    with pytest.raises(DataError, match="dev"):
        phrases.pairs("dev")


def test_pairs_are_the_same_each_time_and_cannot_be_spoilt():
    before = phrases.pairs("test")
    phrases.pairs("test").clear()
    phrases._splits.cache_clear()
    assert phrases.pairs("test") == before


def test_no_sentence_of_either_side_occurs_twice():
    everything = [pair for split in SPLITS for pair in phrases.pairs(split)]
    for side in zip(*everything, strict=True):
        assert len(set(side)) == len(side) == 8600


def test_sentences_have_3_to_14_words():
    for split in SPLITS:
        for pair in phrases.pairs(split):
            assert all(3 <= len(side.split()) <= 14 for side in pair), pair


def test_words_of_valid_and_test_occur_in_train():
    def words(pair: Pair) -> set[str]:
        return set(re.findall(r"[\w-]+", " ".join(pair)))

    trained = Counter(word for pair in phrases.pairs("train") for word in words(pair))
    for pair in phrases.pairs("valid") + phrases.pairs("test"):
        assert all(trained[word] >= 5 for word in words(pair)), pair


def test_held_out_sentences_are_like_those_of_train():
    def mean_length(split: str) -> float:
        pairs = phrases.pairs(split)
        return sum(len(english.split()) for english, _ in pairs) / len(pairs)

    assert mean_length("test") == pytest.approx(mean_length("train"), abs=0.5)
    for word in ("weil", "wenn", "dass"):
        assert any(f" {word} " in german for _, german in phrases.pairs("test"))
    assert any(german.endswith("?") for _, german in phrases.pairs("test"))


def test_german_is_a_function_of_english_and_the_reverse():
    rng = random.Random(1)
    to_german: dict[str, str] = {}
    to_english: dict[str, str] = {}
    for _ in range(5000):
        english, german = phrases.draw(rng)
        assert to_german.setdefault(english, german) == german
        assert to_english.setdefault(german, english) == english


def test_sentences_are_written_as_people_write_them():
    for english, german in phrases.pairs("train"):
        for side in (english, german):
            assert re.fullmatch(r"[A-ZÄÖÜ][\w-]*(,? [\w-]+)*[.?]", side), side
        assert english[-1] == german[-1]


# Nouns whose form below is only singular, so that their articles tell the gender.
GENDERS = {
    **dict.fromkeys("Mann Freund Hund Garten Wald Bahnhof Brief Tisch".split(), "m"),
    **dict.fromkeys("Mantel Apfel Tee".split(), "m"),
    **dict.fromkeys("Frau Mutter Schwester Katze Schule Kirche Zeitung".split(), "f"),
    **dict.fromkeys("Lampe Tasche Tür Birne Milch".split(), "f"),
    **dict.fromkeys("Kind Pferd Haus Buch Bett Hemd Ei Wasser".split(), "n"),
}
ARTICLES = {  # nominative, accusative, dative
    "m": {"nominative": "der ein", "accusative": "den einen", "dative": "dem einem"},
    "f": {"nominative": "die eine", "accusative": "die eine", "dative": "der einer"},
    "n": {"nominative": "das ein", "accusative": "das ein", "dative": "dem einem"},
}
CASES_AFTER = {
    **dict.fromkeys(["mit", "aus", "in", "zu"], "dative"),
    **dict.fromkeys(["für", "ohne"], "accusative"),
    **dict.fromkeys(["weil", "dass", "wenn"], "nominative"),
}
ADJECTIVE_ENDINGS = {  # by article, and by gender where two nouns share it
    **{"den": "en", "dem": "en", "einen": "en", "einem": "en", "einer": "en"},
    **{"der m": "e", "der f": "en", "das": "e", "die": "e", "eine": "e"},
    **{"ein m": "er", "ein n": "es"},
}
NOUN_PHRASE = re.compile(
    r"(?:(\w+) )?\b([Dd](?:er|ie|as|en|em)|(?:[Ee]|[km]|[KM])ein(?:e[nmr]?)?) "
    r"(?:([a-zäöüß]+) )?([A-ZÄÖÜ]\w+)"
)


def test_articles_and_adjectives_agree_with_a_table_of_genders():
    checked = 0
    for split in SPLITS:
        for _, german in phrases.pairs(split):
            for match in NOUN_PHRASE.finditer(german):
                before, article, adjective, noun = match.groups()
                if noun not in GENDERS:
                    continue
                gender = GENDERS[noun]
                article = re.sub("^[km]", "", article.lower())
                if match.start() == 0 and before is None:
                    cases = ["nominative"]
                else:
                    case = CASES_AFTER.get(before)
                    cases = [case] if case else ["nominative", "accusative", "dative"]
                allowed = " ".join(ARTICLES[gender][case] for case in cases).split()
                assert article in allowed, german
                if adjective:
                    endings = ADJECTIVE_ENDINGS
                    ending = endings.get(article) or endings[f"{article} {gender}"]
                    stem = adjective.removesuffix(ending)
                    assert stem in ADJECTIVES.values(), german
                checked += 1
    assert checked > 5000


def test_the_verb_of_a_subordinate_clause_is_last():
    finite = re.compile(
        r"\w*(kauf|verkauf|seh|sieh|find|les|lies|ess|iss|trink|trag|träg|geb|gib|zeig|"
        r"mach|lad|läd|ruf|hol|schlaf|schläf|arbeit|spiel|bleib|komm)(e|en|t|et|st)|"
        r"hat|habe|haben|ist|bin|sind|will|wollen|kann|können|muss|müssen|isst|liest"
    )
    clauses = [
        match.group(1)
        for _, german in phrases.pairs("train")
        for match in re.finditer(r"(?:weil|dass|wenn|Weil|Wenn) ([^,.]+)[,.]", german)
    ]
    assert len(clauses) > 2000
    for subordinate_clause in clauses:
        assert finite.fullmatch(subordinate_clause.split()[-1]), subordinate_clause
