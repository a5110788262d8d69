"""A family outside the tree, as small as one can be: the sum of the absolute values of eight numbers."""

from pipelines.models.entry import Entry, RunOption

ENTRY = Entry(
    name="toy-sums",
    title="Toy sums: the sum of the absolute values of eight numbers",
    task="sums",
    train="toy_sums.train:train",
    settings="toy_sums.train:TRAIN",
    finetune_settings="toy_sums.train:TRAIN",
    freeze="toy_sums.freeze:freeze",
    rewrites="toy_sums.rewrites:passes",
    evaluate="toy_sums.metrics:evaluate",
    pipeline="toy_sums.predict:SumPipeline",
    report_sections="toy_sums.report_sections:sections",
    checkpoint="model.npz",
    run_options=(RunOption("digits", int, 2, "places after the point."),),
    summary="{sums:,} sums, the largest {largest:.1f}, {precision} in {engine}",
)
