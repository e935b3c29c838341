"""What the command line says about runners. Imports neither t5x nor JAX."""

import argparse

OURS, T5X = "gshard_exp", "t5x"


def add_runner(train: argparse.ArgumentParser) -> None:
    """Let `train` choose whose training loop runs; no other verb asks."""
    train.add_argument(
        "--runner",
        choices=(OURS, T5X),
        default=OURS,
        help="whose training loop: ours, or t5x's with its plain Trainer (its MoeTrainer would "
        "multiply the gradients of experts by the partitions of the expert axis; they are whole)",
    )


def add_checkpoint(convert: argparse.ArgumentParser) -> None:
    """Let `convert` name what it reads."""
    convert.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a folder checkpoint_N of either runner; the experiment's MODEL_DIR takes the other's",
    )
