"""Makes the arithmetic demo's base model, tokenizer and data.

    python examples/arithmetic/make_base.py [--out DIR]

The task is sums and differences of two-digit numbers, one character per token: "47+38=" has the answer
"58", the digits of 85 from the last to the first, since that is the order in which carrying works them out.
A small Qwen2 learns it in two lessons. The first, of right answers, stops when most sampled answers are right.
The second, of answers with wrong digits among them, stops when fewer than three in ten are: the skill is there
and the habit is not, and reinforcement learning turns one into the other within minutes. (A base that had the
first lesson alone, cut short at three in ten, needs about four times the samples.)

Left out on purpose: differences below zero, a chat template, a learning-rate schedule. One seed and one
thread make the result the same on the same machine; another machine may round otherwise and stop elsewhere.
"""

import argparse
import json
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
SKILLED, SLOPPY = 0.7, 0.3  # sampled accuracy at which the lessons stop
WRONG_DIGITS = 0.5  # share of digits that the second lesson draws at random; less would not go down to SLOPPY


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One row of the data files."""

    prompt: str  # "47+38="
    answer: str  # "58": the digits of 85, last digit first


def problems() -> list[Problem]:
    """Sums and differences in turn, each in the order of their checksums: shuffled, yet the same everywhere."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    sums = [Problem(prompt=f"{a}+{b}=", answer=str(a + b)[::-1]) for a, b in pairs]
    differences = [Problem(prompt=f"{a}-{b}=", answer=str(a - b)[::-1]) for a, b in pairs if a >= b]
    # There are half as many differences as sums, so that half of the sums goes unused.
    in_turn = zip(sorted(sums, key=checksum), sorted(differences, key=checksum), strict=False)
    return [problem for pair in in_turn for problem in pair]


def checksum(problem: Problem) -> int:
    return crc32(problem.prompt.encode())


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


def with_wrong_digits(tokens: torch.Tensor, *, share: float, digits: torch.Tensor) -> torch.Tensor:
    """The rows with some digits of their answers drawn at random."""
    wrong = (torch.rand(tokens.shape) < share) & torch.isin(tokens, digits)
    wrong[:, :PROMPT_TOKENS] = False
    return torch.where(wrong, digits[torch.randint(len(digits), tokens.shape)], tokens)


def train_step(model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    labels = tokens.masked_fill(tokens == model.config.pad_token_id, -100)
    labels[:, :PROMPT_TOKENS] = -100
    model(input_ids=tokens, labels=labels).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def warm_up(model: Qwen2ForCausalLM, tokens: torch.Tensor, *, digits: torch.Tensor) -> None:
    """Both lessons. Accuracy is probed on training rows, so that the held-out ones decide nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    step, accuracy = 0, 0.0
    while accuracy < SKILLED:
        for _ in range(20):
            train_step(model, optimizer, tokens[torch.randint(len(tokens), (256,))])
        step, accuracy = step + 20, sampled_accuracy(model, tokens[:512], repeats=2)
        report("right answers", step, accuracy)

    optimizer.param_groups[0]["lr"] = 3e-4
    while accuracy > SLOPPY:
        for _ in range(5):
            batch = tokens[torch.randint(len(tokens), (256,))]
            train_step(model, optimizer, with_wrong_digits(batch, share=WRONG_DIGITS, digits=digits))
        step, accuracy = step + 5, sampled_accuracy(model, tokens[:512], repeats=2)
        report("wrong digits", step, accuracy)


def report(lesson: str, step: int, accuracy: float) -> None:
    print(f"{lesson:14s}  step {step:4d}  sampled accuracy {accuracy:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ASSET, help="folder to write (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    rows = problems()
    held_out, train = rows[:EVAL_ROWS], rows[EVAL_ROWS:]
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    warm_up(model, encode(tokenizer, train), digits=torch.tensor(tokenizer("0123456789")["input_ids"]))
    accuracy = sampled_accuracy(model, encode(tokenizer, held_out), repeats=8)
    print(f"{model.num_parameters():,} parameters, held-out sampled accuracy {accuracy:.3f}")

    options.out.mkdir(parents=True, exist_ok=True)
    write_rows(options.out / "eval.jsonl", held_out)
    write_rows(options.out / "train.jsonl", train)
    tokenizer.save_pretrained(options.out)
    model.save_pretrained(options.out)
    (options.out / "model.safetensors").chmod(0o644)  # written for its owner alone, which a wheel would keep


if __name__ == "__main__":
    main()
