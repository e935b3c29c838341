import gzip
import json
import lzma
import struct
import sys

import pytest

from gshard_exp.data import catalogs, languages, packages
from gshard_exp.data.packages import GettextPackage, JsonPackage, ScriptPackage
from gshard_exp.data.sources import (
    Pair,
    ParallelFiles,
    Problems,
    SourceError,
    Tsv,
    TsvFolder,
)

PO = r"""
msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\n"
"Plural-Forms: nplurals=3; plural=(n%10==1 && n%100!=11 ? 0 : n%10>=2 && n%10<=4 && "
"(n%100<10 || n%100>=20) ? 1 : 2);\n"

msgid "Open file"
msgstr "Открыть "
"файл"

msgctxt "verb"
msgid "Set \"x\""
msgstr "Задать \"x\""

#, fuzzy
msgid "Close"
msgstr "Закрыто?"

msgid "%d file"
msgid_plural "%d files"
msgstr[0] "%d файл"
msgstr[1] "%d файла"
msgstr[2] "%d файлов"

msgid "Untranslated"
msgstr ""

#, fuzzy
#~ msgid "Gone"
#~ msgstr "Нет"

msgid "After"
msgstr "После"
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Installs a package of the given files, to be found by its list of files only."""

    def install(name, files):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        for path, content in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            data = content if isinstance(content, bytes) else content.encode()
            (tmp_path / path).write_bytes(data)
        (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


def make_mo(messages, order="<"):
    ids, strings = zip(*sorted(messages.items()), strict=True)
    offset = 28 + 16 * len(ids)
    tables, blob = b"", b""
    for texts in (ids, strings):
        for text in texts:
            tables += struct.pack(order + "2I", len(text), offset + len(blob))
            blob += text + b"\0"
    header = struct.pack(order + "7I", 0x950412DE, 0, len(ids), 28, 28 + 8 * len(ids), 0, offset)
    return header + tables + blob


def read(source):
    problems = Problems()
    return list(source.pairs(problems)), problems


def test_po_yields_confirmed_translations_with_their_lines(package):
    package("shop", {"shop/locale/ru/LC_MESSAGES/shop.po": PO})
    pairs, problems = read(GettextPackage("shop", "*/LC_MESSAGES/*.po"))
    path = "shop/shop/locale/ru/LC_MESSAGES/shop.po"
    assert pairs == [
        Pair("ru", "Открыть файл", "Open file", f"{path}:8"),
        Pair("ru", 'Задать "x"', 'Set "x"', f"{path}:12"),
        # n = 1 takes form 0; 2 takes form 1; 5 and 100 take form 2.
        Pair("ru", "%d файл", "%d file", f"{path}:20"),
        Pair("ru", "%d файла", "%d files", f"{path}:20"),
        Pair("ru", "%d файлов", "%d files", f"{path}:20"),
        Pair("ru", "После", "After", f"{path}:33"),
    ]
    assert problems.count == 0


def test_po_without_number_gives_its_one_form_to_the_english_plural(package):
    text = (
        'msgid ""\nmsgstr "Plural-Forms: nplurals=1; plural=0;\\n"\n\n'
        'msgid "%d file"\nmsgid_plural "%d files"\nmsgstr[0] "%d 個のファイル"\n'
    )
    package("shop", {"shop/locale/ja/LC_MESSAGES/shop.po": text})
    pairs, _ = read(GettextPackage("shop", "*/LC_MESSAGES/*.po"))
    assert [(p.source, p.target) for p in pairs] == [("%d 個のファイル", "%d files")]


def test_po_takes_english_of_symbolic_ids_from_default_comments(package):
    text = (
        '#. Default: "Say \\"hello\\""\nmsgid "label_hello"\nmsgstr "Sag hallo"\n\n'
        'msgid "label_bare"\nmsgstr "Nichts"\n\n'
        'msgid "Log in"\nmsgstr "Anmelden"\n'
    )
    package("cms", {"cms/locales/de/LC_MESSAGES/cms.po": text})
    pairs, _ = read(GettextPackage("cms", "*/LC_MESSAGES/*.po", symbolic_ids=True))
    assert [(p.source, p.target) for p in pairs] == [
        ("Sag hallo", 'Say "hello"'),
        ("Anmelden", "Log in"),
    ]


def test_po_reports_a_malformed_line_and_keeps_the_other_messages(package):
    text = 'msgid "One"\nmsgstr "Eins\n\nmsgid "Two"\nmsgstr "Zwei"\n\nmsgwhat "x"\n'
    package("shop", {"shop/locale/de/LC_MESSAGES/shop.po": text})
    pairs, problems = read(GettextPackage("shop", "*/LC_MESSAGES/*.po"))
    assert [p.target for p in pairs] == ["Two"]
    path = "shop/shop/locale/de/LC_MESSAGES/shop.po"
    assert [line.split(" ")[0] for line in problems.lines] == [f"{path}:2:", f"{path}:7:"]


def test_po_honours_the_charset_of_its_header_and_reports_undecodable_lines(package):
    latin = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=ISO-8859-1\\n"\n\n'
    latin += 'msgid "Size"\nmsgstr "Größe"\n'
    broken = 'msgid "One"\nmsgstr "Gr\udcfc\udcdfe"\n\nmsgid "Two"\nmsgstr "Zwei"\n'
    odd = 'msgid ""\nmsgstr "charset=klingon\\n"\n'
    package(
        "shop",
        {
            "a/de/LC_MESSAGES/latin.po": latin.encode("latin-1"),
            "b/de/LC_MESSAGES/broken.po": broken.encode("utf-8", "surrogateescape"),
            "c/de/LC_MESSAGES/odd.po": odd,
        },
    )
    pairs, problems = read(GettextPackage("shop", "*/LC_MESSAGES/*.po"))
    assert [p.source for p in pairs] == ["Größe", "Zwei"]
    assert problems.count == 2
    assert problems.lines[0].startswith("shop/b/de/LC_MESSAGES/broken.po:2: 'utf-8' codec")
    assert "'klingon'" in problems.lines[1]


@pytest.mark.parametrize("order", "<>")
def test_mo_is_read_in_either_byte_order_with_contexts_and_plurals(package, order):
    data = make_mo(
        {
            b"": b"Content-Type: text/plain; charset=UTF-8\nPlural-Forms: plural=n!=1;\n",
            b"menu\x04Open": "Öffnen".encode(),
            b"%d day\0%d days": b"%d Tag\0%d Tage",
        },
        order,
    )
    package("shop", {"shop/locale/de_DE/LC_MESSAGES/shop.mo": data})
    pairs, problems = read(GettextPackage("shop"))
    assert [(p.language, p.source, p.target) for p in pairs] == [
        ("de", "%d Tag", "%d day"),
        ("de", "%d Tage", "%d days"),
        ("de", "Öffnen", "Open"),
    ]
    assert problems.count == 0


def test_broken_mo_files_are_reported_and_the_others_read(package):
    good = make_mo({b"Yes": b"Ja"})
    bad_bytes = make_mo({b"Yes": b"\xff\xfe", b"No": b"Nein"})
    package(
        "shop",
        {
            "a/de/LC_MESSAGES/cut.mo": good[:30],
            "b/de/LC_MESSAGES/no.mo": b"not a catalog at all, but long enough",
            "c/de/LC_MESSAGES/bytes.mo": bad_bytes,
            "d/de/LC_MESSAGES/good.mo": good,
        },
    )
    pairs, problems = read(GettextPackage("shop"))
    assert [p.source for p in pairs] == ["Nein", "Ja"]
    assert problems.count == 3
    assert "cut off" in problems.lines[0] and "magic" in problems.lines[1]


def test_a_bad_plural_formula_is_reported_and_replaced():
    lines = []
    plurals = catalogs.Plurals(
        "Plural-Forms: nplurals=2; plural=EXPRESSION;\n", lambda *a: lines.append(a)
    )
    message = catalogs.Message(1, "day", "days", {0: "Tag", 1: "Tage"})
    assert list(plurals.pairs(message)) == [("Tag", "day"), ("Tage", "days")]
    assert len(lines) == 1


def test_keyed_json_is_matched_with_the_english_file(package):
    package(
        "web",
        {
            "web/lang/en.json": json.dumps({"menu": {"open": "Open", "n": 3}, "bye": "Goodbye"}),
            "web/lang/de.json": json.dumps({"menu": {"open": "Öffnen"}, "extra": "Mehr"}),
            "web/lang/fr.js": 'lang[\'fr\']={"bye":"Au revoir"};',
            "web/lang/it.json": '{"bye":\n "Addio"',
        },
    )
    pairs, problems = read(JsonPackage("web", "*/lang/*.js*"))
    assert [(p.language, p.source, p.target) for p in pairs] == [
        ("de", "Öffnen", "Open"),
        ("fr", "Au revoir", "Goodbye"),
    ]
    assert problems.lines[0].startswith("web/web/lang/it.json:2: ")


def test_scripts_keyed_by_english_are_read(package):
    script = 'add("de",{"Open...":"\\u00d6ffnen\\x2e..",Bold:"Fett","Empty":""});'
    package("web", {"web/langs/de.js": script})
    pairs, _ = read(ScriptPackage("web", "*/langs/*.js"))
    assert [(p.source, p.target) for p in pairs] == [("Öffnen...", "Open..."), ("Fett", "Bold")]


def test_a_missing_package_names_the_extra_to_install():
    with pytest.raises(SourceError, match=r"'no-such-package'.*gshard_exp\[corpus\]"):
        read(GettextPackage("no-such-package"))


def test_a_package_without_such_files_is_an_error(package):
    package("shop", {"shop/x.txt": ""})
    with pytest.raises(SourceError, match="no file that matches"):
        read(GettextPackage("shop"))


def test_packages_are_read_without_being_imported(package):
    package(
        "bomb", {"bomb/__init__.py": "1/0", "bomb/de/LC_MESSAGES/b.mo": make_mo({b"Yes": b"Ja"})}
    )
    pairs, _ = read(GettextPackage("bomb"))
    assert len(pairs) == 1 and "bomb" not in sys.modules


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_tsv_lines_are_read_and_malformed_ones_counted(tmp_path, suffix):
    data = b"de\tJa\tYes\nde\tkaputt\nfr\tOui\tYes\n!\tx\ty\npt_BR\tSim\tYes\n"
    data += b"de\t\xff\tNo\n"
    path = tmp_path / f"mine.tsv{suffix}"
    path.write_bytes({"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix](data))
    pairs, problems = read(Tsv(str(path)))
    assert pairs == [
        Pair("de", "Ja", "Yes", f"{path}:1"),
        Pair("fr", "Oui", "Yes", f"{path}:3"),
        Pair("pt", "Sim", "Yes", f"{path}:5"),
    ]
    assert problems.count == 3
    assert problems.lines[0] == f"{path}:2: 2 columns, not 3"
    assert problems.lines[1].startswith(f"{path}:4: ")
    assert problems.lines[2].startswith(f"{path}:6: 'utf-8' codec")


def test_a_compressed_file_that_breaks_off_is_reported(tmp_path):
    path = tmp_path / "cut.tsv.gz"
    path.write_bytes(gzip.compress(b"de\tJa\tYes\n" * 1000)[:-20])
    _, problems = read(Tsv(str(path)))
    assert problems.count == 1 and "cannot be read further" in problems.lines[0]


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(SourceError, match="There is no file"):
        read(Tsv(str(tmp_path / "none.tsv")))


def test_a_folder_holds_one_file_per_language(tmp_path):
    (tmp_path / "de.tsv").write_text("Ja\tYes\n")
    (tmp_path / "sr@latin.tsv").write_text("Da\tYes\n")
    (tmp_path / "1.tsv").write_text("?\tYes\n")
    pairs, problems = read(TsvFolder(str(tmp_path)))
    assert [(p.language, p.source) for p in pairs] == [("de", "Ja"), ("sr@latin", "Da")]
    assert problems.count == 1


def test_parallel_files_are_read_in_step_and_an_excess_is_reported(tmp_path):
    (tmp_path / "x.de").write_text("Ja\nNein\nVielleicht\n")
    (tmp_path / "x.en").write_text("Yes\nNo\n")
    pairs, problems = read(ParallelFiles("de", str(tmp_path / "x.de"), str(tmp_path / "x.en")))
    assert [(p.source, p.target) for p in pairs] == [("Ja", "Yes"), ("Nein", "No")]
    assert problems.count == 1


def test_problems_are_all_counted_and_the_first_kept():
    problems = Problems(limit=2)
    for i in range(5):
        problems.add(f"file:{i}", "bad")
    assert problems.count == 5 and problems.lines == ["file:0: bad", "file:1: bad"]


@pytest.mark.parametrize(
    ("locale", "code"),
    [
        ("de", "de"),
        ("pt_BR", "pt"),
        ("no", "nb"),
        ("iw", "he"),
        ("fil", "tl"),
        ("zh_Hans", "zh"),
        ("zh-Hant-TW", "zh"),
        ("sr", "sr"),
        ("sr_RS", "sr"),
        ("sr_Latn", "sr@latin"),
        ("sr@latin", "sr@latin"),
        ("sr@Cyrl", "sr"),
        ("sr-latn-rs", "sr@latin"),
        ("uz@Cyrl", "uz@cyrillic"),
        ("ca@valencia", "ca"),
        ("de_DE.UTF-8", "de"),
    ],
)
def test_locales_fold_to_languages(locale, code):
    assert languages.fold(locale) == code
    assert languages.fold(code) == code


def test_the_shipped_table_covers_the_languages_of_the_paper_and_names_real_scripts():
    table = languages.read_table()
    assert len(table) >= 100
    assert table["ja"].scripts == ("Han", "Hiragana", "Katakana")
    letters = {"Latin": "a", "Cyrillic": "я", "Han": "中", "Arabic": "ب", "Devanagari": "क"}
    for script, letter in letters.items():
        assert languages.script_of(letter) == script
    for language in table.values():
        assert language.scripts and languages.fold(language.code) == language.code


def test_a_bad_row_of_a_table_is_an_error_with_its_line(tmp_path):
    path = tmp_path / "table.tsv"
    path.write_text("# code\nde\tGerman\tLatin\nfr French\n")
    with pytest.raises(languages.LanguageTableError, match=":3 has 1 columns"):
        languages.read_table(str(path))


def test_django_ships_over_80_languages():
    pairs, problems = read(GettextPackage("django"))
    assert len({pair.language for pair in pairs}) >= 85
    assert len(pairs) > 70_000 and problems.count == 0
    assert Pair in {type(pairs[0])} and pairs[0].origin.startswith("django/django/")
    assert packages.package_fingerprint("django").startswith("django==5.2")
