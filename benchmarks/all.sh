#!/usr/bin/env bash
# Measures everything again on the GPUs of this machine, the most valuable first.
#
#   benchmarks/all.sh [FOLDER]      FOLDER: where rows and the state go; default benchmarks/results
#
# Resumable: a step that ended is not run again (FOLDER/.all-<GPU>/NAME.done; delete it to run the
# step again). Rows are appended to FOLDER/<date>-<GPU>-all.jsonl when a step ends, or at the next
# start if it was killed. LIST=1 prints the steps and their seconds, and runs nothing.
set -u
cd "$(dirname "$0")/.."
folder=${1:-benchmarks/results}
gpu=${GPU:-$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1 | tr 'A-Z ' 'a-z-' | sed 's/nvidia-//')}
gpus=${GPUS:-$(nvidia-smi -L 2>/dev/null | wc -l)}
[ -n "$gpu" ] || { echo "all.sh needs an NVIDIA GPU: nvidia-smi found none" >&2; exit 2; }
jobs=$(($(nproc) < 16 ? $(nproc) : 16)) # processes that check and compile
state=$folder/.all-$gpu rows=$folder/$(date +%F)-$gpu-all.jsonl failed=0

keep() { # the rows of a step
    [ -s "$state/$1.jsonl" ] && cat "$state/$1.jsonl" >>"$rows"
    rm -f "$state/$1.jsonl"
}

step() { # NAME SECONDS COMMAND...; FILE in the command is where its rows go
    local name=$1 seconds=$2 code
    shift 2
    if [ -n "${LIST:-}" ]; then
        echo "$seconds $name: $*"
        return
    fi
    [ -e "$state/$name.done" ] && return
    mkdir -p "$state"
    keep "$name"
    echo "== $name, at most $seconds s: $*"
    timeout -k 10 "$seconds" "${@/#FILE/$state/$name.jsonl}"
    code=$?
    keep "$name"
    if [ $code -eq 0 ]; then
        touch "$state/$name.done"
    else
        echo "== $name ended with exit code $code; it is run again at the next start" >&2
        failed=1
    fi
}

ops() { # NAME SECONDS OP...: their listed cases, beside every peer that is installed
    local name=$1 seconds=$2
    shift 2
    step "$name" "$((seconds + 20))" tilewright bench "$@" --jobs "$jobs" --seconds "$seconds" --json FILE
}

generate() { # NAME SECONDS OPTION...
    local name=$1 seconds=$2
    shift 2
    step "$name" "$seconds" tilewright generate "$@" --engine graph --prompt-tokens 32 --max-new-tokens 50 --compare --json FILE
}

if [ "$gpus" -ge 2 ]; then
    generate two-qwen 70 --model Qwen2-7B --tp 2 --batch 16
    generate two-llama 70 --model Llama-3.1-8B --tp 2
    generate two-deepseek 70 --model DeepSeek-V2-Lite --tp 2
    generate two-qwen-nccl 70 --model Qwen2-7B --tp 2 --batch 16 --nccl
    step two-tests 300 python -m pytest -q tests/gpu/test_parallel_gpu.py
fi
if [ "$gpus" -ge 4 ]; then
    generate four-qwen 80 --model Qwen2-7B --tp 4 --batch 16
fi
ops attention 60 attention mla
ops decode 60 attention_decode mla_decode sparse_index sparse_decode merge_states kv_append
ops products 70 matmul bmm
ops experts 60 grouped_gemm moe quantized_moe moe_route rms_norm_route
generate qwen 60 --model Qwen2-7B --batch 16 --compiled
generate llama 60 --model Llama-3.1-8B --compiled
generate deepseek 60 --model DeepSeek-V2-Lite --compiled
step whole-models 110 tilewright bench --suite decode --seconds 85 --json FILE
step playbook 165 tilewright bench --suite playbook --seconds 145 --json FILE
ops rows 50 rms_norm layer_norm softmax silu_mul rope dropout
ops small 45 quantize_fp8 rms_norm_quant silu_mul_quant embedding argmax sample adjust_logits rms_norm_matmul
ops newest 45 quantized_matmul mx_matmul quantize_mx gated_delta_rule ssd causal_conv1d rms_norm_gated
step megakernel 40 python benchmarks/megakernel.py Llama-3.2-1B --json FILE
step prompt 40 python benchmarks/prefill.py Llama-3.1-8B --json FILE
step start 40 python benchmarks/start.py Llama-3.1-8B --json FILE
step ladder 60 tilewright learn attention --seq 1024,2048,4096,8192 --json FILE
step table 95 tilewright tune --model Llama-3.1-8B
step tests 240 python -m pytest -q tests/gpu -n 14 --deselect tests/gpu/test_parallel_gpu.py
[ -n "${LIST:-}" ] || echo "rows: $rows"
exit $failed
