"""Write the demo's prompts: excerpts of held-out standard-library files, by the rule of aquiline.bench.prompts.

python write_prompts.py --tokenizer target/tokenizer.json --out prompts.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from tokenizers import Tokenizer

from aquiline.bench.data.prompts import excerpts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json of the target")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    prompts = excerpts(Tokenizer.from_file(str(args.tokenizer)))
    args.out.write_text("".join(json.dumps(dataclasses.asdict(prompt)) + "\n" for prompt in prompts), encoding="utf-8")


if __name__ == "__main__":
    main()
