import dataclasses
import sys

import pytest

from pipelines.core.errors import RequestError
from pipelines.models.entry import Entry, RunOption
from pipelines.quantization.recipe import OBSERVERS, QuantRecipe

PARTS = ("train", "settings", "finetune_settings", "freeze", "rewrites", "evaluate", "pipeline")


def entry(**changes):
    parts = dict.fromkeys(PARTS, "json:dumps")
    return Entry(**({"name": "wide-deep", "title": "t", "task": "clicks", "checkpoint": "c.h5"} | parts | changes))


def test_recipe_defaults_and_json():
    recipe = QuantRecipe()
    assert recipe.observer == "auto" and recipe.quantize_tables and not recipe.reduced_range
    flags = {
        "quantize_tables": True,
        "reduced_range": False,
        "symmetric": False,
        "search": False,
        "smooth": False,
        "correct": True,
    }
    assert recipe.to_json() == {"observer": "auto", "keep_float": [], "dynamic": [], **flags}
    assert recipe.same_but_observer(QuantRecipe(observer="kl", search=True).to_json())
    assert not recipe.same_but_observer(QuantRecipe(symmetric=True).to_json()) and not recipe.same_but_observer({})
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.observer = "kl"


def test_recipe_refuses_what_it_cannot_do():
    with pytest.raises(RequestError, match=f"unknown observer 'median'; choose one of {', '.join(OBSERVERS)}"):
        QuantRecipe(observer="median")
    with pytest.raises(RequestError, match=r"keep_float pattern '\(' is no regular expression"):
        QuantRecipe(keep_float=("fine", "("))


def test_keep_float_matches_whole_names():
    recipe = QuantRecipe(keep_float=("hidden_0/Add:0", "last.*"))
    assert recipe.keeps_float("hidden_0/Add:0") and recipe.keeps_float("last") and recipe.keeps_float("last_layer")
    assert (
        not recipe.keeps_float("hidden_0/Add:01")
        and not recipe.keeps_float("a/last")
        and not QuantRecipe().keeps_float("")
    )


def test_one_pattern_is_not_taken_for_its_letters():
    with pytest.raises(RequestError, match="keep_float is 'Gemm'"):
        QuantRecipe(keep_float="Gemm")


@pytest.mark.parametrize("name", ["Wide", "wide_deep", "", "-x", "a b"])
def test_entry_names(name):
    with pytest.raises(ValueError, match="must be lower-case words with hyphens"):
        entry(name=name)


@pytest.mark.parametrize("part", ["native", "harness", "from_graph", "report_sections"])
def test_parts_that_a_family_may_lack(part):
    assert getattr(entry(), part) == ""
    with pytest.raises(ValueError, match="wide-deep: 'json' is not 'module:attribute'"):
        entry(**{part: "json"})


def test_a_run_option_has_the_name_of_an_argument_and_a_kind_that_the_command_can_read():
    assert RunOption("n_best", int, 1, "so many.").default == 1
    for name, kind in (("n-best", int), ("beam", list)):
        with pytest.raises(ValueError, match=f"run option '{name}' must be a Python name"):
            RunOption(name, kind, None, "so many.")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("value", ["json", "json:dumps:x", ""])
def test_entry_parts_are_module_and_attribute(part, value):
    with pytest.raises(ValueError, match="wide-deep: .* is not 'module:attribute'"):
        entry(**{part: value})


def test_parts_are_imported_on_first_use(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "heavy_part.py").write_text("def train(): return 7")
    found = entry(train="heavy_part:train")
    assert "heavy_part" not in sys.modules
    assert found.part("train")() == 7
    del sys.modules["heavy_part"]


def test_a_missing_library_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needs_more.py").write_text("import no_such_library.inside")
    with pytest.raises(
        RequestError, match=r"train of wide-deep needs no_such_library, .*pip install 'int8-zoo\[train\]'"
    ):
        entry(train="needs_more:train").part("train")


def test_a_bug_of_ours_is_not_taken_for_a_missing_library():
    with pytest.raises(ModuleNotFoundError):
        entry(train="pipelines.nothing:train").part("train")
