"""Everything a run needs before its first step: target, documents, vocabulary, head; held-out texts on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aquiline.backends.torch.eagle import DraftHead
from aquiline.config import Environment
from aquiline.engine.model import Loading, load_models
from aquiline.errors import CheckpointError
from aquiline.models.draft_config import read_draft_config
from aquiline.models.draft_vocabulary import choose_vocabulary
from aquiline.models.families import read_model_config
from aquiline.models.files import resolve
from aquiline.models.model_config import ModelConfig, default_capture
from aquiline.ops.allocator import keep_memory
from aquiline.train import start as starts
from aquiline.train.batches import Assembler, Batches, documents_of
from aquiline.train.checkpoint import Checkpoint, corpus_digest, settings_of
from aquiline.train.distributed import World
from aquiline.train.documents import Corpus, row_reader
from aquiline.train.master_weights import default_lr
from aquiline.train.readers import Split, check_paths, load_split
from aquiline.train.simulated_tau import TEMPERATURE, HeldOut, write_texts
from aquiline.train.start import for_long_contexts, loaded_head, shape_settings
from aquiline.train.teacher import FeatureCache, Teacher, View, Views, feature_scale
from aquiline.train.train_config import TrainConfig
from aquiline.types import Int32, Int64

SAMPLE_TOKENS = 16384
"""Positions of training text whose views a new draft is fitted to. The scale of the features and the target's most
frequent best tokens are measured on them too."""


@dataclass(frozen=True)
class Prepared:
    """A run ready to start."""

    teacher: Teacher
    head: DraftHead
    scale: Tensor
    assembler: Assembler
    batches: Batches
    held_out_corpus: Corpus
    settings: dict[str, Any]

    def held_out(self, config: TrainConfig) -> HeldOut:
        """Held-out texts: prompts that the target continues now, greedily and at a temperature. Takes a while."""
        num_new = min(config.eval_tokens, config.context // 2)
        prompts = prompts_of(self.held_out_corpus, config.eval_rows, config.context - num_new)
        models = self.teacher.models
        if models is None:  # the target trains on a GPU; the engine runs on the CPU
            models = load_models(config.target, None, Loading("bfloat16"), Environment.read())
        texts = [write_texts(models, prompts, num_new, temperature, config.seed) for temperature in (0.0, TEMPERATURE)]
        return HeldOut(self.assembler, [*texts[0], *texts[1]], config.ttt_steps)


def prepare(config: TrainConfig, start: Checkpoint | None, world: World, say: Callable[[str], None]) -> Prepared:
    """Load the target, read the documents, and make or load the draft; the same on every rank. start: the checkpoint
    that is resumed, None for a new run.

    Raises ValueError or CheckpointError for settings, data and checkpoints that cannot work."""
    check_paths((*config.data, *config.held_out))
    keep_memory()
    torch.manual_seed(config.seed)
    device = world.device
    path = resolve(config.target)
    geometry = read_model_config(path)
    stored = {} if start is None else start.state["settings"]
    capture = tuple(config.capture or stored.get("capture") or _default_capture(config, geometry))
    teacher = Teacher(path, capture, device, max(2048, config.context))
    reader = row_reader(path, geometry.vocab_size, geometry.bos_token_id, geometry.eos_token_ids, config.loss_on)
    split = load_split(config.data, config.held_out, reader)
    rows = config.batch_size * config.accumulate
    batches = Batches(split.train, config.context, rows, config.ttt_steps, config.seed)
    _say_data(config, split, batches, say)
    digest = target_digest(teacher)
    identity = {"target": digest, "layers": ",".join(map(str, capture)), "path": teacher.path}
    cache = None if config.features is None else FeatureCache(config.features, identity)
    views = Views(teacher.views, cache)
    if start is not None:
        head, scale = loaded_head(start.folder, teacher.decoder, config), start.state["scale"]
        head.fc.data /= scale
    else:
        head, scale = _begin(config, teacher, batches, views, reader.special, say)
    head = for_long_contexts(head, config)
    world.copy_from_first([scale, head.d2t, *(p for p in head.parameters() if p.requires_grad)])
    for parameter in _fusion(head) if config.keep_fusion else ():
        parameter.requires_grad_(False)
    head = head.to(device)
    assembler = Assembler(
        views, scale, head.target_ids(torch.arange(len(head.d2t), device=head.d2t.device)).cpu(), teacher.head, device
    )
    derived = {
        "lr": config.lr or default_lr(teacher.decoder), "target": digest, "capture": capture,
        "data": corpus_digest(split.train), "held_out": corpus_digest(split.held_out), **shape_settings(head),
        "draft_window": head.config.model.window(0), "rope_scaling": asdict(head.config.model.rope),
    }  # fmt: skip
    settings = settings_of(config, derived)
    return Prepared(teacher, head, scale.to(device), assembler, batches, split.held_out, settings)


def _say_data(config: TrainConfig, split: Split, batches: Batches, say: Callable[[str], None]) -> None:
    """Say what the data holds, what of it is not used, and how many tokens are replayed. Raises ValueError if a replay
    is asked for and no token can be replayed."""
    corpus, context = split.train, config.context
    say(
        f"{corpus.num_documents} documents, {int((np.diff(corpus.starts) > context).sum())} of them longer than "
        f"{context} tokens and cut; {len(corpus.tokens)} tokens, {corpus.mask.mean():.0%} counted; "
        f"{batches.steps_in_first_epoch} steps an epoch; held out {split.held_out.num_documents} documents"
    )
    if split.rejects.counts:
        say(f"not used: {split.rejects}")
    if config.replay == 1:
        return
    num = int((corpus.rejected & corpus.mask).sum())
    if not num:
        raise ValueError(
            f"replay={config.replay:g}: no row of the data says which tokens a draft missed; write rows that do with "
            "aquiline regenerate --draft, or drop --replay"
        )
    say(f"replay: {num} tokens ({num / corpus.mask.sum():.0%} of those counted) weigh {config.replay:g}")


def prompts_of(corpus: Corpus, number: int, longest: int) -> list[Int32]:
    """Prompts from held-out documents, a sample that is always the same. A prompt is the tokens before the first token
    that counts; where the first token counts already, it is the document's first half, `longest` tokens at most.

    Raises ValueError if no document gives a prompt of 1 to `longest` tokens."""
    prompts = []
    for start, end in zip(corpus.starts[:-1].tolist(), corpus.starts[1:].tolist(), strict=True):
        counted = np.flatnonzero(corpus.mask[start:end])
        length = int(counted[0]) if len(counted) and counted[0] > 0 else min((end - start) // 2, longest)
        if 0 < length <= longest:
            prompts.append(corpus.tokens[start : start + length])
    if not prompts:
        raise ValueError(f"no held-out document begins with 1 to {longest} tokens of prompt: raise context")
    order = np.random.default_rng(0).permutation(len(prompts))[:number]
    return [prompts[i] for i in sorted(order)]


def target_digest(teacher: Teacher) -> str:
    """A hash that tells targets apart by their weights, fine-tuned ones too: of some rows of the output matrix and of
    every layer. Checkpoints and feature caches store it. The same weights have the same digest whatever file they come
    from; `models.fingerprint` hashes files instead."""
    digest = hashlib.sha256()
    for matrix in (teacher.decoder.head, *(p for n, p in teacher.decoder.layers.named_parameters() if p.ndim == 2)):
        rows = matrix[:: max(1, len(matrix) // 16)]
        digest.update(rows.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _default_capture(config: TrainConfig, target: ModelConfig) -> tuple[int, ...]:
    """The layers that the draft of --init reads; for a new draft EAGLE-3's default."""
    if config.init is None:
        return default_capture(target.num_layers)
    return read_draft_config(config.init, target, norm_feedback=config.norm_feedback).capture


def _begin(
    config: TrainConfig, teacher: Teacher, batches: Batches, views: Views, special: tuple[int, ...],
    say: Callable[[str], None],
) -> tuple[DraftHead, Tensor]:  # fmt: skip
    """The draft of a new run, that of --init or a new one, and the scale of its features. The scale brings the target's
    features to unit size, which the draft expects.

    The vocabulary of a new draft is chosen from the data. It is never changed later, because each row of the head
    belongs to one token of it."""
    documents = _sampled(batches)
    seen = views.of(documents)
    scale = feature_scale(seen, len(teacher.capture))
    if config.init is not None:
        head = loaded_head(config.init, teacher.decoder, config)
        if head.config.norm_before_fc or head.config.fc_norm:
            scale = torch.ones_like(scale)  # the head norms its input itself
        for parameter in (head.embed, *(_fusion(head) if config.keep_fusion else ())):
            parameter.data = parameter.data.bfloat16().float()  # what does not train is as checkpoints will store it
        head.fc.data /= scale  # a saved draft takes raw features
        return head, scale
    counts = _counts(batches.corpus, seen, len(teacher.head))
    vocabulary = choose_vocabulary(counts, special, config.draft_vocab_size)
    say(f"draft vocabulary: {len(vocabulary.ids)} of {len(counts)} tokens cover {100 * vocabulary.coverage:.2f} %")
    if config.draft_vocab_size and vocabulary.coverage < 0.5:
        raise CheckpointError(f"draft_vocab_size={config.draft_vocab_size} covers under half of the text; raise it")
    head = starts.new_head(
        teacher.decoder, torch.from_numpy(vocabulary.ids).to(teacher.decoder.embed.device),
        intermediate_size=config.intermediate_size, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads,
        seed=config.seed,
    )  # fmt: skip
    starts.fit(head, documents, seen, scale)
    return head, scale


def _fusion(head: DraftHead) -> list[nn.Parameter]:
    """What a head fuses the target's features with: fc and the norms before it."""
    return [parameter for parameter in (head.fc, head.input_norm, head.fc_norm) if parameter is not None]


def _sampled(batches: Batches) -> list[Int32]:
    """Documents of the first steps, about SAMPLE_TOKENS in all."""
    documents: list[Int32] = []
    for step in range(batches.steps_in_first_epoch):
        if sum(map(len, documents)) >= SAMPLE_TOKENS:
            break
        documents += documents_of(batches.corpus, batches.at(step))
    return documents


def _counts(corpus: Corpus, views: list[View], vocab_size: int) -> Int64:
    """Weights [V] by which the vocabulary is chosen: how often a token is the target's best on a sample, plus how often
    it is counted in the corpus. Both parts have the same sum."""
    best = torch.bincount(torch.cat([view.best for view in views]).long(), minlength=vocab_size).numpy()
    seen = np.bincount(corpus.tokens[corpus.mask], minlength=vocab_size)
    counts: Int64 = np.round(1000 * (best + best.sum() / max(1, int(seen.sum())) * seen)).astype(np.int64)
    return counts
