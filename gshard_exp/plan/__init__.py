"""Plans: what a training step of any gin file takes on a machine that is not there."""
