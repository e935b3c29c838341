import random
import warnings

import numpy as np
import pytest
import sentencepiece

from gshard_exp.data import report, sources, splits
from gshard_exp.data.corpus import Corpus, CorpusError
from gshard_exp.data.tasks import TranslationTasks
from gshard_exp.data.tensorflow_import import load_tensorflow
from gshard_exp.data.vocabulary import (
    SOURCE,
    TARGET,
    SentencePieceVocabulary,
    VocabularyError,
)

LENGTHS = {"inputs": 32, "targets": 24}
COUNTS = {"de": 900, "sr@latin": 300, "qtz": 60}


def words(language, count):
    chooser = random.Random(language)
    return ["".join(chooser.choices("abdegiklmnorstu", k=5)) + language[0] for _ in range(count)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Three languages, 900 to 60 pairs of made-up words."""
    folder = tmp_path_factory.mktemp("corpus")
    english = words("en", 80)
    chooser = random.Random(1)
    with (folder / "all.tsv").open("w", encoding="utf-8") as file:
        for language, count in COUNTS.items():
            foreign = dict(zip(english, words(language, 80), strict=True))
            for _ in range(count):
                sentence = chooser.choices(english, k=chooser.randint(2, 9))
                text = " ".join(foreign[word] for word in sentence)
                file.write(f"{language}\t{text}\t{' '.join(sentence)}\n")
    return Corpus(
        [sources.Tsv(str(folder / "all.tsv"))],
        validation_fraction=0.05,
        test_fraction=0.05,
        cache_dir=str(folder / "cache"),
    )


def make(corpus, prefix="toy", **settings):
    settings = {"temperature": 2.0, "progress": False, **settings}
    vocabulary = SentencePieceVocabulary(size=600, max_sentences=500)
    return TranslationTasks(prefix, corpus, vocabulary, vocabulary, **settings)


@pytest.fixture(scope="module")
def tasks(corpus):
    return make(corpus)


@pytest.fixture(scope="module")
def seqio():
    load_tensorflow()
    # What these libraries warn of on import is no business of ours.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import seqio
    return seqio


def stream(seqio, tasks, seed=0, shuffle=True):
    name = tasks.register()
    dataset = seqio.get_mixture_or_task(name).get_dataset(
        LENGTHS, "train", shuffle=shuffle, seed=seed, num_epochs=None
    )
    return seqio.EncDecFeatureConverter(pack=True)(dataset, LENGTHS)


def take(iterator, count):
    return [{k: v.numpy() for k, v in next(iterator).items()} for _ in range(count)]


def same(one, other):
    return all(np.array_equal(a[k], b[k]) for a, b in zip(one, other, strict=True) for k in a)


# Vocabulary


def test_a_vocabulary_trained_twice_has_the_same_bytes(corpus):
    built = corpus.build(progress=False)
    vocabulary = SentencePieceVocabulary(size=600, max_sentences=400)  # fewer than there are
    for side in (SOURCE, TARGET):
        path = vocabulary.path(built, side, progress=False)
        first = path.read_bytes()
        path.unlink()
        assert vocabulary.path(built, side, progress=False) == path
        assert path.read_bytes() == first


def test_ids_are_those_of_t5_and_no_text_has_an_unknown_piece(tasks):
    model = sentencepiece.SentencePieceProcessor(model_file=str(tasks.models["inputs"]))
    assert (model.pad_id(), model.eos_id(), model.unk_id(), model.bos_id()) == (0, 1, 2, -1)
    assert model.unk_id() not in model.encode("漢字 ж ☃")
    assert model.decode(model.encode("漢字 ж ☃")) == "漢字 ж ☃"


def test_small_languages_have_more_than_their_share_of_the_sample(corpus):
    vocabulary = SentencePieceVocabulary(max_sentences=200, temperature=2.0)
    # Weights 30, 20, 10 of 60; c cannot fill its 33 and leaves 13 to the others, 3 to 2.
    assert vocabulary._quotas({"a": 900, "b": 400, "c": 100}) == {"a": 100, "b": 67, "c": 33}
    assert vocabulary._quotas({"a": 900, "b": 400, "c": 4}) == {"a": 118, "b": 78, "c": 4}
    assert len(vocabulary.sample(corpus.build(progress=False), SOURCE)) == 200


def test_only_the_training_split_is_sampled(corpus):
    built = corpus.build(progress=False)
    vocabulary = SentencePieceVocabulary(max_sentences=10_000)
    held = {t for c in built.languages for _, t in built.pairs(splits.TEST, c)}
    assert held and not held & set(vocabulary.sample(built, TARGET))


def test_an_impossible_size_is_an_error(corpus):
    with pytest.raises(VocabularyError, match="cannot train 100 source pieces"):
        SentencePieceVocabulary(size=100).path(corpus.build(progress=False), SOURCE, False)


def test_a_size_beyond_the_data_is_a_soft_limit(corpus):
    tasks = TranslationTasks(
        "big",
        corpus,
        SentencePieceVocabulary(size=100_000),
        SentencePieceVocabulary(size=600),
        progress=False,
    )
    assert 300 < tasks.vocab_sizes()["inputs"] < 100_000


def test_a_model_of_ones_own_is_taken_and_tested(tasks, corpus, tmp_path):
    own = SentencePieceVocabulary(model_file=str(tasks.models["inputs"]))
    assert own.path(corpus.build(progress=False), SOURCE) == tasks.models["inputs"]
    (tmp_path / "bad.model").write_bytes(b"nothing")
    with pytest.raises(VocabularyError, match="is no SentencePiece model"):
        SentencePieceVocabulary(model_file=str(tmp_path / "bad.model")).path(None, SOURCE)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words("x", 500)),
        model_prefix=str(tmp_path / "odd"),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    with pytest.raises(VocabularyError, match=r"pad, end and unknown at \(-1, 2, 0\)"):
        SentencePieceVocabulary(model_file=str(tmp_path / "odd.model")).path(None, SOURCE)


# Tokens and rates


def test_token_ids_are_the_sentences_with_the_end_added(tasks):
    for code in tasks.codes:
        pairs = list(tasks.built.pairs(splits.TRAIN, code))
        ids = tasks.token_ids(splits.TRAIN, code)
        assert len(ids) == len(pairs)
        for column, feature in enumerate(("inputs", "targets")):
            model = sentencepiece.SentencePieceProcessor(model_file=str(tasks.models[feature]))
            for row in (0, len(pairs) // 2, -1):
                assert ids[row][column].dtype == np.int32
                assert ids[row][column].tolist() == [*model.encode(pairs[row][column]), 1]


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(1.0, (16 / 17, 1 / 17)), (2.0, (4 / 5, 1 / 5)), (4.0, (2 / 3, 1 / 3))],
)
def test_rates_are_the_counts_to_the_power_of_one_over_t(tmp_path, temperature, expected):
    lines = [f"de\t{'x' * i} y\tword number {i}\n" for i in range(1, 17)] + ["fr\tun\tone\n"]
    (tmp_path / "a.tsv").write_text("".join(lines))
    counted = Corpus(
        [sources.Tsv(str(tmp_path / "a.tsv"))],
        validation_fraction=0.0,
        test_fraction=0.0,
        cache_dir=str(tmp_path),
    )
    rates = TranslationTasks("t", counted, temperature=temperature, progress=False).rates()
    assert rates == pytest.approx(dict(zip(("de", "fr"), expected, strict=True)))


def test_a_language_that_the_corpus_has_not_is_an_error(corpus):
    with pytest.raises(CorpusError, match=r"not in the corpus: ja; it has 3: de, sr@latin, qtz"):
        _ = make(corpus, languages=["de", "ja"]).codes


# seqio


def test_registering_makes_a_task_per_language_and_a_mixture_and_can_be_repeated(seqio, tasks):
    assert tasks.register() == "toy"
    mixture = seqio.MixtureRegistry.get("toy")
    assert {t.name for t in mixture.tasks} == {"toy_de_en", "toy_sr_latin_en", "toy_qtz_en"}
    assert tasks.register() == "toy"
    assert seqio.MixtureRegistry.get("toy") is mixture
    for code, rate in tasks.rates().items():
        task = seqio.TaskRegistry.get(tasks.task_name(code))
        assert mixture.get_rate(task) == pytest.approx(rate)
    features = mixture.output_features
    assert isinstance(features["inputs"].vocabulary, seqio.SentencePieceVocabulary)
    assert features["targets"].vocabulary.vocab_size == tasks.vocab_sizes()["targets"]


def test_registering_other_content_under_a_name_replaces_it(seqio, corpus):
    make(corpus, prefix="other").register()
    make(corpus, prefix="other", languages=["de"]).register()
    assert len(seqio.MixtureRegistry.get("other").tasks) == 1


def test_a_task_holds_every_pair_of_its_split_once_in_any_order(seqio, tasks):
    name = tasks.register().replace("toy", "toy_de_en")
    wanted = sorted(tuple(i) for i, _ in tasks.token_ids("train", "de"))
    orders = []
    for shuffle, seed in ((False, None), (True, 0), (True, 1)):
        dataset = seqio.get_mixture_or_task(name).get_dataset(
            None, "train", shuffle=shuffle, seed=seed
        )
        orders.append([tuple(e["inputs"].numpy()) for e in dataset])
        assert sorted(orders[-1]) == wanted
    assert orders[0] == [tuple(i) for i, _ in tasks.token_ids("train", "de")]
    assert orders[0] != orders[1] != orders[2]


def test_every_epoch_is_another_order_of_the_same_pairs(seqio, tasks):
    tasks.register()
    dataset = seqio.get_mixture_or_task("toy_qtz_en").get_dataset(
        None, "train", shuffle=True, seed=0, num_epochs=2
    )
    seen = [tuple(e["inputs"].numpy()) for e in dataset]
    half = len(seen) // 2
    assert sorted(seen[:half]) == sorted(seen[half:])
    assert seen[:half] != seen[half:]


def test_shards_share_out_the_pairs(seqio, tasks):
    tasks.register()
    seen = []
    for index in range(3):
        dataset = seqio.get_mixture_or_task("toy_de_en").get_dataset(
            None, "train", shuffle=True, seed=0, shard_info=seqio.ShardInfo(index, 3)
        )
        seen += [tuple(e["inputs"].numpy()) for e in dataset]
    assert sorted(seen) == sorted(tuple(i) for i, _ in tasks.token_ids("train", "de"))


def test_the_mixture_draws_languages_at_their_rates(seqio, tasks):
    dataset = seqio.get_mixture_or_task(tasks.register()).get_dataset(
        None, "train", shuffle=True, seed=0, num_epochs=None
    )
    owner = {tuple(i): code for code in tasks.codes for i, _ in tasks.token_ids("train", code)}
    drawn = [owner[tuple(e["inputs"].numpy())] for e in dataset.take(3000)]
    for code, rate in tasks.rates().items():
        # Three standard deviations of a share of 3000 draws are below 0.028.
        assert drawn.count(code) / 3000 == pytest.approx(rate, abs=0.028)


def test_the_same_seed_gives_the_same_packed_rows_and_another_seed_others(seqio, tasks):
    first = take(iter(stream(seqio, tasks)), 20)
    assert same(first, take(iter(stream(seqio, tasks)), 20))
    assert not same(first, take(iter(stream(seqio, tasks, seed=1)), 20))


def test_an_iterator_goes_on_from_a_checkpoint_as_if_never_stopped(seqio, tasks, tmp_path):
    tf = load_tensorflow()
    whole = iter(stream(seqio, tasks))
    # Far enough for the smallest language to be in a later epoch than the others.
    take(whole, 150)
    path = tf.train.Checkpoint(iterator=whole).write(str(tmp_path / "position"))
    rest = take(whole, 150)
    resumed = iter(stream(seqio, tasks))
    tf.train.Checkpoint(iterator=resumed).read(path).assert_consumed()
    assert same(rest, take(resumed, 150))
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) < 200_000


# Reports


def test_reports_print_every_language_rule_and_sample(tasks, tmp_path):
    from rich.console import Console

    with (tmp_path / "out").open("w+", encoding="utf-8") as file:
        console = Console(file=file, width=160)
        report.print_corpus(tasks, console)
        report.print_tasks(tasks, samples=1, console=console)
        file.seek(0)
        text = file.read()
    assert "all.tsv" in text and "wrong script" not in text and "qtz" in text
    assert "toy_sr_latin_en" in text and "Serbian (Latin)" in text and "no rule" in text
    german = tasks.built.pairs(splits.TRAIN, "de")
    assert any(f"[de] {source}  =  {target}" in text for source, target in german)
