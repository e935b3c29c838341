"""The default corpus: translations that Python packages ship, many languages into English.

The catalogs are read from the installed packages; no line of them is part of this project.
Measured with the versions that setup.py's extra `corpus` installs, in this order, by
`gshard-exp corpus`: "new" counts clean pairs that no package above has, "100+" the languages with
100 or more training pairs so far.

    package              MB  languages  new pairs  100+  licence
    Django 5.2          8.3         89     61,977    87  BSD-3
    plone.app.locales  12.5         58     84,919    91  GPL-2
    Trac                2.9         33     34,228    91  BSD-3
    django-allauth      2.1         43     16,016    92  MIT
    djangorestframework 0.9         39      3,442    92  BSD-3
    django-cms          3.6         50     15,963    93  BSD-3
    django-tinymce      1.4         58     21,676    94  MIT; its language packs GPL-2 or later
    django-ckeditor-5   3.1         65     24,680    94  BSD-3; CKEditor 5 GPL-2 or later
    django-ckeditor     2.5         69     20,836    97  BSD-3; CKEditor 4 GPL, LGPL or MPL

37 MB with `--no-deps`, and what they depend on is small (Jinja2, Pillow, some Django apps). What
stops at 97 is not the size: packages with rarer languages have dozens of dependencies, and an
extra installs those. No dependency is needed to read a catalog, so gin/tasks/m4_more.gin takes them
from `pip install --no-deps deluge wagtail horizon`:

    deluge              3.5         68     31,503    98  GPL-3
    wagtail             9.8         55     51,366   100  BSD-3
    horizon             5.3         38     60,043   106  Apache-2.0

Left out: ckan (48 languages, 30,532 pairs, only Amharic new), whose wheel carries a pytest plugin
that breaks every pytest run beside it; gramps (17 MB, 233,000 pairs of 37 languages, only Bashkir
new); kolibri (104 MB) and home-assistant-frontend (83 MB), too large; askbot, misago, django-oscar,
sphinx, thonny, postorius, mezzanine, with many dependencies and no language of 100 pairs that is
missing; pywikibot, 152 languages but a dozen messages for most. Name lists (pycountry, Babel,
weblate-language-data, django-localflavor) are no sentences.
"""

from gshard_exp.data.packages import GettextPackage, JsonPackage, ScriptPackage
from gshard_exp.data.sources import Source


def default_sources(more: bool = False) -> list[Source]:
    """Return the packages of the extra `corpus`.

    Args:
        more: also those to install with `pip install --no-deps deluge wagtail horizon`.
    """
    sources: list[Source] = [
        GettextPackage("django"),
        GettextPackage("plone.app.locales", "*/LC_MESSAGES/*.po", symbolic_ids=True),
        GettextPackage("trac"),
        GettextPackage("django-allauth"),
        GettextPackage("djangorestframework"),
        GettextPackage("django-cms"),
        ScriptPackage("django-tinymce", "*/langs/*.js"),
        ScriptPackage("django-ckeditor-5", "*/dist/translations/*.js"),
        JsonPackage("django-ckeditor", "*/ckeditor/lang/*.js", "en.js"),
    ]
    if more:
        sources += [
            GettextPackage("deluge"),
            GettextPackage("wagtail"),
            GettextPackage("horizon", "*/LC_MESSAGES/*.po"),
        ]
    return sources
