"""Numbers in words, and the same numbers the other way round in English."""

import random

WORDS = {
    "sw": "sifuri moja mbili tatu nne tano sita saba nane tisa",
    "fi": "nolla yksi kaksi kolme neljä viisi kuusi seitsemän kahdeksan yhdeksän",
}
ENGLISH = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def pair(language, digits):
    source = " ".join(WORDS[language].split()[digit] for digit in digits)
    return source, " ".join(ENGLISH[digit] for digit in reversed(digits))


def write(path, rows=2400):
    """Write a corpus for `gin/tasks/tsv.gin`."""
    rng = random.Random(0)
    found = set()
    while len(found) < rows:
        digits = [rng.randrange(10) for _ in range(rng.choice((1, 2, 3, 3, 4, 4, 4)))]
        language = rng.choice(("sw", "sw", "fi"))
        found.add((language, *pair(language, digits)))
    lines = sorted(found)
    rng.shuffle(lines)
    path.write_text("".join("\t".join(line) + "\n" for line in lines), "utf-8")
