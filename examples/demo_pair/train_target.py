"""Train the demo target further: timed stages of growing context, Muon for matrices, AdamW for the rest.

    python train_target.py --init DIR --tokenizer tokenizer.json --corpus corpus --out DIR --stages 1024:8:45 2048:4:15

Each stage is CONTEXT:ROWS:MINUTES. One learning-rate schedule spans them all: a short warm-up, constant for the first
half, then linear decay. Without --init a new model of the same shape is trained from scratch. Pausing the process
does not shorten the training: a step counts for at most 30 s. The loss on held-out files is printed for every stage,
before and after, so that a continuation that does not help is seen and thrown away.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.optim import _muon
from transformers import LlamaConfig, LlamaForCausalLM

HAS_BF16 = torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def newton_schulz_float32(grad: torch.Tensor, coefficients, steps: int, eps: float) -> torch.Tensor:
    """Muon's orthogonalisation in float32, for CPUs whose bf16 matrix products are emulated."""
    a, b, c = coefficients
    x = grad.T if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, b * gram + c * gram @ gram, x, beta=a)
    return x.T if grad.size(0) > grad.size(1) else x


def new_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096, hidden_size=384, intermediate_size=1024, num_hidden_layers=10,
            num_attention_heads=6, num_key_value_heads=2, head_dim=64, max_position_embeddings=4096,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, rms_norm_eps=1e-5,
            tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=None,
        )
    )  # fmt: skip


def sample_rows(data: np.ndarray, context: int, rows: int, rng: np.random.Generator) -> torch.Tensor:
    starts = rng.integers(0, len(data) - context - 1, rows)
    return torch.from_numpy(np.stack([data[s : s + context + 1] for s in starts]).astype(np.int64)).to(DEVICE)


def loss_of(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    with torch.autocast(DEVICE, torch.bfloat16, enabled=HAS_BF16):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, data: np.ndarray, context: int, windows: int = 16) -> float:
    rng = np.random.default_rng(1)
    return sum(loss_of(model, sample_rows(data, context, 1, rng)).item() for _ in range(windows)) / windows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init", type=Path, help="checkpoint to continue from")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json the corpus was made with")
    parser.add_argument("--corpus", type=Path, required=True, help="folder with train.bin and held_out.bin")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", nargs="+", default=["1024:8:45", "2048:4:15"], help="CONTEXT:ROWS:MINUTES")
    parser.add_argument("--lr", type=float, default=0.01, help="Muon's peak learning rate; AdamW's is 0.15 of it")
    args = parser.parse_args()

    if not HAS_BF16:
        _muon._zeropower_via_newtonschulz = newton_schulz_float32
    torch.manual_seed(0)
    train, held_out = (np.memmap(args.corpus / f"{s}.bin", dtype=np.uint16, mode="r") for s in ("train", "held_out"))
    model = (
        LlamaForCausalLM.from_pretrained(args.init, dtype=torch.float32, trust_remote_code=False)
        if args.init
        else new_model()
    )
    model.to(DEVICE).train()
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr, momentum=0.95, weight_decay=0.0, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=0.15 * args.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    stages = [tuple(float(x) for x in stage.split(":")) for stage in args.stages]
    total_s = 60 * sum(minutes for _, _, minutes in stages)

    def report(moment: str) -> None:
        losses = ", ".join(f"{c}: {held_out_loss(model, held_out, c):.3f}" for c in (256, 1024, 2048, 4095))
        print(f"{moment}: held-out loss by context {losses}", flush=True)

    def save() -> None:
        model.save_pretrained(args.out)
        saved = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.bfloat16, trust_remote_code=False)
        saved.save_pretrained(args.out)
        (args.out / "tokenizer.json").write_bytes(args.tokenizer.read_bytes())

    report("start")
    rng = np.random.default_rng(2)
    spent_s, step, num_tokens = 0.0, 0, 0
    for index, (context, rows, _) in enumerate(stages):
        end_s = 60 * sum(minutes for _, _, minutes in stages[: index + 1])
        while spent_s < end_s:
            began = time.perf_counter()
            done = spent_s / total_s
            scale = min(1.0, (step + 1) / 40) * (1.0 if done < 0.5 else max(0.01, 2 * (1 - done)))
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            for group, peak in zip(groups, peaks, strict=True):
                group["lr"] = peak * scale
            loss = loss_of(model, sample_rows(train, int(context), int(rows), rng))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            num_tokens += int(context) * int(rows)
            spent_s += min(30.0, time.perf_counter() - began)
            if step % 20 == 0:
                rate = num_tokens / spent_s
                print(
                    f"{spent_s:.0f}s step {step} tokens {num_tokens} ({rate:.0f}/s) loss {loss.item():.3f}", flush=True
                )
            if step % 200 == 0:
                report(f"step {step}")
                save()
        report(f"stage {index} done at step {step}, {num_tokens} tokens")
    save()


if __name__ == "__main__":
    main()
