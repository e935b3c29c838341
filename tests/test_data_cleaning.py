import pytest

from gshard_exp.data import cleaning
from gshard_exp.data.cleaning import Cleaning, Counts


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        ("invisible", ("a\u00adb\u200fc\u2067", "x\u200by"), ("abc", "xy")),
        ("invisible", ("می\u200cخواهم", "I want"), ("می\u200cخواهم", "I want")),
        ("nfc", ("e\u0301te\u0301", "summer"), ("été", "summer")),
        ("markup", ("<b>Ja</b><br/>nein", "Yes<br>no"), ("Ja nein", "Yes no")),
        ("markup", ("A &lt; B &amp; C", "A &lt; B &amp; C"), ("A < B & C", "A < B & C")),
        ("markup", ("1 < 2 und 3 > 2", "1 < 2 and 3 > 2"), ("1 < 2 und 3 > 2", "1 < 2 and 3 > 2")),
        ("accelerators", ("&Datei", "&File"), ("Datei", "File")),
        ("accelerators", ("B&eenden", "E&xit"), ("Beenden", "Exit")),
        ("accelerators", ("R&D und AT&T", "R&D and AT&T"), ("R&D und AT&T", "R&D and AT&T")),
        ("accelerators", ("Ton & Bild", "Sound & Vision"), ("Ton & Bild", "Sound & Vision")),
        ("accelerators", ("ファイル(&F)", "&File"), ("ファイル", "File")),
        ("accelerators", ("文件(_F)", "_File"), ("文件", "File")),
        ("accelerators", ("_Datei", "_File"), ("Datei", "File")),
        ("accelerators", ("Datei", "_File"), ("Datei", "File")),
        ("accelerators", ("Repren_dre", "Resu_me"), ("Reprendre", "Resume")),
        (
            "accelerators",
            ("user_id fehlt", "user_id missing"),
            ("user_id fehlt", "user_id missing"),
        ),
        (
            "accelerators",
            ("_Datei %(file_name)s", "_File %(file_name)s"),
            ("Datei %(file_name)s", "File %(file_name)s"),
        ),
        ("accelerators", ("Zeit", "Date&Time"), ("Zeit", "Date&Time")),
        (
            "accelerators",
            ("Filter nach Sprache", "Filter the content on folder_contents"),
            ("Filter nach Sprache", "Filter the content on folder_contents"),
        ),
        ("accelerators", ("&e in &c", "&e at &c"), ("&e in &c", "&e at &c")),
        ("spaces", (" a\n  b ", "c\td"), ("a b", "c d")),
    ],
)
def test_repair(rule, before, after):
    assert getattr(cleaning, rule)(before) == after


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("%s of %(total)d", ["%(total)d", "%s"]),
        ("%1$s and %2$s", ["%1$s", "%2$s"]),
        ("{0} {n} {{ name }}", ["{0}", "{n}", "{{ name }}"]),
        ("${title} by $author", ["$author", "${title}"]),
        ("100% sure", []),
        ("50%ige", []),
    ],
)
def test_placeholders_are_found(text, found):
    assert cleaning.placeholders(text) == sorted(found)


@pytest.mark.parametrize(
    ("source", "target", "scripts", "rule"),
    [
        ("Ja", "Yes", ("Latin",), None),
        ("", "Yes", ("Latin",), "empty"),
        ("12 %s", "12 %s", ("Latin",), "empty"),
        ("x" * 401, "y " * 100, ("Latin",), "too_long"),
        ("%s Dateien", "%d files", ("Latin",), "placeholders_differ"),
        ("%(b)s von %(a)s", "%(a)s of %(b)s", ("Latin",), None),
        ("Save", "save.", ("Latin",), "copy"),
        ("Client BitTorrent", "BitTorrent Client", ("Latin",), "near_copy"),
        ("Otvoriti datoteku", "Open file", ("Cyrillic",), "wrong_script"),
        ("Отвори фајл", "Open file", ("Cyrillic",), None),
        ("Отвори фајл", "Open file", (), None),
        ("Datei", "Файл", ("Latin",), "wrong_script"),
        # Eight wide characters stand for twenty letters, more than the name in Latin has.
        ("为dexterity提供锁定支持", "Locking support for dexterity", ("Han",), None),
        ("a" * 20, "word " * 20, ("Latin",), "length_ratio"),
        ("中" * 20, "word " * 10, ("Han",), None),
    ],
)
def test_refusal(source, target, scripts, rule):
    counts = Counts()
    texts = Cleaning().clean(source, target, scripts, counts)
    if rule is None:
        assert texts[0] and not counts.refused
    else:
        assert texts == ("", "") and dict(counts.refused) == {rule: 1}


def test_each_repair_of_a_pair_is_counted_once():
    counts = Counts()
    Cleaning().clean("<b>Ja</b>  doch", "<b>Yes</b> indeed", ("Latin",), counts)
    assert dict(counts.repaired) == {"markup": 1, "spaces": 1}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Open the file!", "open  the FILE", True),
        ("%s files", "%(n)d files", True),
        ("Don't", "Don’t", False),
        ("Open file", "Open files", False),
    ],
)
def test_english_keys(one, other, same):
    assert (cleaning.english_key(one) == cleaning.english_key(other)) is same
