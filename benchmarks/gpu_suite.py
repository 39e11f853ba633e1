"""What half an hour on a GPU is for, in three parts of less than ten minutes.

    python benchmarks/gpu_suite.py --part 1 --out results/gpu

Part 1: the device's ceilings, the tests of kernels, decoding at Llama-3.1-8B's geometry beside its ideal, and that
drafting changes no bit. Part 2: the sweep of tiles (what `aquiline tune` does) over the shapes that read the most,
beside cuBLAS and SDPA, then part 1's decoding with the tiles found. Part 3: contexts, batches, chains and a tree; the
geometry of Qwen2.5-7B; gpt-oss-120b's attention and dense products.

Each cell is a file in OUT as soon as it ends; a later call skips those that exist. No cell is begun after --seconds.
Weights are random: with a tau that is named as simulated, rates are that tau over the measured time of a step, which
does not depend on what is accepted. --tiny runs the same cells over tiny shapes, in Triton's interpreter too
(TRITON_INTERPRET=1). The last thing printed is a table of all cells in OUT.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parent))

from gpu_decoding import Decoding, RandomPair, ms_of, ms_of_call

from aquiline.backends.gpu.gpu_pair import check_device
from aquiline.bench.suite.tile_tuning import by_key
from aquiline.bench.suite.tile_tuning import tune as tuned
from aquiline.bench.tables import NO_FIGURE, Table
from aquiline.bench.theory.ceilings import DATASHEETS, Ceilings, ceilings_of
from aquiline.bench.theory.choice import EXAMPLE_TAU, LimitsChoice
from aquiline.models.model_config import DraftConfig, ModelConfig, RopeConfig, default_capture
from aquiline.ops.triton.attention import AttentionTiles
from aquiline.ops.triton.launch import Launch
from aquiline.ops.triton.tile_table import TileEntry, TileKey, TileTable
from aquiline.ops.triton.tuning import TileUse, device_us, inventory
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft
from aquiline.writing import write_whole

LONGEST_CELL_S = 110
"""After which the tests of a file are given up."""
Cell = Callable[[], dict[str, Any]]
ROOT = Path(__file__).parent.parent
LLAMA_8B = ModelConfig(
    family="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
    num_kv_heads=8, head_dim=128, max_positions=131072, rms_norm_eps=1e-5, rope=RopeConfig(500000.0),
)  # fmt: skip
QWEN_7B = replace(
    LLAMA_8B, family="qwen2", vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_layers=28,
    num_heads=28, num_kv_heads=4, qkv_bias=True, rope=RopeConfig(1000000.0),
)  # fmt: skip
TINY = replace(
    LLAMA_8B, vocab_size=96, hidden_size=32, intermediate_size=32, num_layers=7, num_heads=2, num_kv_heads=1,
    head_dim=16, max_positions=512,
)  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """The shapes of a run. context: of part 1; contexts and batches: of part 3; bit_batches: of the test of bits, over
    as many steps; copied: bytes that the ceilings move; top: shapes that are tuned of each kind;
    tests: files of tests/gpu; heads and products: attention and dense linears [N, K] of gpt-oss-120b."""

    models: dict[str, ModelConfig]
    draft_vocab_size: int
    dtype: torch.dtype
    context: int
    contexts: Sequence[int]
    batches: Sequence[int]
    bit_batches: Sequence[int]
    num_steps: int
    copied: int
    top: int
    chains: Sequence[int]
    tree: Dynamic
    tests: str
    heads: tuple[int, ...]
    products: dict[str, tuple[int, int]]


FULL = Scale(
    {"8b": LLAMA_8B, "qwen2.5-7b": QWEN_7B}, 32000, torch.bfloat16, 8192, (8192, 16384, 32768), (1, 4), (1, 4, 8), 16,
    1 << 30, 4, (2, 3, 4, 5), Dynamic(5, 10, 60), "test_*.py",
    (64, 8, 64), {"qkv": (5120, 2880), "o": (2880, 4096)},
)  # fmt: skip
SMALL = Scale(
    {"8b": TINY, "qwen2.5-7b": replace(TINY, qkv_bias=True)}, 32, torch.float32, 64, (48,), (1,), (2,), 2, 1 << 20, 1,
    (2,), Dynamic(1, 2, 4), "test_launches.py", (2, 1, 16), {"qkv": (64, 32)},
)  # fmt: skip


class Suite:
    """The cells of all parts on one device, which share weights. out: where cells and the tuned tiles are."""

    def __init__(self, scale: Scale, out: Path, device: torch.device) -> None:
        self.scale, self.out, self.device = scale, out, device
        self._made: dict[str, RandomPair] = {}
        self.name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"

    @cached_property
    def ceilings(self) -> Ceilings:
        """A known card's datasheet; of any other device what part 1 measured."""
        known = next((key for key in DATASHEETS if key in self.name.lower().replace(" ", "")), None)
        dtype = str(self.scale.dtype).removeprefix("torch.")
        if known is not None:
            return ceilings_of(LimitsChoice(device=known), dtype, lambda stage: None)
        found = self.measure_ceilings()
        return ceilings_of(LimitsChoice(bandwidth=found["gb_per_s"], flops=found["tflops"]), dtype, lambda stage: None)

    def measure_ceilings(self) -> dict[str, Any]:
        """A copy's bandwidth, read and written, and the FLOPs of a square product."""
        size, n = self.scale.copied, int(self.scale.copied**0.5) // 4
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        a, b = (torch.randn(n, n, device=self.device).to(self.scale.dtype) for _ in range(2))
        out = torch.empty_like(a)
        copying = ms_of_call(lambda: target.copy_(source), self.device)
        multiplying = ms_of_call(lambda: torch.mm(a, b, out=out), self.device)
        return {"gb_per_s": 2 * size / copying / 1e6, "tflops": 2 * n**3 / multiplying / 1e9}

    def test_kernels(self, file: Path) -> dict[str, Any]:
        """A file of tests of kernels on this device, each against its twin or float64."""
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(file)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST_CELL_S, check=False)
        if done.returncode:
            raise RuntimeError(done.stdout[-2000:] or done.stderr[-2000:])
        return {"tests": done.stdout.strip().splitlines()[-1]}

    def table(self, is_tuned: bool) -> TileTable:
        """The tiles that part 2 found, or defaults; in the interpreter spans are short, which are slow there."""
        if is_tuned:
            return TileTable.of(self.name, self.out / "tiles.json")
        if self.device.type == "cuda":
            return TileTable(self.name)
        short = TileEntry(AttentionTiles(span=64, block=64), 0.0, 0.0)
        shape = TINY.num_heads, TINY.num_kv_heads, TINY.head_dim
        return TileTable(self.name, {TileKey.of("attention", shape, self.scale.dtype): short})

    def pair(self, model: str, is_tuned: bool = False) -> RandomPair:
        """A model and a draft of its width; the last one made is kept."""
        if model not in self._made:
            self._made.clear()  # so that two models are never on the device together
            target = self.scale.models[model]
            own = replace(target, num_layers=1, qkv_bias=False)
            capture = default_capture(target.num_layers)
            draft = DraftConfig(own, self.scale.draft_vocab_size, target.hidden_size, capture)
            self._made[model] = RandomPair.new(target, draft, self.scale.dtype, self.device, self.table(False))
        return replace(self._made[model], table=self.table(is_tuned))

    def decode(self, model: str, way: Drafting, batch: int, context: int, is_tuned: bool = False) -> dict[str, Any]:
        """The steps of one way to draft beside their ideal."""
        pair, steps = self.pair(model, is_tuned), self.scale.num_steps
        room = (way.max_depth + 1) * (2 * steps + 16) + way.max_nodes + 2 * way.lookahead
        found: dict[str, Any] = Decoding(pair, batch, context, room).measure(way, steps)
        tau = min(EXAMPLE_TAU, way.max_depth + 1.0)
        cycle = pair.roofline(self.ceilings).cycle(way, tau, batch, context)
        seconds = found["step_ms"] / 1e3
        found |= {"ideal_ms": 1e3 * cycle.seconds, "of_ideal": cycle.seconds / seconds, "tau": tau}
        found |= {"tau_is_simulated": way.is_speculative, "tokens_per_s": batch * tau / seconds}
        if way.is_speculative:
            found["draft_over_ideal"] = found["draft_ms"] / (1e3 * cycle.draft.seconds)
            found["rest_of_step"] = found["rest_ms"] / found["step_ms"]
        return found

    def compare_bits(self, batch: int, temperature: float) -> dict[str, Any]:
        """Whether a chain and plain decoding write the same texts."""
        texts = []
        for way, steps in ((NoDraft(), 2 * self.scale.num_steps), (Chain(3), self.scale.num_steps)):
            run = Decoding(self.pair("8b"), batch, self.scale.context, 8 * self.scale.num_steps + 16)
            texts.append(run.seat(way, temperature))
            run.decode(way, steps, texts[-1])
        pairs = [(plain[: len(own)], own[: len(plain)]) for plain, own in zip(*texts, strict=True)]
        if any(plain != own for plain, own in pairs):
            raise RuntimeError(f"drafting changed texts: {pairs}")
        return {"tokens_equal": sum(len(own) for _, own in pairs)}

    def uses(self) -> dict[TileKey, list[TileUse]]:
        """The shapes that part 2 tunes: those of a chain of 3 that read the most bytes, of each kind."""
        run = Decoding(self.pair("8b"), 1, self.scale.context, 64)
        run.decode(Chain(3), 1, run.seat(Chain(3), 0.0))
        found = inventory(launch for program in run.backend.programs.values() for launch in program.launches)
        kinds = ("attention", "head", "linear")
        return {key: uses for kind in kinds for key, uses in by_key(found, (kind,), self.scale.top).items()}

    def tune(self, key: TileKey, uses: list[TileUse]) -> dict[str, Any]:
        """The fastest tiles of a key, into the table of OUT; and what torch's own kernels take for the same uses."""
        path = self.out / "tiles.json"
        timer = device_us if self.device.type == "cuda" else self.interpreted_us
        entry = tuned(TileTable.of(self.name, path), {key: uses}, timer, self.device, print)
        entry.write(path)
        own = entry.entries[key]
        beside = sum(use.count * self.torch_us(use) for use in uses)
        return {"us": own.us, "default_us": own.default_us, "torch_us": beside, "tiles": str(asdict(own.tiles))}

    def interpreted_us(self, launches: Sequence[Launch]) -> float:
        """A Timer where nothing is compiled."""
        return 1e3 * ms_of(launches, self.device, 1)

    def torch_us(self, use: TileUse) -> float:
        """cuBLAS's product of the same shapes, or SDPA over the same keys as if they lay together."""
        randn = partial(torch.randn, device=self.device, dtype=self.scale.dtype)
        if use.key.kind == "attention":
            heads, kv_heads, size = use.key.shape
            count = use.M // use.group
            q, k, v = (randn(count, *own, size) for own in ((heads, use.group), *[(kv_heads, use.context)] * 2))
            call: Callable[[], Tensor] = partial(scaled_dot_product_attention, q, k, v, enable_gqa=True)
        else:
            n, k_size = use.key.shape
            call = partial(torch.mm, randn(use.M, k_size), randn(n, k_size).T)
        return 1e3 * ms_of_call(call, self.device)

    def rate(self, use: TileUse) -> dict[str, Any]:
        """A kernel by itself beside the bandwidth."""
        tiles = self.table(False).tiles(use.key)
        ms = ms_of(use.launches(tiles, self.device), self.device)
        rate = use.least_bytes / ms / 1e6
        return {"us": 1e3 * ms, "gb_per_s": rate, "of_bandwidth": rate * 1e9 / self.ceilings.bandwidth.per_s}

    def part1(self) -> Iterator[tuple[str, Cell]]:
        """Names of cells, and what measures them."""
        yield "1-ceilings", self.measure_ceilings
        yield from self._decodes("1", is_tuned=False)
        for batch, temperature in product(self.scale.bit_batches, (0.0, 1.0)):
            yield f"1-bits-b{batch}-t{temperature:g}", partial(self.compare_bits, batch, temperature)
        for file in sorted((ROOT / "tests" / "gpu").glob(self.scale.tests)):
            yield f"1-kernels-{file.stem}", partial(self.test_kernels, file)

    def _decodes(self, part: str, *, is_tuned: bool) -> Iterator[tuple[str, Cell]]:
        for name, way in (("plain", NoDraft()), ("chain3", Chain(3))):
            yield f"{part}-8b-b1-{name}", partial(self.decode, "8b", way, 1, self.scale.context, is_tuned)

    def part2(self) -> Iterator[tuple[str, Cell]]:
        """See part1."""
        for key, uses in self.uses().items():
            yield f"2-tune-{key}".replace(" ", "-"), partial(self.tune, key, uses)
        yield from self._decodes("2", is_tuned=True)

    def part3(self) -> Iterator[tuple[str, Cell]]:
        """See part1."""
        scale = self.scale
        ways: dict[str, Drafting] = {"plain": NoDraft()} | {f"chain{n}": Chain(n) for n in scale.chains}
        ways |= {f"tree{scale.tree.num_nodes}": scale.tree}
        for context, batch, (name, way) in product(scale.contexts, scale.batches, ways.items()):
            yield f"3-8b-c{context}-b{batch}-{name}", partial(self.decode, "8b", way, batch, context)
        for name in ("plain", "chain3"):
            own = partial(self.decode, "qwen2.5-7b", Chain(3) if name == "chain3" else NoDraft(), 1, scale.context)
            yield f"3-qwen2.5-7b-b1-{name}", own
        for name, use in self.gpt_oss().items():
            yield f"3-gpt-oss-120b-{name}", partial(self.rate, use)

    def gpt_oss(self) -> dict[str, TileUse]:
        """Attention, with its window and without, and dense products of gpt-oss-120b for a chain of 3."""
        dtype, context = str(self.scale.dtype).removeprefix("torch."), self.scale.context
        heads = TileKey("attention", self.scale.heads, dtype)
        found = {f"attention-w{w}": TileUse(heads, 4, dtype, "ATTENTION", 4, context, w) for w in (0, 128)}
        products = {name: TileKey("linear", shape, dtype) for name, shape in self.scale.products.items()}
        return found | {name: TileUse(key, 4, dtype, "LINEAR") for name, key in products.items()}


def run_cells(suite: Suite, part: int, seconds: float) -> list[str]:
    """Measure the cells of a part that OUT lacks. Returns the names of those that it lacks still."""
    began, left = time.monotonic(), []
    cells = (suite.part1, suite.part2, suite.part3)[part - 1]()
    for name, measure in cells:
        file = suite.out / f"{name}.json"
        if file.exists():
            continue
        if time.monotonic() - began > seconds:
            left.append(name)
            continue
        gc.collect()  # backends are cycles: the last cell's keys and pair would stay on the device
        first = time.monotonic()
        try:
            found = measure()
        except (RuntimeError, ValueError, AssertionError, subprocess.TimeoutExpired) as error:
            print(f"{name}: {error}", file=sys.stderr)
            left.append(name)
            continue
        about = {"cell": name, "device": suite.name, "torch": torch.__version__, "triton": triton.__version__}
        record = about | found | {"took_s": time.monotonic() - first}
        write_whole(file, json.dumps(record, indent=1) + "\n", "The cell is not kept")
        print(f"{name}: {record['took_s']:.1f} s", file=sys.stderr)
    return left


def table_of(out: Path, left: Sequence[str]) -> Table:
    """All cells of a folder, and which are not measured."""
    about = ("device", "torch", "triton")
    records = [json.loads(file.read_text()) for file in sorted(out.glob("[123]-*.json"))]
    lines = [
        {
            name: f"{value:.4g}" if isinstance(value, float) else str(value)
            for name, value in own.items() if name not in about
        }
        for own in records
    ]  # fmt: skip
    facts = "; ".join(sorted({", ".join(own[name] for name in about) for own in records})) or NO_FIGURE
    notes = [f"not measured: {name}" for name in left]
    return Table.of_cells(lines or [{"cell": NO_FIGURE}], title="GPU", facts=facts, notes=notes)


def clocks() -> str:
    """Clocks and driver as found, as nvidia-smi tells them."""
    query = "name,driver_version,clocks.sm,clocks.mem,power.limit"
    return subprocess.check_output(["nvidia-smi", f"--query-gpu={query}", "--format=csv"], text=True)


def main() -> int:
    """Measure one part. Exit status 1 if cells are left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=(1, 2, 3), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the cells")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, in Triton's interpreter too")
    parser.add_argument("--seconds", type=float, default=420.0, help="no cell is begun later (default: 420)")
    own = parser.parse_args()
    device = "cpu" if own.tiny and os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    try:
        check_device(device)
    except ValueError as error:
        print(f"gpu_suite: {error}, with --tiny and TRITON_INTERPRET=1", file=sys.stderr)
        return 2
    own.out.mkdir(parents=True, exist_ok=True)
    if device == "cuda":
        (own.out / "device.txt").write_text(clocks())
    left = run_cells(Suite(SMALL if own.tiny else FULL, own.out, torch.device(device)), own.part, own.seconds)
    print(table_of(own.out, left).markdown())
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
