set -u
export PYTHONUNBUFFERED=1 PYTHONPATH=/opt/v:src TORCHINDUCTOR_COMPILE_THREADS=1 HF_HUB_OFFLINE=1
echo "== learn"
timeout 230 python -m rondo train configs/one-gpu.toml --run-dir /tmp/learn --set schedule.periods=30 2>&1 | grep -v "vLLM loading" | tail -45
mkdir -p $OUT/learn; cp /tmp/learn/metrics.jsonl /tmp/learn/evals.jsonl /tmp/learn/logs/engine-0.log /tmp/learn/logs/trainer-0.log $OUT/learn/ 2>/dev/null
echo "== publication"
timeout 270 python bench/publication.py --backend vllm --size 1.5 --json $OUT/publication.json 2>&1 | grep -v Writing | tail -30
ps aux | grep -c "[v]llm"
