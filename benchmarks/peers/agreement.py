"""One answer beside another, figure by figure.

An answer has topics; a topic is a table: what a row is of, and its figures. A figure that was not
recorded is None and agrees with None only. What an answer leaves out it does not say, which is not an
error; a row that it leaves out of a topic that it does answer is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Figure = int | float | str | None
Topic = Mapping[str, Mapping[str, Figure]]
Answer = Mapping[str, Topic]


@dataclass(frozen=True)
class Difference:
    """A figure that is not what it should be."""

    topic: str
    row: str
    figure: str
    said: Figure
    true: Figure


@dataclass(frozen=True)
class Agreement:
    """How far an answer agrees with the truth."""

    n_equal: int
    differences: tuple[Difference, ...]
    silent: tuple[str, ...]
    """What of the truth the answer does not have: figures, or topics as a whole."""

    @property
    def n_compared(self) -> int:
        return self.n_equal + len(self.differences)


def compare(answer: Answer, truth: Answer) -> Agreement:
    """Compare what an answer says with the truth; what only the answer has is not judged."""
    n_equal, differences, silent = 0, [], []
    for topic, rows in truth.items():
        wanted = _figures(rows)
        said = answer.get(topic)
        given = [name for name in wanted if said is not None and name in _figures(said)]
        silent += [name for name in wanted if name not in given] if given else [topic]
        for row in dict.fromkeys([*rows, *(said or {})]) if given else ():
            for name in given:
                one = ((said or {}).get(row) or {}).get(name)
                other = (rows.get(row) or {}).get(name)
                if one == other:
                    n_equal += 1
                else:
                    differences.append(Difference(topic, row, name, one, other))
    return Agreement(n_equal, tuple(differences), tuple(dict.fromkeys(silent)))


def _figures(topic: Topic) -> list[str]:
    return list(dict.fromkeys(name for row in topic.values() for name in row))
