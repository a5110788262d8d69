"""DCN-V2 (Wang et al. 2021): click-through rate from the columns of any log."""

from pipelines.models.entry import Entry
from pipelines.quantization.recipe import QuantRecipe
from zoo.recommenders import BOUND, SUMMARY

ENTRY = Entry(
    name="dcn-v2",
    title="DCN-V2 (Wang et al. 2021): click-through rate from the columns of any log",
    task="clicks",
    train="zoo.dcn_v2.train:train",
    settings="zoo.dcn_v2.train:TRAIN",
    finetune_settings="zoo.dcn_v2.train:FINETUNE",
    freeze="zoo.dcn_v2.freeze:freeze",
    from_onnx="zoo.recommenders.importers.rankers:from_onnx",
    rewrites="zoo.recommenders.export.rewrites:passes",
    evaluate="zoo.recommenders.metrics:evaluate",
    pipeline="zoo.recommenders.log_pipeline:LogPipeline",
    checkpoint="model.pt",
    # what these read holds numbers beside products of embeddings, ten times as large; they are small
    recipe=QuantRecipe(
        observer="minmax", correct=False, keep_float=(r"cross\.[1-9].*\.v", "cross_output"), bound=BOUND
    ),
    native="zoo.recommenders.lowering.lower:fold_program",
    network="zoo.dcn_v2.freeze:network",
    prune="zoo.recommenders.training.pruning:PrunableLog",
    files=("sample.csv.gz",),
    report_sections="zoo.recommenders.report_sections:sections",
    summary=SUMMARY,
    processes="torch",
    schema=True,
)
