"""The process that trains a served pair's draft on what was served, and judges it before it may serve.

`python -m aquiline.train.learner DIR` waits until DIR/served has grown enough, trains one generation (generation.py) on
it and on the replay of what the draft was trained for (replay.py), and begins anew. The server starts, pauses and stops
the process (engine/learning). It may be killed at any moment: what it was at stands in DIR/unfinished, and goes on
from there.
"""
