"""Minimum Bayes risk: of many samples, the translation most like all the others.

Eikema and Aziz 2020, with chrF as the utility.
"""

import collections
from collections.abc import Sequence

import sacrebleu


def expected_utilities(samples: Sequence[str]) -> dict[str, float]:
    """Returns the expected utility of each different text, highest first.

    It is the mean of the text's chrF (0 to 100) against every sample, itself included.
    On ties the one that was drawn first comes first.
    """
    counts = collections.Counter(samples)
    chrf = sacrebleu.CHRF()

    def utility(text: str) -> float:
        scores = (chrf.sentence_score(text, [other]).score for other in counts)
        weighted = zip(scores, counts.values(), strict=True)
        return sum(score * count for score, count in weighted) / len(samples)

    utilities = {text: utility(text) for text in counts}
    return dict(sorted(utilities.items(), key=lambda item: -item[1]))
