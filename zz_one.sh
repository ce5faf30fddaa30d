set -u
export PYTHONUNBUFFERED=1 PYTHONPATH=/opt/v:src TORCHINDUCTOR_COMPILE_THREADS=1 HF_HUB_OFFLINE=1
nvidia-smi --query-gpu=name,memory.total,memory.used --format=csv
echo "== publication"
timeout 200 python bench/publication.py --backend vllm --size 1.5 --json $OUT/publication.json 2>&1 | grep -v Writing | tail -30
echo "== learn"
timeout 240 python -m rondo train configs/one-gpu.toml --run-dir /tmp/learn --set schedule.periods=30 2>&1 | tail -45
tail -n 1 /tmp/learn/metrics.jsonl
mkdir -p $OUT/learn; cp /tmp/learn/metrics.jsonl /tmp/learn/evals.jsonl /tmp/learn/logs/engine-0.log /tmp/learn/logs/trainer-0.log $OUT/learn/ 2>/dev/null
ps aux | grep -c "[v]llm"
