"""The learner's own process with a checkpoint after every few steps: `python learner_process.py DIR`."""

from aquiline.train.learner import __main__ as process
from aquiline.train.learner import generation

if __name__ == "__main__":
    generation.SAVE_MINUTES, generation.RATE_SHARE = 1e-9, 10.0
    process.main()
