"""nanoswe-trainer: SFT and GRPO for coding agents.

Reading order: algo (what is learned from what), data (where rows come from), loop_rl (a step),
worker, pack, logprob, model, engine/local; then loop (a whole run). Importing the package imports
nothing else.
"""

__version__ = "0.1.0"
