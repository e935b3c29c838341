"""The command line: verbs to functions, and the only reader of argv."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gshard_exp.config import ConfigError, assemble, binding_from_flag, operative_config
from gshard_exp.errors import SettingError

# Exit statuses: 0 done, 1 the run failed, 2 a wrong setting, 130 stopped by the user.
FAILED, WRONG_SETTING, STOPPED = 1, 2, 130
OFF = "off"
QUICKSTART = "experiments/quickstart/quickstart.gin"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; return the exit status."""
    arguments, bindings = _parse(sys.argv[1:] if argv is None else list(argv))
    # TensorFlow and oneDNN report on themselves at start-up; errors still come through.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    try:
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

    assembled = _assemble_experiment(arguments, bindings)
    config = operative_config(assembled)
    with _explained(assembled):
        if arguments.dry_run:
            return _dry_run(assembled.tree, config)
        _keep_compiled_programs(arguments)
        try:
            loop.train(assembled.tree, files={"config.gin": config}, report=_say)
        except loop.NonFiniteLossError as error:
            print(f"error: {error}", file=sys.stderr)
            return FAILED
        except loop.Interrupted as request:
            print(request, file=sys.stderr)
            return STOPPED
    _say(f"outputs: {os.path.abspath(assembled.tree.model_dir)}")
    return 0


def _dry_run(experiment: Any, config: str) -> int:
    from gshard_exp.train.experiment import plan_experiment
    from gshard_exp.train.state import model_info

    plan, _ = plan_experiment(experiment)
    _say(config)
    _say(model_info(plan))
    _say("dry run: settings are valid; nothing was compiled or written")
    return 0


def _keep_compiled_programs(arguments: argparse.Namespace) -> None:
    from gshard_exp.compile_cache import keep_compiled_programs

    if arguments.compile_cache == OFF:
        return
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    folder = arguments.compile_cache or os.path.join(caches, "gshard_exp", "compiled")
    note = keep_compiled_programs(Path(folder).expanduser())
    if note:
        _say(note)


def _corpus(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    from gshard_exp.data import report

    assembled = _assemble_experiment(arguments, bindings)
    with _explained(assembled):
        report.print_corpus(_translation_tasks(assembled))
    return 0


def _tasks(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    from gshard_exp.data import report

    assembled = _assemble_experiment(arguments, bindings)
    with _explained(assembled):
        report.print_tasks(_translation_tasks(assembled), samples=arguments.samples)
    return 0


def _show(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    from gshard_exp.config import reading, show

    files = [reading.gin_file_of(name) for name in arguments.gin_file]
    subject = reading.read_files(", ".join(files), files, bindings, _search_paths(arguments))
    _say(show.show(subject, arguments.params))
    return 0


def _diff(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    from gshard_exp.config import diff, reading

    search_paths = _search_paths(arguments)
    a, b = (reading.read_subject(name, bindings, search_paths) for name in arguments.experiment)
    _say(diff.diff(a, b))
    return 0


def _check(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    from gshard_exp.config import validate

    names = arguments.experiment or validate.complete_experiments()
    verdicts = [validate.validate(name, bindings, _search_paths(arguments)) for name in names]
    _say(validate.summary(verdicts))
    return WRONG_SETTING if any(verdict.problem for verdict in verdicts) else 0


def _plan(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    from gshard_exp.config import planning

    return planning.plan(arguments, bindings, _search_paths(arguments), _say)


def _components(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    from gshard_exp.config import components

    _say(components.listing())
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

    files = arguments.gin_file or [QUICKSTART]
    return assemble(Experiment, files, bindings, _search_paths(arguments))


def _search_paths(arguments: argparse.Namespace) -> list[str]:
    return [path for path in arguments.gin_search_paths.split(",") if path]


class _explained:
    """Adds to a setting error of a lower room where the settings were made."""

    def __init__(self, assembled: Any) -> None:
        self._assembled = assembled

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, SettingError):
            raise self._assembled.explain(error) from error


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split gin bindings (`--gin.NAME=VALUE`) from the arguments that argparse knows."""
    bindings = [binding_from_flag(word) for word in argv if word.startswith("--gin.")]
    return _parser().parse_args([w for w in argv if not w.startswith("--gin.")]), bindings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gshard-exp", description="GShard experiments from gin files, on any mesh."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    train = _verb(verbs, "train", _train, "train, or go on with, the experiment of a gin file")
    _gin_file(train, required=True, explanation="the later wins")
    train.add_argument(
        "--dry_run",
        action="store_true",
        help="assemble and validate; print settings and parameters; compile and write nothing",
    )
    _compile_cache(train)
    corpus = _verb(verbs, "corpus", _corpus, "build a corpus and report what cleaning did")
    tasks = _verb(verbs, "tasks", _tasks, "list languages, pairs, scripts and samples")
    tasks.add_argument("--samples", type=int, default=1, help="pairs to show for each language")
    for verb in (corpus, tasks):
        _gin_file(verb, required=False, explanation=f"default: {QUICKSTART}")
    _add_looking_verbs(verbs)
    return parser


def _add_looking_verbs(verbs: Any) -> None:
    """Add the verbs that look at experiments without a device."""
    show = _verb(verbs, "show", _show, "print every setting and who set it")
    _gin_file(show, required=True, explanation="the later wins")
    show.add_argument("--params", action="store_true", help="add the table of parameters")
    names = "a gin file, several joined by commas, or the folder of a run"
    diff = _verb(verbs, "diff", _diff, "compare settings and sizes of two experiments")
    diff.add_argument("experiment", nargs=2, metavar="EXPERIMENT", help=names)
    check = _verb(verbs, "check", _check, "validate experiments without a device")
    check.add_argument(
        "experiment",
        nargs="*",
        metavar="EXPERIMENT",
        help=f"{names}; default: all complete ones that are shipped",
    )
    _add_plan(verbs)
    _verb(verbs, "components", _components, "list what a gin file can assemble")


def _add_plan(verbs: Any) -> None:
    plan = _verb(verbs, "plan", _plan, "compile for a described machine; predict memory and time")
    for flag, metavar, default, explanation in (
        ("--gin_file", "F", None, "an experiment: files joined by commas; may be repeated"),
        ("--topology", "T", None, "v3:32x32, v5e:16x16, cpu:8, ...; may be repeated"),
    ):
        plan.add_argument(
            flag, action="append", required=True, metavar=metavar, default=default, help=explanation
        )
    plan.add_argument("--tokens_per_core", type=int, help="source tokens; default: the gin file's")
    plan.add_argument(
        "--mesh",
        default="",
        metavar="auto|file|DxExM",
        help="sizes of data, expert and model; default: auto, or file if --gin sets mesh sizes",
    )
    plan.add_argument("--tokens", type=float, default=1e12, help="source tokens of a training")
    plan.add_argument(
        "--search", action="store_true", help="try meshes, dispatch and recomputation; rank them"
    )
    plan.add_argument("--json", default="", metavar="OUT", help="write the plans")
    plan.add_argument("--hlo_dir", default="", metavar="D", help="keep compiled modules there")


def _gin_file(verb: argparse.ArgumentParser, *, required: bool, explanation: str) -> None:
    verb.add_argument(
        "--gin_file",
        action="append",
        required=required,
        help=f"an experiment; may be repeated; {explanation}",
    )


def _compile_cache(verb: argparse.ArgumentParser) -> None:
    """Add the flag of the verbs that compile."""
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


def _say(text: str) -> None:
    print(text, flush=True)
