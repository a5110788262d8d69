"""Families, their recipes and protocols."""

import dataclasses

import pytest
from helpers.three_lines import ThreeLines, entry

from pipelines.core.errors import RequestError
from pipelines.models.family import Family, Freezable, Lowerable, RunOption, Trainable
from pipelines.quantization.recipe import OBSERVERS, QuantRecipe


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
    kept, other = QuantRecipe(keep_float=("a|b", "c")), QuantRecipe(keep_float=("b",)).to_json()
    assert not kept.same_but_observer(other)
    assert kept.same_but_observer(other, {"b", "d"}) and not kept.same_but_observer(other, {"b", "c"})
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
def test_family_names(name):
    with pytest.raises(ValueError, match="must be lower-case words with hyphens"):
        entry(name=name)


def test_a_family_without_its_methods_is_refused():
    with pytest.raises(TypeError, match="abstract method '?passes"):

        class Half(ThreeLines):
            passes = Family.passes

        Half(name="half", title="t", task="none", checkpoint="c")


def test_what_a_family_can_do_is_asked_of_protocols():
    class Trained(ThreeLines, Trainable):
        def train_config(self):
            return QuantRecipe()

        def train(self, data, output, **options):
            return {}

    made = Trained(name="made", title="t", task="none", checkpoint="c")
    assert isinstance(made, Freezable) and isinstance(made, Trainable) and not isinstance(made, Lowerable)
    assert not isinstance(entry(), Trainable)
    assert made.finetune_config() == made.train_config() and not made.takes_schema and made.processes == ""


def test_a_run_option_has_the_name_of_an_argument_and_a_kind_that_the_command_can_read():
    assert RunOption("n_best", int, 1, "so many.").default == 1
    for name, kind in (("n-best", int), ("beam", list)):
        with pytest.raises(ValueError, match=f"run option '{name}' must be a Python name"):
            RunOption(name, kind, None, "so many.")


def test_a_missing_library_says_what_to_install():
    with (
        pytest.raises(RequestError, match=r"train of fake needs no_such_library, .*pip install 'int8-zoo\[train\]'"),
        entry().needs("train"),
    ):
        import no_such_library.inside  # noqa: F401


def test_a_bug_of_ours_is_not_taken_for_a_missing_library():
    with pytest.raises(ModuleNotFoundError), entry().needs("train"):
        import pipelines.nothing  # noqa: F401
