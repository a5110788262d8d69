"""Measures this project beside others: `python scripts/peers COMPARISON [options]`; --help after its name describes it.

Engines are compared only in turn within one run. A report goes to the file that -o names.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.peers import harness  # noqa: E402

COMPARISONS = {
    "wide-deep": "recommenders.wide_deep",
    "click-models": "recommenders.click_models",
    "dlrm-v2": "recommenders.dlrm_v2",
    "ranking": "recommenders.ranking",
    "tables": "recommenders.tables",
    "beyond-memory": "recommenders.beyond_memory",
    "deltas": "recommenders.deltas",
    "retrieval": "recommenders.retrieval",
    "runs": "recommenders.runs",
    "log-reading": "recommenders.log_reading",
    "images": "vision.images",
    "image-networks": "vision.image_networks",
    "vision": "quantization.vision",
    "own-models": "quantization.own_models",
    "exported": "quantization.exported",
    "compression": "compression.compression",
    "texts": "texts.texts",
    "max-sim": "texts.max_sim",
    "text-networks": "texts.networks",
    "translation": "translation.translation",
    "translation-rewrites": "translation.rewrites",
    "contexts": "serving.contexts",
    "serving": "serving.serving",
    "soak": "serving.soak",
    "ray-serve": "serving.ray_serve",
    "scan": "scan.scan",
    "cluster": "distributed.cluster",
    "communication": "distributed.communication",
}


def main() -> None:
    """Runs the comparison that the command line names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(f"{__doc__}\nComparisons: {', '.join(COMPARISONS)}")
        return
    with harness.one_line("scripts/peers"):
        harness.require_known("comparison", [name], COMPARISONS)
    harness.run(name, importlib.import_module(f"scripts.peers.{COMPARISONS[name]}"), sys.argv[2:])


if __name__ == "__main__":
    main()
