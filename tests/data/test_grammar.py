"""The grammar, checked against English and German written by hand."""

import pytest

from transformer_jax.data.grammar import (
    BECAUSE,
    IF,
    NOUNS,
    PREPOSITIONS,
    PRONOUNS,
    THAT,
    VERBS,
    Clause,
    Pair,
    Phrase,
    noun_phrase,
    number_words,
    prepositional,
    question,
    statement,
    subordinate,
    subordinate_first,
)


def subject(determiner: str | int, noun: str, adjective="", plural=False) -> Phrase:
    return noun_phrase(determiner, NOUNS[noun], "nominative", adjective, plural)


def direct(determiner: str | int, noun: str, adjective="", plural=False) -> Phrase:
    return noun_phrase(determiner, NOUNS[noun], "accusative", adjective, plural)


def indirect(determiner: str | int, noun: str, adjective="", plural=False) -> Phrase:
    return noun_phrase(determiner, NOUNS[noun], "dative", adjective, plural)


def adjunct(
    preposition: str, determiner: str, noun: str, adjective="", plural=False
) -> Phrase:
    case = PREPOSITIONS[preposition][1]
    phrase = noun_phrase(determiner, NOUNS[noun], case, adjective, plural)
    return prepositional(preposition, phrase)


def clause(subject: Phrase, verb: str, *objects: Phrase, **parts) -> Clause:
    return Clause(subject, VERBS[verb], objects, **parts)


# English and German written by hand, before the grammar that has to arrive at them.
SENTENCES: list[tuple[Pair, str, str]] = [
    (
        statement(
            clause(subject("the", "man", "old"), "buy", direct("a", "bag", "red"))
        ),
        "The old man buys a red bag.",
        "Der alte Mann kauft eine rote Tasche.",
    ),
    (
        statement(
            clause(subject("a", "woman", "old"), "sell", direct("the", "coat", "red"))
        ),
        "An old woman sells the red coat.",
        "Eine alte Frau verkauft den roten Mantel.",
    ),
    (
        statement(
            clause(subject("a", "girl", "small"), "find", direct("a", "book", "cheap"))
        ),
        "A small girl finds a cheap book.",
        "Ein kleines Mädchen findet ein billiges Buch.",
    ),
    (
        statement(clause(subject("the", "woman"), "open", direct("the", "window"))),
        "The woman opens the window.",
        "Die Frau macht das Fenster auf.",
    ),
    (
        statement(
            clause(
                subject("the", "woman"), "open", direct("the", "window"), modal="want"
            )
        ),
        "The woman wants to open the window.",
        "Die Frau will das Fenster aufmachen.",
    ),
    (
        statement(clause(PRONOUNS["he"], "open", direct("the", "door"), perfect=True)),
        "He has opened the door.",
        "Er hat die Tür aufgemacht.",
    ),
    (
        statement(
            clause(
                subject("the", "sister"),
                "call",
                direct("a", "mother", "tired"),
                adverb="often",
            )
        ),
        "The sister often calls a tired mother.",
        "Die Schwester ruft oft eine müde Mutter an.",
    ),
    (
        statement(
            clause(
                PRONOUNS["they"],
                "pick up",
                direct("the", "boy"),
                modal="must",
                adverb="today",
            )
        ),
        "They must pick up the boy today.",
        "Sie müssen heute den Jungen abholen.",
    ),
    (
        statement(clause(subject(3, "sister"), "invite", direct("my", "friend"))),
        "Three sisters invite my friend.",
        "Drei Schwestern laden meinen Freund ein.",
    ),
    (
        subordinate(
            clause(subject("the", "woman"), "stay"),
            BECAUSE,
            clause(subject("the", "man"), "buy", direct("the", "book")),
        ),
        "The woman stays because the man buys the book.",
        "Die Frau bleibt, weil der Mann das Buch kauft.",
    ),
    (
        subordinate(
            clause(subject("the", "child"), "sleep"),
            BECAUSE,
            clause(subject("the", "woman"), "close", direct("the", "window")),
        ),
        "The child sleeps because the woman closes the window.",
        "Das Kind schläft, weil die Frau das Fenster zumacht.",
    ),
    (
        subordinate(
            clause(PRONOUNS["I"], "know"),
            THAT,
            clause(
                subject("the", "dog"),
                "play",
                adjunct=adjunct("in", "the", "garden"),
                perfect=True,
            ),
        ),
        "I know that the dog has played in the garden.",
        "Ich weiß, dass der Hund im Garten gespielt hat.",
    ),
    (
        subordinate(
            clause(subject("the", "man", plural=True), "say"),
            THAT,
            clause(PRONOUNS["she"], "carry", direct(17, "bed"), modal="can"),
        ),
        "The men say that she can carry seventeen beds.",
        "Die Männer sagen, dass sie siebzehn Betten tragen kann.",
    ),
    (
        subordinate_first(
            IF,
            clause(subject("the", "boy"), "sleep"),
            clause(subject("the", "teacher"), "read", direct("a", "letter")),
        ),
        "If the boy sleeps, the teacher reads a letter.",
        "Wenn der Junge schläft, liest der Lehrer einen Brief.",
    ),
    (
        subordinate_first(
            BECAUSE,
            clause(PRONOUNS["I"], "open", direct("a", "door")),
            clause(subject("the", "girl"), "invite", direct("the", "woman")),
        ),
        "Because I open a door, the girl invites the woman.",
        "Weil ich eine Tür aufmache, lädt das Mädchen die Frau ein.",
    ),
    (
        statement(clause(subject("the", "man"), "buy", direct("a", "book")), "today"),
        "Today the man buys a book.",
        "Heute kauft der Mann ein Buch.",
    ),
    (
        statement(clause(subject("the", "man"), "eat", direct(2, "egg")), "sometimes"),
        "Sometimes the man eats two eggs.",
        "Manchmal isst der Mann zwei Eier.",
    ),
    (
        statement(clause(subject(21, "child", "tired"), "sleep")),
        "Twenty-one tired children sleep.",
        "Einundzwanzig müde Kinder schlafen.",
    ),
    (
        statement(
            clause(
                subject("the", "boy"),
                "come",
                adjunct=adjunct("from", "the", "school"),
                perfect=True,
            )
        ),
        "The boy has come from the school.",
        "Der Junge ist aus der Schule gekommen.",
    ),
    (
        statement(clause(PRONOUNS["I"], "stay", perfect=True)),
        "I have stayed.",
        "Ich bin geblieben.",
    ),
    (
        statement(clause(subject("my", "sister", "tired", plural=True), "sleep")),
        "My tired sisters sleep.",
        "Meine müden Schwestern schlafen.",
    ),
    (
        question(clause(subject("the", "girl"), "see", direct("a", "dog"))),
        "Does the girl see a dog?",
        "Sieht das Mädchen einen Hund?",
    ),
    (
        question(
            clause(PRONOUNS["she"], "drink", direct("", "tea", "hot"), modal="want")
        ),
        "Does she want to drink hot tea?",
        "Will sie heißen Tee trinken?",
    ),
    (
        question(
            clause(
                subject("the", "teacher"),
                "arrive",
                adjunct=adjunct("with", "the", "child", plural=True),
                perfect=True,
            )
        ),
        "Has the teacher arrived with the children?",
        "Ist der Lehrer mit den Kindern angekommen?",
    ),
    (
        question(
            clause(PRONOUNS["they"], "close", direct("the", "door"), adverb="often")
        ),
        "Do they often close the door?",
        "Machen sie oft die Tür zu?",
    ),
    (
        question(clause(PRONOUNS["he"], "work", modal="can", adverb="today")),
        "Can he work today?",
        "Kann er heute arbeiten?",
    ),
    (
        statement(
            clause(
                PRONOUNS["I"], "read", direct("the", "newspaper", "new"), negated=True
            )
        ),
        "I do not read the new newspaper.",
        "Ich lese die neue Zeitung nicht.",
    ),
    (
        statement(
            clause(
                subject("the", "woman"), "call", direct("my", "friend"), negated=True
            )
        ),
        "The woman does not call my friend.",
        "Die Frau ruft meinen Freund nicht an.",
    ),
    (
        statement(
            clause(
                subject("the", "cat"),
                "sleep",
                adjunct=adjunct("in", "the", "house", "old"),
                negated=True,
            )
        ),
        "The cat does not sleep in the old house.",
        "Die Katze schläft nicht im alten Haus.",
    ),
    (
        statement(clause(PRONOUNS["she"], "drink", direct("no", "milk", "cold"))),
        "She drinks no cold milk.",
        "Sie trinkt keine kalte Milch.",
    ),
    (
        statement(clause(PRONOUNS["we"], "eat", direct("no", "apple", plural=True))),
        "We eat no apples.",
        "Wir essen keine Äpfel.",
    ),
    (
        statement(
            clause(
                subject("the", "mother"),
                "give",
                indirect("the", "child", "small"),
                direct("a", "apple"),
            )
        ),
        "The mother gives the small child an apple.",
        "Die Mutter gibt dem kleinen Kind einen Apfel.",
    ),
    (
        statement(
            clause(
                PRONOUNS["we"],
                "show",
                indirect("the", "friend", plural=True),
                direct("my", "house"),
                perfect=True,
            )
        ),
        "We have shown the friends my house.",
        "Wir haben den Freunden mein Haus gezeigt.",
    ),
    (
        statement(
            clause(
                subject("the", "man", plural=True),
                "come",
                adjunct=adjunct("to", "the", "station"),
                modal="can",
                adverb="now",
            )
        ),
        "The men can come to the station now.",
        "Die Männer können jetzt zum Bahnhof kommen.",
    ),
    (
        statement(
            clause(
                subject("the", "friend"), "come", adjunct=adjunct("to", "the", "church")
            )
        ),
        "The friend comes to the church.",
        "Der Freund kommt zur Kirche.",
    ),
    (
        statement(
            clause(
                subject("the", "girl"),
                "play",
                adjunct=adjunct("without", "a", "friend"),
            )
        ),
        "The girl plays without a friend.",
        "Das Mädchen spielt ohne einen Freund.",
    ),
    (
        statement(
            clause(
                subject("a", "horse", "young"),
                "come",
                adjunct=adjunct("with", "my", "dog", "small", plural=True),
            )
        ),
        "A young horse comes with my small dogs.",
        "Ein junges Pferd kommt mit meinen kleinen Hunden.",
    ),
    (
        statement(
            clause(
                subject("the", "man"),
                "buy",
                direct("a", "lamp"),
                adjunct=adjunct("for", "the", "boy", plural=True),
                perfect=True,
                adverb="never",
            )
        ),
        "The man has never bought a lamp for the boys.",
        "Der Mann hat nie eine Lampe für die Jungen gekauft.",
    ),
]


@pytest.mark.parametrize(("pair", "english", "german"), SENTENCES)
def test_each_construction_gives_the_hand_written_sentences(pair, english, german):
    assert pair == (english, german)


@pytest.mark.parametrize(
    ("number", "english", "german"),
    [
        (2, "two", "zwei"),
        (7, "seven", "sieben"),
        (11, "eleven", "elf"),
        (12, "twelve", "zwölf"),
        (16, "sixteen", "sechzehn"),
        (17, "seventeen", "siebzehn"),
        (20, "twenty", "zwanzig"),
        (21, "twenty-one", "einundzwanzig"),
        (30, "thirty", "dreißig"),
        (36, "thirty-six", "sechsunddreißig"),
        (40, "forty", "vierzig"),
        (45, "forty-five", "fünfundvierzig"),
        (58, "fifty-eight", "achtundfünfzig"),
        (60, "sixty", "sechzig"),
        (66, "sixty-six", "sechsundsechzig"),
        (70, "seventy", "siebzig"),
        (77, "seventy-seven", "siebenundsiebzig"),
        (83, "eighty-three", "dreiundachtzig"),
        (99, "ninety-nine", "neunundneunzig"),
    ],
)
def test_number_words(number, english, german):
    assert number_words(number) == (english, german)


@pytest.mark.parametrize("number", [1, 100])
def test_number_words_refuse_what_they_cannot_say(number):
    with pytest.raises(ValueError, match=str(number)):
        number_words(number)
