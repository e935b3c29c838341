"""Folders of runs as training and evaluation leave them, made in no time from known laws."""

import json
from pathlib import Path

import numpy as np
import tiny_run

from gshard_exp.config import assemble, operative_config
from gshard_exp.train.experiment import Experiment

STEPS, EVERY = 400, 10
TOKENS_PER_STEP = 900.0  # without padding; 1024 positions
CODES = [f"l{i:02}" for i in range(30)]
LAYERS, EXPERTS = (4, 8), (4, 16)
ACTIVE = {4: 200_000, 8: 390_000}
SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"


def law(tokens, active):
    """The cross entropy that the runs follow, up to noise of half a per cent."""
    return 1.5 + 400.0 * np.asarray(tokens, float) ** -0.45 + 300.0 * active**-0.5


def make_sweep(folder: Path) -> Path:
    """Write a sweep of two depths by two numbers of experts, all done, and one point to come."""
    points = []
    for layers in LAYERS:
        for experts in EXPERTS:
            name = f"l{layers}-e{experts}"
            make_run(folder / name, layers=layers, experts=experts, seed=len(points))
            points.append(point(name, layers, experts))
    points.append(point("l12-e4", 12, 4))
    sweep = {"schema": 1, "name": "depth by experts", "base": ["tiny.gin"], "points": points}
    (folder / "sweep.json").write_text(json.dumps(sweep))
    return folder


def point(name, layers, experts):
    axes = {"layers": layers, "experts": experts}
    return {"name": name, "dir": name, "axes": axes, "bindings": [f"NUM_EXPERTS={experts}"]}


def make_run(folder: Path, *, layers=4, experts=4, seed=0, steps=STEPS, config=True) -> Path:
    """Write one run up to a step."""
    (folder / "train").mkdir(parents=True)
    random = np.random.default_rng(seed)
    active = ACTIVE.get(layers, 200_000)
    rows = [row(step, experts, active, random) for step in range(EVERY, steps + 1, EVERY)]
    write_lines(folder / "train" / "metrics.jsonl", rows)
    held_out = [
        {"step": step, "cross_ent_loss": float(law(step * TOKENS_PER_STEP, active)) + 0.1}
        for step in (steps // 2, steps)
    ]
    (folder / "training_eval" / "validation").mkdir(parents=True)
    write_lines(folder / "training_eval" / "validation" / "metrics.jsonl", held_out)
    evaluation = folder / "inference_eval" / f"test_{steps}"
    evaluation.mkdir(parents=True)
    (evaluation / "scores.json").write_text(json.dumps(scores(steps, layers, experts)))
    (folder / "data").mkdir()
    languages = [
        {"code": code, "name": code, "train": 10_000 - 300 * i} for i, code in enumerate(CODES)
    ]
    (folder / "data" / "languages.json").write_text(json.dumps({"languages": languages}))
    (folder / "run.json").write_text(json.dumps(record(layers, experts, active, steps, seed)))
    if config:
        bindings = [f"MODEL_DIR={folder}", f"NUM_EXPERTS={experts}", f"NUM_ENCODER_LAYERS={layers}"]
        assembled = assemble(Experiment, [tiny_run.TINY], [*bindings, f"TRAIN_STEPS={STEPS}"])
        (folder / "config.gin").write_text(operative_config(assembled))
    return folder


def write_lines(path: Path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def row(step, experts, active, random):
    loss = float(law(step * TOKENS_PER_STEP, active) * np.exp(random.normal() * 0.005))
    found = {
        "step": step,
        "loss": loss + 0.02,
        "cross_ent_loss_per_all_target_tokens": loss,
        "timing/seconds": 2.5,
        "timing/steps_per_second": 4.0,
        "timing/tokens_per_second": 4.0 * TOKENS_PER_STEP,
        "fraction_tokens_left_behind": 0.2 / step,
    }
    for stack in ("encoder", "decoder"):
        load = random.dirichlet([20.0] * experts)
        place = f"router/{stack}/layer_1"
        found |= {f"{place}/expert_load/{i}": float(share) for i, share in enumerate(load)}
        for metric in ("dropped_first", "dropped_second", "tokens_left_behind"):
            found[f"{place}/fraction_{metric}"] = float(0.4 / (1 + step / 50) * random.random())
    return found


def bleu(index, layers, experts):
    return 30.0 - 0.5 * index + layers / 2 + experts / 4


def scores(step, layers, experts):
    languages = {
        code: {
            "sentences": 50,
            "group": ("high", "middle", "low")[i // 10],
            "averaged": True,
            "bleu": bleu(i, layers, experts),
            "delta_bleu": bleu(i, layers, experts) - baseline(i),
        }
        for i, code in enumerate(CODES)
    }
    values = list(languages.values())
    mean = {key: float(np.mean([v[key] for v in values])) for key in ("bleu", "delta_bleu")}
    return {
        "step": step,
        "split": "test",
        "max_examples": None,
        "search": {"method": "FlatBeamSearch", "beam_size": 4},
        "metrics": {"bleu": SIGNATURE},
        "languages": languages,
        "averages": {"macro": {"languages": len(CODES), **mean}},
    }


def baseline(index):
    return 28.0 - 0.8 * index


def record(layers, experts, active, step, seed):
    seconds = step * 0.3 * layers
    return {
        "schema": 1,
        "seed": seed,
        "data": {"hash": "d41d8c"},
        "params_total": active * (1 + experts // 2),
        "params_active": active,
        "flops_per_token": 6 * active,
        "tokens_per_step": 1024,
        "train_steps": STEPS,
        "starts": [
            {
                "step": 0,
                "code": {"version": "0.1.0", "commit": None, "dirty": False},
                "python": "3.12.0",
                "packages": {"jax": "0.7.0"},
                "machine": {"platform": "cpu", "devices": 1, "memory_bytes": 2**33},
                "mesh": {"data": 1, "expert": 1, "model": 1},
            }
        ],
        "progress": {
            "step": step,
            "wall_seconds": seconds,
            "cpu_seconds": 1.9 * seconds,
            "core_seconds": 2 * seconds,
        },
        "finished": step == STEPS,
    }
