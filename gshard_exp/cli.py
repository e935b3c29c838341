"""The command line: verbs to functions, and the only reader of argv."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gshard_exp import look, planning, reports, sweep_verbs, verify
from gshard_exp.config import (
    ConfigError,
    assemble,
    binding_from_flag,
    operative_config,
)
from gshard_exp.errors import FAILED, STOPPED, WRONG_SETTING, SettingError
from gshard_exp.t5x_runner import flags as runners

OFF = "off"
_BUILDER = "a preset (moe_128e_12l) or module:function, with arguments as in 'base(x=1)'"
QUICKSTART = "experiments/quickstart/quickstart.gin"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; return the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments, bindings = _parse(words)
    arguments.argv = words
    # Gin files and fiddle builders may name modules of the current folder, whatever starts us.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    # TensorFlow and oneDNN report on themselves at start-up; errors still come through.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    try:
        _keep_compiled_programs(arguments)
        return arguments.verb(arguments, bindings)
    except (ConfigError, SettingError) as error:
        if arguments.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return WRONG_SETTING
    except BrokenPipeError:  # of `| head`; Python would complain again when it closes the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        print("stopped; what was finished is kept, the same command goes on", file=sys.stderr)
        return STOPPED


def _train(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    from gshard_exp.train import loop

    train = loop.train
    if arguments.runner == runners.T5X:
        from gshard_exp.t5x_runner.run import train
    assembled = _assemble_experiment(arguments, bindings)
    config = operative_config(assembled)
    with assembled.explaining():
        if arguments.dry_run:
            return _dry_run(assembled.tree, config)
        try:
            train(
                assembled.tree,
                files={"config.gin": config},
                report=look.say,
                argv=arguments.argv,
            )
        except loop.NonFiniteLossError as error:
            print(f"error: {error}", file=sys.stderr)
            return FAILED
        except loop.Interrupted as request:
            print(request, file=sys.stderr)
            return STOPPED
    look.say(f"outputs: {os.path.abspath(assembled.tree.model_dir)}")
    return 0


def _convert(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    from gshard_exp.t5x_runner.convert import convert

    assembled = _assemble_experiment(arguments, bindings)
    files = {"config.gin": operative_config(assembled)}
    with assembled.explaining():
        convert(assembled.tree, Path(arguments.checkpoint), files, look.say)
    return 0


def _dry_run(experiment: Any, config: str) -> int:
    from gshard_exp.train.experiment import plan_experiment
    from gshard_exp.train.state import model_info

    plan, _ = plan_experiment(experiment)
    look.say(config)
    look.say(model_info(plan))
    look.say("dry run: settings are valid; nothing was compiled or written")
    return 0


def _keep_compiled_programs(arguments: argparse.Namespace) -> None:
    """Turn the compilation cache on for a verb that has `--compile_cache` and will compile."""
    from gshard_exp.compile_cache import keep_compiled_programs

    chosen = getattr(arguments, "compile_cache", OFF)
    if chosen == OFF or getattr(arguments, "dry_run", False):
        return
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    folder = chosen or os.path.join(caches, "gshard_exp", "compiled")
    note = keep_compiled_programs(Path(folder).expanduser())
    if note:
        print(note, file=sys.stderr)


def _corpus(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    from gshard_exp.data import report

    assembled = _assemble_experiment(arguments, bindings)
    with assembled.explaining():
        report.print_corpus(_translation_tasks(assembled))
    return 0


def _tasks(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    from gshard_exp.data import report

    assembled = _assemble_experiment(arguments, bindings)
    with assembled.explaining():
        report.print_tasks(_translation_tasks(assembled), samples=arguments.samples)
    return 0


def _translate(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    from gshard_exp.use import verbs

    verbs.translate(
        verbs.Which(arguments.model_dir, arguments.step, bindings, arguments.batch_size),
        arguments.text,
        file=arguments.file,
        language=arguments.lang,
        as_json=arguments.json,
    )
    return 0


def _eval(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    from gshard_exp.use import verbs

    languages = arguments.languages
    verbs.evaluate(
        verbs.Which(arguments.model_dir, arguments.step, bindings, arguments.batch_size),
        split=arguments.split,
        languages=None if languages is None else [code for code in languages.split(",") if code],
        baselines=arguments.baselines,
        max_examples=arguments.max_examples,
        output=arguments.output,
    )
    return 0


def _translation_tasks(assembled: Any) -> Any:
    tasks = getattr(assembled.tree.data, "tasks", None)
    if tasks is None:
        raise assembled.error(
            "This experiment has no translation tasks of ours.",
            paths=("data",),
            hint="--gin_file=gin/tasks/m4.gin or gin/tasks/tsv.gin",
        )
    return tasks


def _assemble_experiment(arguments: argparse.Namespace, bindings: Sequence[str]) -> Any:
    from gshard_exp.train.experiment import Experiment

    look.check_flags(arguments, bindings)
    if arguments.fdl_config:
        from gshard_exp.config.from_fiddle import assemble_fiddle

        return assemble_fiddle(Experiment, arguments.fdl_config, arguments.fdl_set)
    files = arguments.gin_file or [QUICKSTART]
    return assemble(Experiment, files, bindings, look.search_paths(arguments))


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split gin bindings (`--gin.NAME=VALUE`) from the arguments that argparse knows."""
    bindings = [binding_from_flag(word) for word in argv if word.startswith("--gin.")]
    return _parser().parse_args([w for w in argv if not w.startswith("--gin.")]), bindings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gshard-exp",
        description="GShard experiments from gin files or fiddle configs, on any mesh.",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    train = _verb(verbs, "train", _train, "train, or go on with, an experiment")
    _one_experiment(train, required=True, explanation="the later wins")
    train.add_argument(
        "--dry_run",
        action="store_true",
        help="assemble and validate; print settings and parameters; compile and write nothing",
    )
    runners.add_runner(train)
    _compile_cache(train)
    convert = _verb(verbs, "convert", _convert, "turn a checkpoint of ours into t5x's, or back")
    _one_experiment(convert, required=True, explanation="the later wins")
    runners.add_checkpoint(convert)
    corpus = _verb(verbs, "corpus", _corpus, "build a corpus and report what cleaning did")
    tasks = _verb(verbs, "tasks", _tasks, "list languages, pairs, scripts and samples")
    tasks.add_argument("--samples", type=int, default=1, help="pairs to show for each language")
    for verb in (corpus, tasks):
        _one_experiment(verb, required=False, explanation=f"default: {QUICKSTART}")
    _add_looking_verbs(verbs)
    _add_model_verbs(verbs)
    report = _verb(verbs, "report", reports.report_verb, "tables, plots and a page of runs")
    reports.add_flags(report)
    inspect = _verb(verbs, "inspect", verify.inspect_verb, "list what a step sends, and why")
    invariance = _verb(
        verbs, "invariance", verify.invariance_verb, "compare a step on every mesh with one device"
    )
    for verb in (inspect, invariance):
        _one_experiment(verb, required=True, explanation="the later wins")
        verify.add_flags(verb)
        _compile_cache(verb)
    summary = "plan, run and follow a grid of experiments"
    sweep = verbs.add_parser("sweep", help=summary, description=summary)
    sweep_verbs.add_verbs(sweep, _verb)
    return parser


def _add_looking_verbs(verbs: Any) -> None:
    """Add the verbs that look at experiments without a device."""
    show = _verb(verbs, "show", look.show_verb, "print every setting and who set it")
    _one_experiment(show, required=True, explanation="the later wins")
    form = show.add_mutually_exclusive_group()
    form.add_argument("--params", action="store_true", help="add the table of parameters")
    form.add_argument(
        "--graph",
        nargs="?",
        const=look.OUTPUT,
        metavar="FILE.svg",
        help="draw it as SVG, to a file or the output",
    )
    form.add_argument(
        "--as",
        dest="language",
        choices=("gin", "fiddle"),
        help="write a gin file, or Python code of a fiddle config, that makes the same tree",
    )
    names = "a gin file, several joined by commas, the folder of a run, or fdl:BUILDER"
    diff = _verb(verbs, "diff", look.diff_verb, "compare settings and sizes of two experiments")
    diff.add_argument("experiment", nargs="*", metavar="EXPERIMENT", help=names)
    check = _verb(verbs, "check", look.check_verb, "validate experiments without a device")
    check.add_argument(
        "experiment",
        nargs="*",
        metavar="EXPERIMENT",
        help=f"{names}; default: all complete ones that are shipped",
    )
    check.add_argument(
        "--trace",
        action="store_true",
        help="also trace the training step, which meets every sharding rule; seconds a file",
    )
    plan = _verb(
        verbs,
        "plan",
        planning.plan_verb,
        "compile for a described machine; predict memory and time",
    )
    planning.add_flags(plan)
    for verb in (diff, check, plan):
        verb.add_argument("--fdl_config", action="append", metavar="BUILDER", help=_BUILDER)
        _fdl_set(verb)
    _verb(verbs, "components", look.components_verb, "list what gin and fiddle can assemble")
    audit = _verb(
        verbs, "audit", look.audit_verb, "compare routing presets with Algorithm 1, token by token"
    )
    audit.add_argument(
        "--preset",
        action="append",
        help="a file of gin/moe/ by name, or a gin file; may be repeated; default: all",
    )
    audit.add_argument("--json", metavar="OUT", help="also write the rows to a file")
    _add_collectives(verbs)


def _add_collectives(verbs: Any) -> None:
    verb = _verb(verbs, "collectives", look.collectives_verb, "measure the devices' exchange")
    verb.add_argument("--devices", type=int, help="how many; default: all; on CPU simulated")
    verb.add_argument("--sizes", default="8MB,32MB", help="of a partition; default: the paper's")
    verb.add_argument("--runs", type=int, default=20, help="of each primitive; default: 20")
    verb.add_argument("--plot", type=Path, metavar="FILE", help="draw into a .png or .svg file")
    verb.add_argument(
        "--json",
        nargs="?",
        const=look.OUTPUT,
        metavar="OUT",
        help="write JSON instead of the table, to a file or the output",
    )


def _add_model_verbs(verbs: Any) -> None:
    """Add the verbs that use a trained model."""
    translate = _verb(verbs, "translate", _translate, "translate text with a trained model")
    translate.add_argument("text", nargs="*", help="default: lines of --file or standard input")
    translate.add_argument("--file", help="UTF-8 text, a sentence a line")
    translate.add_argument("--lang", help="its language; only warns if the model never saw it")
    translate.add_argument(
        "--json", action="store_true", help="JSON lines with all hypotheses and their scores"
    )
    score = _verb(verbs, "eval", _eval, "score a trained model on held-out text")
    score.add_argument("--split", default="test", help="test (default) or validation")
    score.add_argument("--languages", metavar="A,B", help="default: all")
    score.add_argument(
        "--baselines", metavar="FILE", help="JSON of bilingual scores, for delta BLEU"
    )
    score.add_argument("--max_examples", type=int, help="of each language; default: all")
    score.add_argument("--output", help="folder; default: MODEL_DIR/inference_eval/SPLIT_STEP")
    for verb in (translate, score):
        verb.add_argument("--model_dir", required=True, help="folder of a training run")
        verb.add_argument("--step", type=int, help="of the checkpoint; default: the newest")
        verb.add_argument("--batch_size", type=int, help="sentences at once; default: 32")
        _compile_cache(verb)


def _one_experiment(verb: argparse.ArgumentParser, *, required: bool, explanation: str) -> None:
    either = verb.add_mutually_exclusive_group(required=required)
    either.add_argument(
        "--gin_file", action="append", help=f"an experiment; may be repeated; {explanation}"
    )
    either.add_argument(
        "--fdl_config", metavar="BUILDER", help=f"an experiment of fiddle: {_BUILDER}"
    )
    _fdl_set(verb)


def _fdl_set(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--fdl_set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="set a value of the fiddle config; may be repeated",
    )


def _compile_cache(verb: argparse.ArgumentParser) -> None:
    """Add the flag of the verbs that compile a model for the devices at hand."""
    verb.add_argument(
        "--compile_cache",
        default="",
        metavar="DIR",
        help=f"where compiled programs are kept for the next start, or '{OFF}'; default: the "
        "folder that JAX_COMPILATION_CACHE_DIR names, or else ~/.cache/gshard_exp/compiled",
    )


def _verb(
    verbs: Any, name: str, function: Callable[..., int], summary: str
) -> argparse.ArgumentParser:
    verb = verbs.add_parser(
        name,
        help=summary,
        description=summary,
        epilog="--gin.NAME=VALUE sets a macro or a parameter; it wins over files.",
    )
    verb.set_defaults(verb=function)
    verb.add_argument(
        "--gin_search_paths", default="", metavar="A,B", help="where gin files may lie"
    )
    verb.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return verb
