#!/usr/bin/env bash
# Everything that only a GPU can show, from the root of the repository: the tests, 100,000 steps of
# random traffic and the sanitizer side by side. (Measure alone: bench_graphs.py, bench_decode.py.)
# Usage: bash tests/benchmarks/on_gpu.sh [FOLDER]   (results and logs go to FOLDER)
set -uo pipefail
out=${1:-gpu-results}
mkdir -p "$out"
export PYTHONPATH=$PWD OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1

fuzzers=()
for seed in 1 2 3 4; do
  dtype=float32 && ((seed % 2)) && dtype=bfloat16
  python3 tests/benchmarks/fuzz_graphs.py 25000 "${seed}0000000" $dtype \
    "$((seed > 2))" >"$out/fuzz$seed.log" 2>&1 &
  fuzzers+=($!)
done
for tool in memcheck racecheck; do
  for script in graphs kernels; do
    env=(env) # torch's cache hides what lies between two tensors of a segment
    [ "$script" = kernels ] && env+=(PYTORCH_NO_CUDA_MEMORY_CACHING=1)
    "${env[@]}" timeout 280 compute-sanitizer --tool $tool \
      --kernel-name-exclude kernel_substring=cudnn \
      --error-exitcode 9 python3 "tests/benchmarks/sanitize_$script.py" \
      >"$out/$tool-$script.log" 2>&1
    echo "$tool $script: exit code $?" >>"$out/sanitizer.log"
  done
done &
python3 -m pytest -q -n 8 -p no:cacheprovider --ignore tests/test_smollm2.py \
  --deselect tests/test_graph_fuzz.py::test_no_wrong_token tests >"$out/tests.log" 2>&1
failed=$?
tail -n 30 "$out/tests.log"
for fuzzer in "${fuzzers[@]}"; do wait "$fuzzer" || failed=1; done
wait
grep -q "exit code [^0]" "$out/sanitizer.log" && failed=1
cat "$out/sanitizer.log"
tail -qn 1 "$out"/fuzz*.log
exit $failed
