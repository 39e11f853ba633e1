"""The learner's own process with a checkpoint after every few steps: `python learner_process.py DIR`."""

from aquiline.train import prepare
from aquiline.train.learner import __main__ as process
from aquiline.train.learner import generation

if __name__ == "__main__":
    generation.SAVE_MINUTES = 1e-9
    prepare.default_lr = lambda target: 1e-2  # FAST in learning.py
    process.main()
