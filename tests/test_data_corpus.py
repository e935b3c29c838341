import json
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gshard_exp.data import cleaning, corpus, sources, splits
from gshard_exp.data.corpus import Corpus, CorpusError
from gshard_exp.data.packages import GettextPackage
from gshard_exp.data.splits import SPLITS, TEST, TRAIN, VALIDATION, Neighbours

NOUNS = ("file", "folder", "image", "page", "list", "user", "group", "report", "menu", "table")
VERBS = ("open", "close", "delete", "rename", "copy", "print", "export", "import", "lock", "share")
TIMES = ("now", "later", "again", "today")


def sentences():
    """400 English sentences of four words, many of them one word apart."""
    return [f"{v} the {n} {w}" for v in VERBS for n in NOUNS for w in TIMES]


@pytest.fixture
def tsv(tmp_path):
    """Writes a TSV of two languages of made-up words, with what else a test asks for."""

    def write(extra=(), name="corpus.tsv", languages=("de", "fr")):
        lines = [
            f"{code}\t{''.join(reversed(english))} {code}\t{english}"
            for code in languages
            for english in sentences()
        ]
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in (*lines, *extra)), "utf-8")
        return str(path)

    return write


def make(path, tmp_path, **settings):
    settings = {"validation_fraction": 0.1, "test_fraction": 0.1, **settings}
    return Corpus([sources.Tsv(path)], cache_dir=str(tmp_path / "cache"), near_words=9, **settings)


def english(built, split):
    return {
        cleaning.english_key(target)
        for code in built.languages
        for _, target in built.pairs(split, code)
    }


def test_splits_are_drawn_by_english_so_that_no_sentence_crosses_them(tsv, tmp_path):
    built = make(tsv(), tmp_path).build(progress=False)
    parts = [english(built, split) for split in SPLITS]
    assert all(parts)
    assert not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2])
    # Of 400 sentences a tenth each: 40, give or take three standard deviations (18).
    assert all(22 <= len(part) <= 58 for part in parts[1:])


def test_a_sentence_falls_into_the_same_split_in_every_corpus(tsv, tmp_path):
    one = make(tsv(languages=("de",)), tmp_path).build(progress=False)
    other = make(tsv(name="b.tsv", languages=("fr", "it")), tmp_path).build(progress=False)
    assert english(one, TEST) == english(other, TEST)


def test_a_larger_validation_split_takes_nothing_from_test():
    for sentence in sentences():
        if splits.split_of(sentence, 0.01, 0.2) == TEST:
            assert splits.split_of(sentence, 0.5, 0.2) == TEST


def one_word_apart(a, b):
    """Compare word by word: the plain definition."""
    a, b = sorted((a.split(), b.split()), key=len)
    if len(a) == len(b):
        return sum(x != y for x, y in zip(a, b, strict=True)) == 1
    return len(b) == len(a) + 1 and any(b[:i] + b[i + 1 :] == a for i in range(len(b)))


@given(
    st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), max_size=8),
    st.lists(st.sampled_from("abc"), min_size=1, max_size=6),
    st.integers(1, 5),
)
def test_neighbours_are_those_that_a_comparison_finds(held_out, sentence, min_words):
    held = [" ".join(words) for words in held_out]
    key = " ".join(sentence)
    expected = any(
        one_word_apart(key, other) and max(len(sentence), len(other.split())) >= min_words
        for other in held
        if key != other
    )
    if key not in held:
        assert (key in Neighbours(held, min_words)) == expected


def test_training_pairs_one_word_away_from_a_held_out_sentence_are_dropped(tsv, tmp_path):
    settings = make(tsv(), tmp_path)
    loose = settings.build(progress=False)
    held = english(loose, VALIDATION) | english(loose, TEST)
    near = {k for k in english(loose, TRAIN) if any(one_word_apart(k, h) for h in held)}
    assert near
    strict = Corpus(
        settings.sources,
        validation_fraction=0.1,
        test_fraction=0.1,
        near_words=4,
        cache_dir=settings.cache_dir,
    ).build(progress=False)
    assert english(strict, TRAIN) == english(loose, TRAIN) - near
    assert strict.report["refused"]["near_held_out"] == 2 * len(near)  # two languages


def test_short_sentences_have_no_neighbours():
    neighbours = Neighbours(["delete file", "delete the old file"], min_words=4)
    assert "delete folder" not in neighbours
    assert "delete the new file" in neighbours
    assert "delete the file" in neighbours
    assert "delete the very old file" in neighbours


def test_duplicates_refusals_and_problems_are_counted_by_language_and_named(tsv, tmp_path):
    path = tsv(
        ["de\tDatei öffnen\tOpen file", "de\tDatei öffnen\tOpen file", "de\tOK\tOK", "broken"]
    )
    report = make(path, tmp_path).build(progress=False).report
    assert report["languages"]["de"]["refused"]["duplicate"] == 1
    assert report["languages"]["de"]["refused"]["copy"] == 1
    assert report["problems"] == {"count": 1, "first": [f"{path}:804: 1 columns, not 3"]}
    kept = sum(report["languages"][code][split] for code in ("de", "fr") for split in SPLITS)
    assert report["pairs_read"] == kept + sum(report["refused"].values())


def test_the_files_hold_what_the_report_says(tsv, tmp_path):
    built = make(tsv(["it\tApri il file\tOpen the file"]), tmp_path).build(progress=False)
    assert built.languages == ("de", "fr", "it") or built.languages == ("fr", "de", "it")
    for code in built.languages:
        for split in SPLITS:
            assert len(list(built.pairs(split, code))) == built.num_pairs(split, code)
            assert built.path(split, code).parent.name == split


def test_languages_come_from_high_to_low_resource_and_small_ones_are_left_out(tsv, tmp_path):
    extra = ["it\tApri il file\tOpen the file", "es\tOK\tOK"]
    extra += [f"nl\t{'x' * i} y\tword number {i} of a few" for i in range(1, 30)]
    built = make(tsv(extra), tmp_path, min_pairs=5).build(progress=False)
    assert built.languages == ("de", "fr", "nl")
    assert built.report["languages_left_out"] == {"es": 0, "it": 1}


def test_an_unknown_language_works_without_a_script_rule_and_is_reported(tsv, tmp_path):
    extra = ["qtz\tЩзут еру ашду\tOpen another file"]
    built = make(tsv(extra), tmp_path).build(progress=False)
    assert "qtz" in built.languages
    assert built.report["languages_without_a_row"] == ["qtz"]


def test_languages_can_be_chosen_and_an_empty_one_is_reported(tsv, tmp_path):
    built = make(tsv(), tmp_path, languages=["fr", "ja"]).build(progress=False)
    assert built.languages == ("fr",)
    assert built.report["languages_left_out"] == {"ja": 0}


def test_a_corpus_with_nothing_left_is_an_error_that_gives_numbers(tmp_path):
    path = tmp_path / "bad.tsv"
    path.write_text("de\tOK\tOK\nde\nfr\tOK\tok\n")
    with pytest.raises(CorpusError, match=r"2 pairs of 2 languages .* copy 2; .* 1 \(the first: "):
        make(str(path), tmp_path).build(progress=False)
    assert not list(tmp_path.glob("cache/*"))


def test_a_corpus_without_sources_or_training_split_is_an_error():
    with pytest.raises(CorpusError, match="sources is empty"):
        Corpus()
    with pytest.raises(CorpusError, match="leave no training split"):
        Corpus([sources.Tsv("x")], validation_fraction=0.5, test_fraction=0.5)


def test_two_builds_give_the_same_bytes(tsv, tmp_path):
    path = tsv()
    builds = [
        Corpus([sources.Tsv(path)], cache_dir=str(tmp_path / name)).build(progress=False)
        for name in ("a", "b")
    ]
    files = [
        {str(p.relative_to(b.directory)): p.read_bytes() for p in b.directory.rglob("*.*")}
        for b in builds
    ]
    assert files[0] == files[1] and len(files[0]) == 7


@dataclass(frozen=True)
class Counting:
    """Counts how often it is read."""

    reads: Counter
    version: str = "1"
    label: str = "counting"

    def fingerprint(self):
        return self.version

    def pairs(self, problems):
        self.reads["all"] += 1
        for text in sentences():
            yield sources.Pair("de", text[::-1], text, "here")


def test_a_built_corpus_is_reused_until_something_that_went_in_changes(tmp_path):
    reads = Counter()

    def build(version="1", **settings):
        settings = {"cache_dir": str(tmp_path), **settings}
        return Corpus([Counting(reads, version)], **settings).build(progress=False).directory

    first = build()
    assert build() == first and reads["all"] == 1
    assert build(version="2") != first
    assert build(min_pairs=7) != first
    assert build(cleaning=cleaning.Cleaning(max_chars=99)) != first
    assert build(test_fraction=0.03) != first
    assert reads["all"] == 5


def test_a_changed_file_is_a_changed_corpus(tsv, tmp_path):
    before = make(tsv(), tmp_path).key()
    assert make(tsv(["de\tJa\tYes"]), tmp_path).key() != before


def test_a_build_that_fails_leaves_nothing_in_the_cache(tmp_path):
    @dataclass(frozen=True)
    class Failing(Counting):
        def pairs(self, problems):
            yield from super().pairs(problems)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Corpus([Failing(Counter())], cache_dir=str(tmp_path / "c")).build(progress=False)
    assert not list(tmp_path.glob("c/*"))


def test_django_alone_gives_85_languages_of_100_pairs(tmp_path):
    built = Corpus([GettextPackage("django")], min_pairs=100, cache_dir=str(tmp_path)).build(
        progress=False
    )
    assert len(built.languages) >= 85
    assert sum(built.num_pairs(TRAIN, code) for code in built.languages) > 55_000
    parts = [english(built, split) for split in SPLITS]
    assert not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2])
    held = Neighbours(parts[1] | parts[2], min_words=4)
    assert not any(key in held for key in parts[0])
    assert json.loads((built.directory / corpus.REPORT).read_text("utf-8")) == built.report
