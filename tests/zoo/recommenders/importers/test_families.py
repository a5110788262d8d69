"""Families of imported rankers by the structure of their graphs."""

import pytest
from helpers.click_networks import Network

from zoo.recommenders.data.features import Features
from zoo.recommenders.data.schema import Schema
from zoo.recommenders.importers.families import family_of


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("autoint", layout) for layout in ("rows", "fuxictr", "deepctr", "flat")),
        *(("gdcn", layout) for layout in ("rows", "fuxictr")),
        *(("finalmlp", layout) for layout in ("rows", "constant", "heads")),
    ],
)
def test_networks_on_fields_are_known(family: str, layout: str) -> None:
    recognized, why, _ = family_of(Network(family, layout=layout).model, Features(Schema(())))
    assert recognized == family, why


@pytest.mark.parametrize("family", ["wide-deep", "deepfm", "dcn-v2", "dlrm"])
def test_other_networks_stay_what_they_are(family: str) -> None:
    recognized, why, _ = family_of(Network(family).model, Features(Schema(())))
    assert recognized == family, why
