#!/usr/bin/env bash
# The main job: an environment of its own, real text, a small sparse Transformer, translations.
# Further arguments go to `gshard-exp train`, for instance --gin.TRAIN_STEPS=5000.
. "$(dirname "${BASH_SOURCE[0]}")/../../.ci/environment.sh" data,corpus
exec gshard-exp train --gin_file=experiments/quickstart/quickstart.gin "$@"
