"""Two towers (Yi et al. 2019): users and items as vectors, from the columns of any log."""

from pipelines.models.entry import Entry, RunOption
from pipelines.quantization.recipe import QuantRecipe
from zoo.recommenders import BOUND, SUMMARY

ENTRY = Entry(
    name="two-tower",
    title="Two towers (Yi et al. 2019): users and items as vectors, from the columns of any log",
    task="clicks",
    train="zoo.two_tower.train:train",
    settings="zoo.two_tower.train:TRAIN",
    finetune_settings="zoo.two_tower.train:FINETUNE",
    freeze="zoo.two_tower.freeze:freeze",
    from_onnx="zoo.recommenders.importers.rankers:from_onnx",
    rewrites="zoo.recommenders.export.rewrites:passes",
    evaluate="zoo.recommenders.retrieval.metrics:evaluate",
    pipeline="zoo.recommenders.retrieval.inference:TwoTowerPipeline",
    checkpoint="model.pt",
    recipe=QuantRecipe(observer="minmax", correct=False, bound=BOUND),
    native="zoo.recommenders.lowering.lower:fold_program",
    network="zoo.two_tower.freeze:network",
    prune="zoo.recommenders.training.pruning:PrunableLog",
    files=("sample.csv.gz",),
    report_sections="zoo.recommenders.report_sections:sections",
    summary=SUMMARY,
    processes="torch",
    schema=True,
    run_options=(
        RunOption(
            "items",
            str,
            None,
            "A log with the items' columns: find the best of them for every row's user.",
            "{rows:,} rows, the best of {items:,} items each, {rows_per_second:,.0f} rows/s, {precision} in {engine}",
        ),
        RunOption("top", int, 10, "How many items are found for a user."),
        RunOption("faiss", str, None, "Look for them in an index of FAISS of this kind, as HNSW32: for millions."),
    ),
)
