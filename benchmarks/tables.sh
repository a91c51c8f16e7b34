#!/usr/bin/env bash
# Makes tables of results/ again, on this machine:
#   benchmarks/tables.sh MACHINE TABLE ...
# TABLE is one of
#   mnist|resnet50|mnist-99|cifar10|progressive|smaller|decoding|peers|peers-resnet50|loading|loading-peers|staircases|scaling|airbench
# It reads $MNIST (data/mnist), $CIFAR10 (data/cifar10) and $IMAGENET (data/imagenet), and for peers-resnet50
# pytorch/examples in ../examples, for airbench github.com/KellerJordan/cifar10-airbench in ../cifar10-airbench.
# The records go to results/MACHINE-TABLE. Then run: python tools/report.py
# A table takes at most $MINUTES (25), but loading as long as it needs, and staircases 30 minutes more. With several
# GPUs, start one for each (scaling takes all), with CUDA_VISIBLE_DEVICES and taskset.
set -euo pipefail
root=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")
cd -- "$root"
machine=${1:?it needs the name of the machine, such as h100}
python=${PYTHON:-python3}
mnist=${MNIST:-data/mnist}
cifar10=${CIFAR10:-data/cifar10}
imagenet=${IMAGENET:-data/imagenet}
limit=(--minutes "${MINUTES:-25}")
mode=(--compile_mode reduce-overhead)
best="cache amp channels_last compile fused cudnn ${mode[*]}"
eager="cache amp channels_last fused"
quick="cache amp channels_last graphs fused"
compiled="amp channels_last compile fused ${mode[*]}"
conv11=(--width 64 --batch_size 512)
resnet50=(--model resnet50 --image_size 224 --augment resized --batch_size 256)

for table in "${@:2}"; do
  to=(--result_dir "results/$machine-$table")
  case $table in
    mnist)
      command=(./running.sh 5 "$mnist" --part staircase "${limit[@]}" "${to[@]}"
        -- "${conv11[@]}" "${mode[@]}") ;;
    resnet50)
      command=(./running.sh 4 "$imagenet" --part staircase --without LMDB --without cache "${limit[@]}" "${to[@]}"
        -- "${resnet50[@]}" "${mode[@]}") ;;
    mnist-99)
      command=("$python" benchmarks/accuracy.py "$mnist" --set "$quick" --kept "$quick" --goal 0.99
        "${limit[@]}" "${to[@]}" -- "${conv11[@]}" --epochs 5) ;;
    cifar10)
      command=("$python" benchmarks/accuracy.py "$cifar10" --set "$quick cudnn" --kept "$quick cudnn" --goal 0.9
        "${limit[@]}" "${to[@]}" -- "${conv11[@]}" --augment crop --epochs 100 --lr 0.4) ;;
    progressive)
      command=("$python" benchmarks/accuracy.py "$cifar10" --set "$eager"
        --set "$eager progressive" --only "cache*" --goal 0.8 "${limit[@]}" "${to[@]}"
        -- --model resnet50 --image_size 128 --augment crop --epochs 20 --batch_size 1024 --lr 0.4) ;;
    smaller)
      command=("$python" benchmarks/accuracy.py "$cifar10" --set "$eager"
        --set "$eager --image_size 96 --val_size 128" --only "cache*" --goal 0.8 "${limit[@]}"
        "${to[@]}" -- --model resnet50 --image_size 128 --augment resized --epochs 20 --batch_size 1024 --lr 0.4) ;;
    decoding)
      command=("$python" benchmarks/peers.py train "$imagenet" --best "DALI $compiled" --best "cache $compiled"
        --only "*DALI*" "*cache*" "${limit[@]}" "${to[@]}" -- "${resnet50[@]}" --batch_size 1024 --epochs 4) ;;
    peers)
      command=("$python" benchmarks/peers.py train "$mnist" --best "$best" "${limit[@]}" "${to[@]}"
        -- "${conv11[@]}") ;;
    peers-resnet50)
      command=("$python" benchmarks/peers.py train "$imagenet" --best "DALI $compiled" --best "cache $compiled"
        --examples ../examples --only train.py "*DALI*" "*cache*" "Lightning + *" "imagenet*" "${limit[@]}" "${to[@]}"
        -- "${resnet50[@]}" --epochs 4) ;;
    loading)
      command=(./loading.sh loader_DALI.py "$imagenet" "${to[@]}" --batch_size 768) ;;
    loading-peers)
      command=("$python" benchmarks/peers.py load "$imagenet" "${limit[@]}" "${to[@]}" -- --batch_size 768 --epochs 5) ;;
    staircases)
      larger=(--image_size 64 "${conv11[@]}")
      for number in {1..10}; do
        ./running.sh 4 "$cifar10" --part staircase --without DALI --without LMDB --minutes 3 \
          --result_dir "runs/$machine-staircases/$number" -- "${larger[@]}" "${mode[@]}" || [[ $? = 1 ]]
      done
      command=("$python" benchmarks/peers.py train "$cifar10" --ends "runs/$machine-staircases"/*/running.json
        --only "*staircases" --runs 5 "${limit[@]}" "${to[@]}" -- "${larger[@]}" --epochs 6) ;;
    scaling)
      command=("$python" benchmarks/scaling.py "$imagenet" --set "cache $compiled" --set "DALI $compiled"
        "${limit[@]}" "${to[@]}" -- "${resnet50[@]}" --epochs 4) ;;
    airbench)
      command=("$python" benchmarks/airbench.py ../cifar10-airbench/legacy/airbench94.py "$cifar10" "${to[@]}") ;;
    *)
      echo "tables.sh: error: no table $table" >&2
      exit 2 ;;
  esac
  "${command[@]}" || [[ $? = 1 ]]  # 1: a row failed, and its table says so
done
