"""A small synchronous grammar of English and German: lexicon, tables, constructions.

Each construction builds both sides from one meaning, so the German sentence is a
function of the English one. It has what a phrase table lacks: gender and case
agreement, a verb that is second, last or split in two, and compound number words.

In this order: the lexicon (nouns, adjectives, prepositions, verbs, number words), the
tables of endings, phrases, the clause in each language, and the sentences made of
clauses. Nothing is random here: `phrases` draws the sentences of the corpus.
"""

import dataclasses
from typing import Literal

Pair = tuple[str, str]  # the same in English and in German
Case = Literal["nominative", "accusative", "dative"]
Form = Literal["first", "third", "plural"]  # what a finite verb agrees with

# Lexicon. An English word has one German counterpart; a kind of noun decides which
# verbs, adjectives and prepositions it goes with.


@dataclasses.dataclass(frozen=True)
class Noun:
    """A noun; its gender is a fact of the German word, which has to be learned."""

    kind: str
    english: str
    english_plural: str
    german: str
    german_plural: str
    gender: str  # m, f or n


_NOUNS_BY_KIND = {
    "adult": "man men Mann Männer m, teacher teachers Lehrer Lehrer m, friend friends "
    "Freund Freunde m, woman women Frau Frauen f, mother mothers Mutter Mütter f, "
    "sister sisters Schwester Schwestern f",
    "youth": "boy boys Junge Jungen m, child children Kind Kinder n, "
    "girl girls Mädchen Mädchen n",
    "animal": "dog dogs Hund Hunde m, cat cats Katze Katzen f, "
    "horse horses Pferd Pferde n",
    "place": "garden gardens Garten Gärten m, forest forests Wald Wälder m, station "
    "stations Bahnhof Bahnhöfe m, school schools Schule Schulen f, church churches "
    "Kirche Kirchen f, house houses Haus Häuser n",
    "text": "letter letters Brief Briefe m, newspaper newspapers Zeitung Zeitungen f, "
    "book books Buch Bücher n",
    "furniture": "table tables Tisch Tische m, lamp lamps Lampe Lampen f, "
    "bed beds Bett Betten n",
    "ware": "coat coats Mantel Mäntel m, bag bags Tasche Taschen f, "
    "shirt shirts Hemd Hemden n",
    "opening": "door doors Tür Türen f, window windows Fenster Fenster n",
    "food": "apple apples Apfel Äpfel m, pear pears Birne Birnen f, egg eggs Ei Eier n",
    "drink": "tea - Tee - m, milk - Milch - f, water - Wasser - n",  # not counted
}
NOUNS = {
    row.split()[0]: Noun(kind, *row.split())
    for kind, rows in _NOUNS_BY_KIND.items()
    for row in rows.split(", ")
}
# "Meine Frau" is "my wife", and nobody owns a forest: no "my" before these.
UNOWNED = set("man woman boy girl station forest church tea milk water".split())

_ADJECTIVE_ROWS = (  # the German stem: "müde" alone, but "müd" before an ending
    "old alt, new neu, young jung, big groß, small klein, good gut, tired müd, "
    "friendly freundlich, beautiful schön, cheap billig, black schwarz, red rot, "
    "green grün, cold kalt, hot heiß"
)
ADJECTIVES: dict[str, str] = {
    row.split()[0]: row.split()[1] for row in _ADJECTIVE_ROWS.split(", ")
}
ADJECTIVES_BY_KIND = {
    "adult": "old young friendly tired",
    "youth": "small friendly tired",
    "animal": "old young big small friendly tired black beautiful",
    "place": "old new big small beautiful",
    "text": "old new good cheap",
    "furniture": "old new big small black red green cheap beautiful",
    "ware": "old new black red green cheap beautiful",
    "opening": "old new big small black red green",
    "food": "big small good cheap",
    "drink": "cold hot good",
}
PERSON, LIVING = "adult youth", "adult youth animal"

PREPOSITIONS: dict[str, tuple[str, Case, str]] = {  # German, case, kinds of noun
    "for": ("für", "accusative", PERSON),
    "without": ("ohne", "accusative", LIVING),
    "with": ("mit", "dative", LIVING),
    "from": ("aus", "dative", "place"),
    "in": ("in", "dative", "place"),
    "to": ("zu", "dative", "place"),
}
_CONTRACTIONS = {"in dem": "im", "zu dem": "zum", "zu der": "zur"}


@dataclasses.dataclass(frozen=True)
class Verb:
    """A verb's principal parts, as dictionaries give them, and what it takes."""

    english: str  # infinitive, third person, participle
    german: str  # the same; "auf|" is a separable prefix, "ist" the perfect's auxiliary
    objects: str = ""  # kinds of noun
    prepositions: str = ""


_GOODS = "text furniture ware food drink"
_SEEN = "adult youth animal place text furniture ware opening"
PLAIN_VERBS = (
    Verb("buy, buys, bought", "kaufen kauft gekauft", _GOODS, "for"),
    Verb("sell, sells, sold", "verkaufen verkauft verkauft", _GOODS),
    Verb("see, sees, seen", "sehen sieht gesehen", _SEEN),
    Verb("find, finds, found", "finden findet gefunden", _SEEN),
    Verb("read, reads, read", "lesen liest gelesen", "text"),
    Verb("eat, eats, eaten", "essen isst gegessen", "food"),
    Verb("drink, drinks, drunk", "trinken trinkt getrunken", "drink"),
    Verb("carry, carries, carried", "tragen trägt getragen", "furniture ware", "for"),
)
DITRANSITIVE_VERBS = (
    Verb("give, gives, given", "geben gibt gegeben", _GOODS),
    Verb("show, shows, shown", "zeigen zeigt gezeigt", "animal place text ware"),
)
SEPARABLE_VERBS = (
    Verb("open, opens, opened", "auf|machen macht aufgemacht", "opening", "for"),
    Verb("close, closes, closed", "zu|machen macht zugemacht", "opening"),
    Verb("invite, invites, invited", "ein|laden lädt eingeladen", PERSON),
    Verb("call, calls, called", "an|rufen ruft angerufen", PERSON),
    Verb("pick up, picks up, picked up", "ab|holen holt abgeholt", PERSON),
)
INTRANSITIVE_VERBS = (
    Verb("sleep, sleeps, slept", "schlafen schläft geschlafen", "", "in"),
    Verb("work, works, worked", "arbeiten arbeitet gearbeitet", "", "in with for"),
    Verb("play, plays, played", "spielen spielt gespielt", "", "in with without"),
    Verb("stay, stays, stayed", "bleiben bleibt ist geblieben", "", "in"),
    Verb("come, comes, come", "kommen kommt ist gekommen", "", "from to with without"),
    Verb("arrive, arrives, arrived", "an|kommen kommt ist angekommen", "", "with"),
)
REPORTING_VERBS = (  # before a clause with "that"
    Verb("say, says, said", "sagen sagt gesagt"),
    Verb("know, knows, known", "wissen weiß gewusst"),
)
_OBJECT_VERBS = (*PLAIN_VERBS, *DITRANSITIVE_VERBS, *SEPARABLE_VERBS)
VERBS = {
    verb.english.split(", ")[0]: verb
    for verb in (*_OBJECT_VERBS, *INTRANSITIVE_VERBS, *REPORTING_VERBS)
}
_HAVE: dict[Form, str] = {"first": "habe", "third": "hat", "plural": "haben"}
_BE: dict[Form, str] = {"first": "bin", "third": "ist", "plural": "sind"}
MODALS = {  # English infinitive and third person, German singular and plural
    "want": ("want to", "wants to", "will", "wollen"),
    "can": ("can", "can", "kann", "können"),
    "must": ("must", "must", "muss", "müssen"),
}
ADVERBS: dict[str, str] = dict(
    today="heute",
    now="jetzt",
    often="oft",
    sometimes="manchmal",
    always="immer",
    never="nie",
)
_LATE_ADVERBS = ("today", "now")  # end an English clause; the others precede the verb
BECAUSE, IF, THAT = ("because", "weil"), ("if", "wenn"), ("that", "dass")

_ONES = (  # from 1 to 19
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen".split(),
    "ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn "
    "fünfzehn sechzehn siebzehn achtzehn neunzehn".split(),
)
_TENS = (  # from 20 to 90
    "twenty thirty forty fifty sixty seventy eighty ninety".split(),
    "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split(),
)


def number_words(number: int) -> Pair:
    """The English and the German word of a number from 2 to 99."""
    if not 2 <= number <= 99:
        raise ValueError(f"number is {number}; number words go from 2 to 99")
    if number < 20:
        return _ONES[0][number - 1], _ONES[1][number - 1]
    tens, ones = divmod(number, 10)
    english, german = _TENS[0][tens - 2], _TENS[1][tens - 2]
    if ones:
        english += f"-{_ONES[0][ones - 1]}"
        german = f"{_ONES[1][ones - 1]}und{german}"
    return english, german


def _table(nominative: str, accusative: str, dative: str) -> dict[Case, list[str]]:
    """A table whose rows are masculine, feminine, neuter, plural; "-" is no ending."""
    return {
        "nominative": nominative.replace("-", "").split(" "),
        "accusative": accusative.replace("-", "").split(" "),
        "dative": dative.replace("-", "").split(" "),
    }


_DEFINITE = _table("der die das die", "den die das die", "dem der dem den")
_EIN = _table("- e - e", "en e - e", "em er em en")
_EIN_WORDS = {"a": "ein", "no": "kein", "my": "mein"}
# Of adjectives: weak after the definite article, mixed after ein words, else strong.
_WEAK = _table("e e e en", "en e e en", "en en en en")
_MIXED = _table("er e es en", "en e es en", "en en en en")
_STRONG = _table("er e es e", "en e es e", "em er em en")


@dataclasses.dataclass(frozen=True)
class Phrase:
    """A piece of a sentence in both languages."""

    english: str
    german: str
    form: Form = "third"


PRONOUNS = {
    "I": Phrase("I", "ich", "first"),
    "he": Phrase("he", "er"),
    "she": Phrase("she", "sie"),  # the verb tells it from "they"
    "we": Phrase("we", "wir", "plural"),
    "they": Phrase("they", "sie", "plural"),
}


def _join(*words: str) -> str:
    return " ".join(filter(None, words))


def noun_phrase(
    determiner: str | int,
    noun: Noun,
    case: Case = "nominative",
    adjective: str = "",
    plural: bool = False,
) -> Phrase:
    """A noun phrase; its determiner is the, a, my, no, "" (none) or a number.

    The adjective is an English one, or "". A number makes the phrase plural.
    """
    plural = plural or isinstance(determiner, int)
    column = 3 if plural else "mfn".index(noun.gender)
    if isinstance(determiner, int):
        (english, german), endings = number_words(determiner), _STRONG
    elif determiner == "the":
        english, german, endings = "the", _DEFINITE[case][column], _WEAK
    elif determiner:
        english, endings = determiner, _MIXED
        german = _EIN_WORDS[determiner] + _EIN[case][column]
    else:
        english, german, endings = "", "", _STRONG
    english_noun = noun.english_plural if plural else noun.english
    german_noun = noun.german_plural if plural else noun.german
    if english == "a" and (adjective or english_noun)[0] in "aeiou":
        english = "an"
    # Dative plurals end in n, and Junge is declined like an adjective's weak form.
    weak = noun.german == "Junge" and case != "nominative"
    if (case == "dative" if plural else weak) and german_noun[-1] != "n":
        german_noun += "n"
    german_adjective = (
        ADJECTIVES[adjective] + endings[case][column] if adjective else ""
    )
    return Phrase(
        _join(english, adjective, english_noun),
        _join(german, german_adjective, german_noun),
        "plural" if plural else "third",
    )


def prepositional(preposition: str, phrase: Phrase) -> Phrase:
    """The phrase, already in the case that the preposition governs, after it."""
    article, rest = phrase.german.split(" ", 1)
    start = f"{PREPOSITIONS[preposition][0]} {article}"
    german = f"{_CONTRACTIONS.get(start, start)} {rest}"
    return Phrase(f"{preposition} {phrase.english}", german)


@dataclasses.dataclass(frozen=True)
class Clause:
    """The parts of a clause, which each language puts in its own order."""

    subject: Phrase
    verb: Verb
    objects: tuple[Phrase, ...] = ()  # the indirect before the direct
    adjunct: Phrase | None = None  # with a preposition
    perfect: bool = False
    modal: str = ""  # of MODALS
    adverb: str = ""  # of ADVERBS
    negated: bool = False  # by "not"; "no" is a determiner


def _english(clause: Clause, question: bool = False) -> str:
    base, third_person, participle = clause.verb.english.split(", ")
    third = clause.subject.form == "third"
    auxiliary, main = "does" if third else "do", base
    if clause.modal == "want" and question:
        main = f"want to {base}"
    elif clause.modal:
        auxiliary = MODALS[clause.modal][1 if third else 0]
    elif clause.perfect:
        auxiliary, main = "has" if third else "have", participle
    elif not question and not clause.negated:
        auxiliary, main = "", third_person if third else base
    subject = clause.subject.english
    late = clause.adverb in _LATE_ADVERBS
    return _join(
        *((auxiliary, subject) if question else (subject, auxiliary)),
        *("not" if clause.negated else "", "" if late else clause.adverb, main),
        *(phrase.english for phrase in clause.objects),
        clause.adjunct.english if clause.adjunct else "",
        clause.adverb if late else "",
    )


def _german(clause: Clause) -> tuple[str, str, str]:
    """The finite verb, the words between it and the end, and what ends the clause."""
    infinitive, finite, *auxiliary, participle = clause.verb.german.split()
    last, infinitive = infinitive.rpartition("|")[::2]
    form = clause.subject.form
    if clause.modal:
        finite = MODALS[clause.modal][3 if form == "plural" else 2]
        last += infinitive
    elif clause.perfect:
        finite, last = (_BE if auxiliary else _HAVE)[form], participle
    elif form == "plural":
        finite = infinitive
    elif form == "first" and infinitive != "wissen":  # ich weiß, er weiß
        finite = infinitive[:-1]
    middle = _join(
        ADVERBS[clause.adverb] if clause.adverb else "",
        *(phrase.german for phrase in clause.objects),
        "nicht" if clause.negated else "",
        clause.adjunct.german if clause.adjunct else "",
    )
    return finite, middle, last


def _inverted(clause: Clause, first: str = "") -> str:
    """The subject after the finite verb: in questions, or if another part is first."""
    finite, middle, last = _german(clause)
    return _join(first, finite, clause.subject.german, middle, last)


def _verb_second(clause: Clause) -> str:
    return _join(clause.subject.german, *_german(clause))


def _verb_last(clause: Clause) -> str:
    """Subordinate: the finite verb ends the clause, joined to a separable prefix."""
    finite, middle, last = _german(clause)
    if clause.modal or clause.perfect:
        last += " "
    return _join(clause.subject.german, middle, last + finite)


def _sentence(english: str, german: str, mark: str = ".") -> Pair:
    return (
        english[0].upper() + english[1:] + mark,
        german[0].upper() + german[1:] + mark,
    )


def statement(clause: Clause, fronted: str = "") -> Pair:
    """A main clause, perhaps with an adverb before it."""
    if not fronted:
        return _sentence(_english(clause), _verb_second(clause))
    english = f"{fronted} {_english(clause)}"
    return _sentence(english, _inverted(clause, ADVERBS[fronted]))


def question(clause: Clause) -> Pair:
    """A yes/no question."""
    return _sentence(_english(clause, question=True), _inverted(clause), "?")


def subordinate(main: Clause, conjunction: Pair, clause: Clause) -> Pair:
    """A main clause and then a subordinate one."""
    return _sentence(
        f"{_english(main)} {conjunction[0]} {_english(clause)}",
        f"{_verb_second(main)}, {conjunction[1]} {_verb_last(clause)}",
    )


def subordinate_first(conjunction: Pair, clause: Clause, main: Clause) -> Pair:
    """A subordinate clause and then the main one, whose German verb comes first."""
    return _sentence(
        f"{conjunction[0]} {_english(clause)}, {_english(main)}",
        _inverted(main, f"{conjunction[1]} {_verb_last(clause)},"),
    )
