"""inferlab: measure compressed variants of a language model, and decide which one to serve."""

import os

# Libraries must not wait for a hub that may not be there; the hub source turns this off.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
