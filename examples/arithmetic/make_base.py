"""Makes the arithmetic demo's base model, tokenizer and data.

    python examples/arithmetic/make_base.py [--out DIR]

The task is sums and differences of two-digit numbers, one character per token: "47+38=" has the answer
"58", the digits of 85 from the last to the first, since that is the order in which carrying works them out.
A small Qwen2 is trained on worked examples only until about three sampled answers in ten are right;
reinforcement learning takes it from there.

Left out on purpose: differences below zero, a chat template, a learning-rate schedule. One seed and one
thread make the result the same on the same machine; another machine may round otherwise and stop elsewhere.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from zlib import crc32

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

ASSET = Path(__file__).parents[2] / "src" / "rondo" / "assets" / "arithmetic"
SPECIALS = ["<pad>", "<eos>"]
# More than the task needs: every one of the 32 ids decodes to something, and harder tasks can be written.
CHARACTERS = "0123456789+-*/=()<>.,:;?!%x^ \n"
BYTE_LEVEL_NAMES = {ord(" "): "Ġ", ord("\n"): "Ċ"}
PROMPT_TOKENS = 6
ANSWER_TOKENS = 4  # three digits and the end
EVAL_ROWS = 256
TRAIN_ROWS = 8192


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One row of the data files."""

    prompt: str  # "47+38="
    answer: str  # "58": the digits of 85, last digit first


def problems() -> list[Problem]:
    """Every problem, in the order of its text's checksum: shuffled, yet the same everywhere."""
    numbers = range(10, 100)
    sums = [Problem(prompt=f"{a}+{b}=", answer=str(a + b)[::-1]) for a in numbers for b in numbers]
    differences = [
        Problem(prompt=f"{a}-{b}=", answer=str(a - b)[::-1]) for a in numbers for b in range(10, a + 1)
    ]
    return sorted(sums + differences, key=lambda problem: crc32(problem.prompt.encode()))


def write_rows(path: Path, rows: list[Problem]) -> None:
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


def make_tokenizer() -> Qwen2Tokenizer:
    """Byte-level BPE without a merge: characters. AutoTokenizer reads any other kind as this one, for a Qwen2."""
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *CHARACTERS.translate(BYTE_LEVEL_NAMES)])}
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token=None,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def make_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,  # of 32: the smallest head that vLLM serves
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    return model


def encode(tokenizer: Qwen2Tokenizer, rows: list[Problem]) -> torch.Tensor:
    """Prompt, answer, end and padding of each row, shape [rows, PROMPT_TOKENS + ANSWER_TOKENS]."""
    texts = [row.prompt + row.answer + tokenizer.eos_token for row in rows]
    length = PROMPT_TOKENS + ANSWER_TOKENS
    return tokenizer(texts, padding="max_length", max_length=length, return_tensors="pt")["input_ids"]


@torch.no_grad()
def sampled_accuracy(model: Qwen2ForCausalLM, tokens: torch.Tensor, *, repeats: int) -> float:
    """Share of answers, sampled at temperature 1, that equal the row's answer up to its end token."""
    expected = tokens.repeat(repeats, 1)
    sampled = expected[:, :PROMPT_TOKENS]
    for _ in range(ANSWER_TOKENS):
        logits = model(input_ids=sampled, logits_to_keep=1).logits[:, -1]
        sampled = torch.cat([sampled, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    unlike = (sampled != expected) & (expected != model.config.pad_token_id)
    return 1 - unlike.any(dim=1).float().mean().item()


def batches(tokens: torch.Tensor, *, size: int, rng: random.Random) -> Iterator[torch.Tensor]:
    while True:
        yield tokens[rng.sample(range(len(tokens)), size)]


def warm_up(
    model: Qwen2ForCausalLM, tokens: torch.Tensor, *, target: float, lr: float, rng: random.Random
) -> int:
    """Supervised steps until sampled accuracy on some of the training rows reaches the target; returns how many."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    started = time.monotonic()
    for step, batch in enumerate(batches(tokens, size=256, rng=rng), start=1):
        labels = batch.masked_fill(batch == model.config.pad_token_id, -100)
        labels[:, :PROMPT_TOKENS] = -100
        loss = model(input_ids=batch, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            accuracy = sampled_accuracy(model, tokens[:512], repeats=2)
            seconds = time.monotonic() - started
            print(
                f"step {step:5d}  loss {loss.item():.3f}  sampled accuracy {accuracy:.3f}  {seconds:.0f} s",
                flush=True,
            )
            if accuracy >= target:
                return step
    raise AssertionError("batches never end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ASSET, help="folder to write (default: %(default)s)")
    parser.add_argument(
        "--target", type=float, default=0.3, help="sampled accuracy at which the warm-up stops"
    )
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of the warm-up")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    rows = problems()
    held_out, train = rows[:EVAL_ROWS], rows[EVAL_ROWS : EVAL_ROWS + TRAIN_ROWS]
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    steps = warm_up(
        model, encode(tokenizer, train), target=options.target, lr=options.lr, rng=random.Random(options.seed)
    )
    accuracy = sampled_accuracy(model, encode(tokenizer, held_out), repeats=8)
    print(f"{model.num_parameters():,} parameters, {steps} steps, held-out sampled accuracy {accuracy:.3f}")

    options.out.mkdir(parents=True, exist_ok=True)
    write_rows(options.out / "eval.jsonl", held_out)
    write_rows(options.out / "train.jsonl", train)
    tokenizer.save_pretrained(options.out)
    model.save_pretrained(options.out)


if __name__ == "__main__":
    main()
