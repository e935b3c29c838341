#!/usr/bin/env bash
# The whole experiment: bilingual baselines, the grid, their scores, the report. The same command
# goes on where it was stopped.
#   bash experiments/mini_m4/run.sh                    on the default corpus
#   bash experiments/mini_m4/run.sh /data/mine.tsv.xz  on a corpus of your own (gin/tasks/tsv.gin)
# Further arguments go to `gshard-exp sweep run` of both sweeps: --jobs=2, --set=BATCH_SIZE=16.
RUNS=runs/mini_m4
corpus=()
if [ $# != 0 ] && [[ $1 != --* ]]; then
    RUNS=runs/mini_m4_tsv
    # Found from here: what is read next goes to the root of the checkout.
    corpus=(--set=gin/tasks/tsv.gin "--set=TSV_PATH=\"$(realpath "$1")\"")
    shift
fi
. "$(dirname "${BASH_SOURCE[0]}")/../../.ci/environment.sh" data,corpus,report
# A language that the corpus lacks, or a point that fails, does not stop the rest.
status=0
for part in bilingual grid; do
    sweep=(experiments/mini_m4/sweeps/$part.gin "--gin.SWEEP_DIR=$RUNS/$part" "${corpus[@]}")
    gshard-exp sweep run "${sweep[@]}" "$@" || status=$?
    [ $status != 130 ] || exit 130  # stopped by Ctrl-C
done
gshard-exp sweep eval "$RUNS/bilingual" --baselines_to="$RUNS/baselines.json" || status=$?
gshard-exp sweep eval "$RUNS/grid" || status=$?
baselines=()  # there are none where no bilingual model has 20 test sentences
[ ! -f "$RUNS/baselines.json" ] || baselines=(--baselines="$RUNS/baselines.json")
gshard-exp report "$RUNS/grid" "${baselines[@]}" --published --reach=4,3.5,3.2,3.1,3
python experiments/mini_m4/claims.py "$RUNS/grid" "${baselines[@]}" > "$RUNS/grid/report/claims.md"
exit $status
