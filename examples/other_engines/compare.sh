#!/usr/bin/env bash
# Runs another engine's server at each draft length and aquiline beside it on the same prompts, writes the JSON of both,
# and asks the gate.
#
#   examples/other_engines/compare.sh ENGINE TARGET DRAFT OUT
#
# ENGINE: trtllm, vllm, sglang, or aquiline (its own server, to try the recipe). TARGET and DRAFT: folders, or names of
# known pairs where ENGINE is aquiline. CONTEXTS, LENGTHS, NEW_TOKENS, REPEATS, BATCH, PORT and LEAST (the speed over
# theirs that the gate asks for) may be set. Length 0 is the server without a draft. Results are in OUT/CONTEXT-kLENGTH.
set -euo pipefail

engine=$1 target=$2 draft=$3 out=$4
contexts=${CONTEXTS:-8192 16384 32768} lengths=${LENGTHS:-0 2 3 4 5} new_tokens=${NEW_TOKENS:-512}
repeats=${REPEATS:-6} batch=${BATCH:-1} port=${PORT:-8100} least=${LEAST:-1.0}
longest=$(($(printf '%s\n' $contexts | sort -n | tail -1) + new_tokens + 64))
url=http://127.0.0.1:$port/v1 model=target server=
work=$(mktemp -d)
trap 'stop; rm -rf "$work"' EXIT

serve_trtllm() { # its name for the model is the folder's; it drafts chains only
  model=$(basename "$target")
  { echo "kv_cache_config: {enable_block_reuse: false}"
    if (($1)); then echo "speculative_config: {decoding_type: Eagle3, max_draft_len: $1, speculative_model: $draft}"; fi
  } > "$work/trtllm.yaml"
  trtllm-serve "$target" --host 127.0.0.1 --port "$port" --max_seq_len "$longest" --max_batch_size "$batch" --config "$work/trtllm.yaml"
}

serve_vllm() {
  local speculative=()
  if (($1)); then
    speculative=(--speculative-config "{\"method\": \"eagle3\", \"model\": \"$draft\", \"num_speculative_tokens\": $1}")
  fi
  vllm serve "$target" --host 127.0.0.1 --port "$port" --served-model-name target --max-model-len "$longest" \
    --max-num-seqs "$batch" --no-enable-prefix-caching "${speculative[@]}"
}

serve_sglang() { # a chain is a tree of one branch; the root counts as a draft token
  local speculative=()
  if (($1)); then
    speculative=(--speculative-algorithm EAGLE3 --speculative-draft-model-path "$draft" --speculative-num-steps "$1"
      --speculative-eagle-topk 1 --speculative-num-draft-tokens $(($1 + 1)))
  fi
  python -m sglang.launch_server --model-path "$target" --host 127.0.0.1 --port "$port" --served-model-name target \
    --context-length "$longest" --max-running-requests "$batch" --disable-radix-cache "${speculative[@]}"
}

serve_aquiline() {
  local speculative=(--drafter none)
  if (($1)); then speculative=(--drafter chain --num-spec-tokens "$1"); fi
  aquiline serve --target "$target" --draft "$draft" --host 127.0.0.1 --port "$port" --served-model-name target \
    --max-num-seqs "$batch" --no-prefix-cache "${speculative[@]}"
}

start() {
  "serve_$engine" "$1" > "$work/server.log" 2>&1 &
  server=$!
  for ((second = 0; second < 1800; second++)); do
    if curl --silent --fail "$url/models" > /dev/null; then return; fi
    if ! kill -0 "$server" 2> /dev/null; then break; fi
    sleep 1
  done
  echo "$engine did not start:" >&2
  tail -20 "$work/server.log" >&2
  exit 2
}

stop() {
  if [[ -n $server ]]; then
    pkill -TERM -P "$server" || true # the engine that the function above started
    wait "$server" 2> /dev/null || true
    server=
  fi
}

worst=0
for length in $lengths; do
  start "$length"
  peer=openai:$url#$model chains=(--num-spec-tokens 3)
  if ((length)); then peer=openai:eagle=$length:$url#$model chains=(--num-spec-tokens "$length"); fi
  for context in $contexts; do
    folder=$out/$context-k$length
    aquiline compare --target "$target" --draft "$draft" --peer "$peer" --prompt-tokens "$context" --batch "$batch" \
      --new-tokens "$new_tokens" --repeats "$repeats" "${chains[@]}" --out "$folder"
    code=0
    aquiline gate "$folder" --over-peers "$least" || code=$?
    if ((code == 1 || worst == 0)); then worst=$code; fi # a limit that is failed outweighs those not decided
  done
  stop
done
exit "$worst"
