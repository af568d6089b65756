"""``python -m distprune``, and the command ``distprune``: one line where what they need is not installed."""

import importlib
import importlib.util
import os
import sys

from distprune.cli.launch import likely_rank

# What the extra ``hf`` brings and torch does not.
_NEEDED = ("typer", "rich", "tqdm", "transformers", "huggingface_hub", "safetensors", "xxhash")


def run() -> None:
    """Run the command and end the process; without the extra ``hf`` with exit code 2."""
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        if likely_rank(os.environ) == 0:
            said = "is" if len(missing) == 1 else "are"
            sys.stderr.write(
                f"error: the command line needs {', '.join(missing)}, which {said} not installed: "
                "pip install 'distprune[hf]'\n"
            )
        sys.exit(2)
    importlib.import_module("distprune.cli.main").run()


if __name__ == "__main__":
    run()
